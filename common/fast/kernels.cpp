// Kernels for common/fast/kernels.py: max-pooling (windows of 3x3, stride 2, padding 1), convolution (3x3, stride 1,
// padding 1) with max-pooling after it, and residual blocks. Frames are channels-last, [batch, height, width, channels].
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;  // channels worked on at once
#else
constexpr int LANES = 8;  // GCC takes vectors wider than the processor's apart into numbers: five times as slow
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

template <typename V>
V read(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename V>
void write(V value, void* to) {
    std::memcpy(to, &value, sizeof value);
}

Floats at_least(Floats floor, Floats x) {  // NaN stays
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)floor, (__m512)x);
#else
    return x < floor ? floor : x;
#endif
}

struct Float32 {
    float value;
    static Floats load(const Float32* from) { return read<Floats>(from); }
    static void store(Floats x, Float32* to) { write(x, to); }
    operator float() const { return value; }
};

struct BFloat16 {
    uint16_t bits;
    static Floats load(const BFloat16* from) {
#ifdef __AVX512F__  // GCC 12 would convert each half by itself
        Ints wide = (Ints)_mm512_cvtepu16_epi32(read<__m256i>(from));
#else
        Ints wide = __builtin_convertvector(read<Shorts>(from), Ints);
#endif
        return (Floats)(wide << 16);
    }
    static void store(Floats x, BFloat16* to) {  // rounds to nearest, ties to even
#ifdef __AVX512BF16__
        write(_mm512_cvtneps_pbh((__m512)x), to);  // takes denormal numbers for zero
#else
        Ints bits = (Ints)x, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        Ints nan = Ints{} + 0x7FC0;
        write(__builtin_convertvector(x == x ? rounded : nan, Shorts), to);
#endif
    }
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        return read<float>(&wide);
    }
};

template <typename T>
Floats rounded(Floats x) {
    T values[LANES];
    T::store(x, values);
    return T::load(values);
}

// A frame's size, of its LANES channels that are worked on, and of the frame that pooling makes of it.
struct Size {
    int64_t height, width, channels;
    int64_t out_height() const { return (height + 1) / 2; }
    int64_t out_width() const { return (width + 1) / 2; }
    int64_t out(int64_t i, int64_t j) const { return (i * out_width() + j) * channels; }
};

struct Largest {
    Floats value;
    Ints where;  // in the window: 3 * row + column, of several the first (of several NaN the last)
    void consider(Floats other, Ints there) {
        Ints take = (other > value) | (other != other);  // NaN is larger than all
        value = take ? other : value;
        where = take ? there : where;
    }
};

// Pool LANES channels. `row(h)` gives row h as a pointer to pixels that lie `stride` values apart; it is called for each
// row in turn, once. `taps` [out_height, out_width, channels] gets where the largest values were found; it may be null.
template <typename In, typename Out, typename Row>
void pool(Row row, int64_t stride, Out* y, uint8_t* taps, const Size& size, std::vector<Largest>& scratch) {
    int64_t out_width = size.out_width();
    scratch.resize(3 * out_width);  // the largest of each three pixels side by side, of three rows
    for (int64_t i = 0; i < size.out_height(); i++) {
        for (int64_t h = 2 * i; h < 2 * i + 2 && h < size.height; h++) {
            const In* x = row(h);
            for (int64_t j = 0; j < out_width; j++) {
                int64_t first = j == 0 ? 0 : 2 * j - 1;
                Largest largest = {In::load(x + first * stride), Ints{} + (j == 0)};
                for (int64_t k = first + 1; k <= 2 * j + 1 && k < size.width; k++)
                    largest.consider(In::load(x + k * stride), Ints{} + int32_t(k - 2 * j + 1));
                scratch[h % 3 * out_width + j] = largest;
            }
        }
        for (int64_t j = 0; j < out_width; j++) {
            int64_t first = i == 0 ? 0 : 2 * i - 1;
            Largest largest = scratch[first % 3 * out_width + j];
            largest.where += i == 0 ? 3 : 0;
            for (int64_t h = first + 1; h <= 2 * i + 1 && h < size.height; h++) {
                const Largest& other = scratch[h % 3 * out_width + j];
                largest.consider(other.value, other.where + int32_t(3 * (h - 2 * i + 1)));
            }
            Out::store(largest.value, y + size.out(i, j));
            if (taps) write(__builtin_convertvector(largest.where, Bytes), taps + size.out(i, j));
        }
    }
}

// The gradient of pooling for LANES channels of rows 2i and 2i + 1: that of each pixel is the sum of dy over the windows
// (at most four) that took their largest value from there. Windows (i, j), (i, j + 1), (i + 1, j) and (i + 1, j + 1) are
// all that reach into the 2x2 pixels from (2i, 2j). `lower` is null where row 2i + 1 lies outside of the frame.
template <typename In, typename Out>
void unpool(const In* dy, const uint8_t* taps, int64_t i, Out* upper, Out* lower, int64_t stride, const Size& size) {
    struct Windows {  // (i, j) and (i + 1, j)
        Floats grad[2];
        Ints where[2];
        Floats part(int a, int tap) const { return where[a] == tap ? grad[a] : Floats{}; }
    };
    auto windows = [&](int64_t j) {
        Windows both;
        for (int a = 0; a < 2; a++) {
            bool inside = i + a < size.out_height() && j < size.out_width();
            int64_t at = inside ? size.out(i + a, j) : 0;
            both.grad[a] = In::load(dy + at);
            both.where[a] = inside ? __builtin_convertvector(read<Bytes>(taps + at), Ints) : Ints{} - 1;
        }
        return both;
    };
    Windows here = windows(0);
    for (int64_t j = 0; j < size.out_width(); j++) {
        Windows next = windows(j + 1);
        bool right = 2 * j + 1 < size.width, below = lower != nullptr;
        int64_t to = 2 * j * stride;
        Out::store(here.part(0, 4), upper + to);
        if (right) Out::store(here.part(0, 5) + next.part(0, 3), upper + to + stride);
        if (below) Out::store(here.part(0, 7) + here.part(1, 1), lower + to);
        if (right && below)
            Out::store(here.part(0, 8) + next.part(0, 6) + here.part(1, 2) + next.part(1, 0), lower + to + stride);
        here = next;
    }
}

template <typename T>
void pool_frame(const T* x, T* y, uint8_t* taps, const Size& size, std::vector<Largest>& scratch) {
    for (int64_t c = 0; c < size.channels; c += LANES) {
        auto row = [&](int64_t h) { return x + h * size.width * size.channels + c; };
        pool<T>(row, size.channels, y + c, taps ? taps + c : nullptr, size, scratch);
    }
}

template <typename T>
void unpool_frame(const T* dy, const uint8_t* taps, T* dx, const Size& size) {
    int64_t row = size.width * size.channels;
    for (int64_t i = 0; i < size.out_height(); i++)
        for (int64_t c = 0; c < size.channels; c += LANES) {
            T* upper = dx + 2 * i * row + c;
            T* lower = 2 * i + 1 < size.height ? upper + row : nullptr;
            unpool(dy + c, taps + c, i, upper, lower, size.channels, size);
        }
}

// ------------------------------------------------------------------------------------- the convolution of RGB frames

constexpr int RGB = 3, TAPS = 9 * RGB;
constexpr int AT_ONCE = 8;  // pixels worked on at once: enough sums to keep the multipliers busy

// A frame as float32 with zeros around it; rows are as long as whole groups of pixels need.
struct Padded {
    int64_t row;
    std::vector<float> values;

    explicit Padded(const Size& size)
        : row(((size.width + AT_ONCE - 1) / AT_ONCE * AT_ONCE + 2) * RGB), values((size.height + 2) * row) {}

    template <typename T>
    void fill(const T* x, const Size& size) {
        for (int64_t i = 0; i < size.height; i++)
            for (int64_t k = 0; k < size.width * RGB; k++)
                values[(i + 1) * row + RGB + k] = x[i * size.width * RGB + k];
    }
};

// LANES channels of row h of the convolution: `out` gets its pixels, and a few more up to a whole group of them.
void convolve_row(const Padded& x, int64_t h, const Floats* weights, Floats bias, Floats* out, int64_t width) {
    for (int64_t j = 0; j < width; j += AT_ONCE) {
        Floats sums[AT_ONCE];
        for (int p = 0; p < AT_ONCE; p++) sums[p] = bias;
        for (int a = 0; a < 3; a++) {
            const float* from = x.values.data() + (h + a) * x.row + j * RGB;
#pragma GCC unroll 9
            for (int k = 0; k < 3 * RGB; k++)
#pragma GCC unroll 8
                for (int p = 0; p < AT_ONCE; p++) sums[p] += weights[a * 3 * RGB + k] * from[p * RGB + k];
        }
        for (int p = 0; p < AT_ONCE; p++) out[j + p] = sums[p];
    }
}

// Add to `sums` [28] for row h what its gradient `dy` gives for the 27 weights of LANES channels.
void correlate_row(const Padded& x, int64_t h, const Floats* dy, Floats* sums, int64_t width) {
    for (int a = 0; a < 3; a++) {
        const float* from = x.values.data() + (h + a) * x.row;
        Floats nine[3 * RGB];
#pragma GCC unroll 9
        for (int k = 0; k < 3 * RGB; k++) nine[k] = sums[a * 3 * RGB + k];
        for (int64_t j = 0; j < width; j++)
#pragma GCC unroll 9
            for (int k = 0; k < 3 * RGB; k++) nine[k] += dy[j] * from[j * RGB + k];
#pragma GCC unroll 9
        for (int k = 0; k < 3 * RGB; k++) sums[a * 3 * RGB + k] = nine[k];
    }
}

// ----------------------------------------------------------------------------- Winograd convolution, 16 or 32 channels

// F(4x4, 3x3) of Lavin and Gray (2016, https://arxiv.org/abs/1509.09308): tiles of 6x6 pixels, which overlap by two, and
// filters each become 36 points. What these give, multiplied point by point and added up over the channels, becomes 4x4
// pixels: 36 multiplications in place of 144. All of it is computed in float32, and rounded once. Rounding errors are some
// ten times those of plain convolution in float32.
constexpr int POINTS = 36;
constexpr int STRIP = 32;                   // tiles worked on at once: their points stay in the second cache
constexpr int SUMS = LANES == 16 ? 16 : 8;  // vectors of sums that stay in registers

// From one point of a strip to the next. At a power of two, all 36 would compete for the same places in the nearest cache.
template <int CHANNELS>
constexpr int POINT = STRIP * CHANNELS + 16;

#define INLINE inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // GCC keeps in memory what a parallel region shares, and with it all that is inlined

// Numbers that begin at a cache line, zero at first.
struct Aligned {
    std::vector<Floats> values;
    explicit Aligned(int64_t size) : values((size + LANES - 1) / LANES) {}
    float* data() { return (float*)values.data(); }
    const float* data() const { return (const float*)values.data(); }
};

template <int N>
struct Line {
    Floats at[N];
};

Line<3> upper_points(Line<6> d) {  // the first half of the paper's B^T d
    Floats even = d.at[4] - 4 * d.at[2], odd = d.at[3] - 4 * d.at[1];
    return {4 * d.at[0] - 5 * d.at[2] + d.at[4], even + odd, even - odd};
}

Line<3> lower_points(Line<6> d) {  // and the second
    Floats near = d.at[4] - d.at[2], far = 2 * (d.at[3] - d.at[1]);
    return {near + far, near - far, 4 * d.at[1] - 5 * d.at[3] + d.at[5]};
}

Line<6> input_points(Line<6> d) {
    Line<3> upper = upper_points(d), lower = lower_points(d);
    return {upper.at[0], upper.at[1], upper.at[2], lower.at[0], lower.at[1], lower.at[2]};
}

Line<6> filter_points(Line<3> g) {  // G g
    Floats even = (g.at[0] + g.at[2]) / -6, odd = g.at[1] / -6;
    Floats near = g.at[0] / 24 + g.at[2] / 6, far = g.at[1] / 12;
    return {g.at[0] / 4, even + odd, even - odd, near + far, near - far, g.at[2]};
}

Line<4> output_pixels(Line<6> m) {  // A^T m
    Floats even = m.at[1] + m.at[2], odd = m.at[1] - m.at[2], near = m.at[3] + m.at[4], far = m.at[3] - m.at[4];
    return {m.at[0] + even + near, odd + 2 * far, even + 4 * near, odd + 8 * far + m.at[5]};
}

Line<6> output_gradient(Line<4> dy) {  // A dy
    Floats even = dy.at[0] + dy.at[2], odd = dy.at[1] + dy.at[3];
    Floats near = dy.at[0] + 4 * dy.at[2], far = 2 * dy.at[1] + 8 * dy.at[3];
    return {dy.at[0], even + odd, even - odd, near + far, near - far, dy.at[3]};
}

Line<3> filter_gradient(Line<6> du) {  // G^T du
    Floats even = du.at[1] + du.at[2], odd = du.at[1] - du.at[2], near = du.at[3] + du.at[4], far = du.at[3] - du.at[4];
    return {du.at[0] / 4 - even / 6 + near / 24, far / 12 - odd / 6, near / 6 - even / 6 + du.at[5]};
}

// Apply one of these functions to column `b` of what `get(row, column)` returns.
template <int FROM, int TO, typename Get>
INLINE Line<TO> transform_column(Line<TO> (&function)(Line<FROM>), int b, Get get) {
    Line<FROM> column;
#pragma GCC unroll 6
    for (int a = 0; a < FROM; a++) column.at[a] = get(a, b);
    return function(column);
}

// Apply one to each row of transformed columns; `put(row, column, value)` takes the result.
template <int FROM, int ROWS, int TO, typename Put>
INLINE void transform_rows(Line<TO> (&function)(Line<FROM>), const Line<ROWS> (&columns)[FROM], Put put) {
#pragma GCC unroll 6
    for (int a = 0; a < ROWS; a++) {
        Line<FROM> row;
#pragma GCC unroll 6
        for (int b = 0; b < FROM; b++) row.at[b] = columns[b].at[a];
        Line<TO> result = function(row);
#pragma GCC unroll 6
        for (int b = 0; b < TO; b++) put(a, b, result.at[b]);
    }
}

template <int FROM, int TO, typename Get, typename Put>
INLINE void transform(Line<TO> (&function)(Line<FROM>), Get get, Put put) {
    Line<TO> columns[FROM];
#pragma GCC unroll 6
    for (int b = 0; b < FROM; b++) columns[b] = transform_column(function, b, get);
    transform_rows(function, columns, put);
}

// Frames that follow each other in memory. Their sides are multiples of 4.
struct Frames {
    int64_t count, height, width;
    int64_t pixels() const { return count * height * width; }
    int64_t tiles() const { return pixels() / 16; }
};

// A tile: the pixels from row i and column j of frame n on.
struct Tile {
    Frames frames;
    int64_t n = 0, i = 0, j = 0;

    int64_t pixel(int64_t row, int64_t column) const { return (n * frames.height + i + row) * frames.width + j + column; }
    void next() {
        j += 4;
        if (j == frames.width) j = 0, i += 4;
        if (i == frames.height) i = 0, n++;
    }
};

// Call `function(tile, tiles)` for each strip of tiles, with its first and their number.
template <typename Function>
void each_strip(Frames frames, Function function) {
    Tile tile{frames};
    for (int64_t first = 0; first < frames.tiles(); first += STRIP) {
        int64_t tiles = std::min<int64_t>(STRIP, frames.tiles() - first);
        function(tile, tiles);
        for (int64_t t = 0; t < tiles; t++) tile.next();
    }
}

// Three of the six rows of the points `v` of tiles of LANES channels: registers have no room for six.
template <typename T, int IN>
INLINE void transform_half(Line<3> (&half)(Line<6>), const T* x, Tile tile, int64_t tiles, Floats floor, float* v) {
    Line<3> columns[6];
    for (int64_t t = 0; t < tiles; t++, tile.next(), v += IN) {
        const T* from = x + tile.pixel(-1, -1) * IN;
        const int64_t row = tile.frames.width * IN;
        const bool top = tile.i == 0, bottom = tile.i + 4 == tile.frames.height;
        const bool left = tile.j == 0, right = tile.j + 4 == tile.frames.width;
        auto pixel = [&](int a, int b) {
            bool outside = (top && a == 0) || (bottom && a == 5) || (left && b == 0) || (right && b == 5);
            return outside ? Floats{} : at_least(floor, T::load(from + a * row + b * IN));
        };
        if (t == 0 || left) {
            columns[0] = transform_column(half, 0, pixel);
            columns[1] = transform_column(half, 1, pixel);
        } else {  // the tile before this one had them
            columns[0] = columns[4];
            columns[1] = columns[5];
        }
#pragma GCC unroll 4
        for (int b = 2; b < 6; b++) columns[b] = transform_column(half, b, pixel);
        transform_rows(input_points, columns, [&](int a, int b, Floats x) { write(x, v + (6 * a + b) * POINT<IN>); });
    }
}

// The points `v` [36, STRIP, IN] of a strip of frames `x`, or of relu(x), with zeros around each frame.
template <typename T, int IN>
APART void transform_tiles(const T* x, Tile tile, int64_t tiles, bool relu, float* v) {
    const Floats floor = relu ? Floats{} : Floats{} - std::numeric_limits<float>::infinity();
    for (int c = 0; c < IN; c += LANES) {
        transform_half<T, IN>(upper_points, x + c, tile, tiles, floor, v + c);
        transform_half<T, IN>(lower_points, x + c, tile, tiles, floor, v + c + 18 * POINT<IN>);
    }
}

// Filters [OUT, IN, 3, 3] as points [36, IN, OUT]; or for the gradient of the frames, with the roles of IN and OUT
// exchanged and rows and columns in reverse order, from filters [IN, OUT, 3, 3]. Filters are rounded to T.
template <typename T, int IN, int OUT>
Aligned transform_filters(const float* filters, bool transposed) {
    Aligned u(POINTS * IN * OUT);
    for (int in = 0; in < IN; in++)
        for (int out = 0; out < OUT; out += LANES) {
            auto get = [&](int a, int b) {
                Floats taps;
                for (int k = 0; k < LANES; k++)
                    taps[k] = transposed ? filters[(in * OUT + out + k) * 9 + 8 - (3 * a + b)]
                                         : filters[((out + k) * IN + in) * 9 + 3 * a + b];
                return rounded<T>(taps);
            };
            float* to = u.data() + in * OUT + out;
            transform(filter_points, get, [&](int a, int b, Floats x) { write(x, to + (6 * a + b) * IN * OUT); });
        }
    return u;
}

// What becomes of a convolution's sums: bias + sums, zero where `gate` is zero or negative, plus `residual`; each may be
// null.
template <typename T>
struct Epilogue {
    const float* bias;
    const T *gate, *residual;

    Floats start(int channel) const { return bias ? read<Floats>(bias + channel) : Floats{}; }
    void store(Floats sum, T* y, int64_t at) const {
        if (gate) sum = T::load(gate + at) <= 0 ? Floats{} : sum;
        if (residual) sum += T::load(residual + at);
        T::store(sum, y + at);
    }
};

// The pixels `y` of a strip, from the sums `m` [36, STRIP, OUT] of its points.
template <typename T, int OUT>
APART void transform_sums(const float* m, Tile tile, int64_t tiles, const Epilogue<T> epilogue, T* y) {
    for (int64_t t = 0; t < tiles; t++, tile.next(), m += OUT)
        for (int out = 0; out < OUT; out += LANES) {
            const int64_t to = tile.pixel(0, 0) * OUT + out, row = tile.frames.width * OUT;
            const Floats bias = epilogue.start(out);
            auto get = [&](int a, int b) { return read<Floats>(m + out + (6 * a + b) * POINT<OUT>); };
            auto put = [&](int a, int b, Floats sum) { epilogue.store(bias + sum, y, to + a * row + b * OUT); };
            transform(output_pixels, get, put);
        }
}

// The gradients `dm` [36, STRIP, OUT] of these sums from those of the pixels, which are added to `bias` [OUT].
template <typename T, int OUT>
APART void transform_gradients(const T* dy, Tile tile, int64_t tiles, float* dm, float* bias) {
    for (int64_t t = 0; t < tiles; t++, tile.next(), dm += OUT)
        for (int out = 0; out < OUT; out += LANES) {
            const T* from = dy + tile.pixel(0, 0) * OUT + out;
            const int64_t row = tile.frames.width * OUT;
            Floats total = read<Floats>(bias + out);
            auto get = [&](int a, int b) {
                Floats gradient = T::load(from + a * row + b * OUT);
                total += gradient;
                return gradient;
            };
            auto put = [&](int a, int b, Floats x) { write(x, dm + out + (6 * a + b) * POINT<OUT>); };
            transform(output_gradient, get, put);
            write(total, bias + out);
        }
}

// A block of the matrix product of `a`, whose rows lie ROW numbers apart and columns COLUMN, and `b`, whose rows lie OUT
// apart: SUMS / BLOCKS rows of `a`, all of its `columns`, and BLOCKS * LANES columns of `b`. Written to `to`, or added to
// what is there.
template <int BLOCKS, int ROW, int COLUMN, int OUT>
inline void multiply_block(const float* a, const float* b, int64_t columns, float* to, bool add) {
    Floats sums[SUMS / BLOCKS][BLOCKS] = {};
#pragma GCC unroll 16
    for (int p = 0; p < SUMS / BLOCKS; p++)
        for (int c = 0; c < BLOCKS; c++)
            if (add) sums[p][c] = read<Floats>(to + p * OUT + c * LANES);
#pragma GCC unroll 4
    for (int64_t k = 0; k < columns; k++) {
        Floats own[BLOCKS];
        for (int c = 0; c < BLOCKS; c++) own[c] = read<Floats>(b + k * OUT + c * LANES);
#pragma GCC unroll 16
        for (int p = 0; p < SUMS / BLOCKS; p++)
            for (int c = 0; c < BLOCKS; c++) sums[p][c] += own[c] * a[p * ROW + k * COLUMN];
    }
#pragma GCC unroll 16
    for (int p = 0; p < SUMS / BLOCKS; p++)
        for (int c = 0; c < BLOCKS; c++) write(sums[p][c], to + p * OUT + c * LANES);
}

// Memory that comes next, fetched a little at a time while the processor multiplies, the last range first. A range may lie
// behind the end of its tensor: no matter.
struct Ahead {
    static constexpr int LINE = 64, AT_ONCE = 16;  // bytes, lines
    std::vector<std::pair<const char*, const char*>> ranges;

    void want(const void* from, int64_t bytes) { ranges.push_back({(const char*)from, (const char*)from + bytes}); }
    void fetch() {
        for (int line = 0; line < AT_ONCE && !ranges.empty(); line++) {
            auto& [at, end] = ranges.back();
            __builtin_prefetch(at);
            at += LINE;
            if (at >= end) ranges.pop_back();
        }
    }
};

// A thread's room for the points of a strip, before and after the products with the filters.
struct Room {
    Aligned v = Aligned(POINTS * POINT<32>), m = Aligned(POINTS * POINT<32>);
    Ahead ahead;
};

// The sums `m` of a strip from its points `v` and those of the filters. Of the last strip some have no meaning.
template <int IN, int OUT>
APART void multiply(const float* v, const float* u, float* m, int64_t tiles, Ahead& ahead) {
    constexpr int BLOCKS = std::min(2, OUT / LANES);
    for (int point = 0; point < POINTS; point++, v += POINT<IN>, m += POINT<OUT>, u += IN * OUT) {
        for (int out = 0; out < OUT; out += BLOCKS * LANES)
            for (int64_t t = 0; t < tiles; t += SUMS / BLOCKS)
                multiply_block<BLOCKS, IN, 1, OUT>(v + t * IN, u + out, IN, m + t * OUT + out, false);
        ahead.fetch();
    }
}

// Add to `du` [36, IN, OUT], the gradient of the filters' points, what a strip's points and gradients give.
template <int IN, int OUT>
APART void multiply_transposed(const float* v, const float* dm, float* du, int64_t tiles) {
    constexpr int BLOCKS = std::min(2, OUT / LANES);
    for (int point = 0; point < POINTS; point++, v += POINT<IN>, dm += POINT<OUT>, du += IN * OUT)
        for (int in = 0; in < IN; in += SUMS / BLOCKS)
            for (int out = 0; out < OUT; out += BLOCKS * LANES)
                multiply_block<BLOCKS, 1, IN, OUT>(v + in, dm + out, tiles, du + in * OUT + out, true);
}

// Convolve frames `x`, or relu(x), with filters that have been transformed.
template <typename T, int IN, int OUT>
void convolve(const T* x, const Aligned& u, Epilogue<T> epilogue, T* y, bool relu, Frames frames, Room& room) {
    each_strip(frames, [&](Tile tile, int64_t tiles) {
        transform_tiles<T, IN>(x, tile, tiles, relu, room.v.data());
        multiply<IN, OUT>(room.v.data(), u.data(), room.m.data(), tiles, room.ahead);
        transform_sums<T, OUT>(room.m.data(), tile, tiles, epilogue, y);
    });
}

// The gradients of filters and bias, added up frame by frame.
template <int IN, int OUT>
struct FilterGradient {
    Aligned du = Aligned(POINTS * IN * OUT), bias = Aligned(OUT);

    template <typename T>
    void add(const T* x, const T* dy, bool relu, Frames frames, Room& room) {
        each_strip(frames, [&](Tile tile, int64_t tiles) {
            transform_tiles<T, IN>(x, tile, tiles, relu, room.v.data());
            transform_gradients<T, OUT>(dy, tile, tiles, room.m.data(), bias.data());
            multiply_transposed<IN, OUT>(room.v.data(), room.m.data(), du.data(), tiles);
        });
    }
    // To `sums` [3, 3, IN, OUT] and `bias_sums` [OUT].
    void store(float* sums, float* bias_sums) const {
        for (int k = 0; k < IN * OUT; k += LANES) {
            auto get = [&](int a, int b) { return read<Floats>(du.data() + (6 * a + b) * IN * OUT + k); };
            auto put = [&](int a, int b, Floats x) { write(x, sums + (3 * a + b) * IN * OUT + k); };
            transform(filter_gradient, get, put);
        }
        std::copy(bias.data(), bias.data() + OUT, bias_sums);
    }
};

// How many frames go through a whole layer at once: a strip at least, and few enough to stay in the second cache.
int64_t frames_at_once(int64_t height, int64_t width) { return std::max<int64_t>(1, STRIP * 16 / (height * width)); }

// ------------------------------------------------------------------------------------------------------------- layers

template <typename T>
void pool_forward(const T* x, T* y, uint8_t* taps, int64_t batch, Size size, int threads) {
    int64_t in = size.height * size.width * size.channels, out = size.out(size.out_height(), 0);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Largest> scratch;
#pragma omp for
        for (int64_t n = 0; n < batch; n++) pool_frame(x + n * in, y + n * out, taps ? taps + n * out : nullptr, size, scratch);
    }
}

template <typename T>
void pool_backward(const T* dy, const uint8_t* taps, T* dx, int64_t batch, Size size, int threads) {
    int64_t in = size.height * size.width * size.channels, out = size.out(size.out_height(), 0);
#pragma omp parallel for num_threads(threads)
    for (int64_t n = 0; n < batch; n++) unpool_frame(dy + n * out, taps + n * out, dx + n * in, size);
}

// RGB frames, convolved and pooled row by row.
template <typename T>
void rgb_pool_forward(const T* x, const float* filters, const float* bias, T* y, uint8_t* taps, int64_t batch, Size size,
                      int threads) {
    int64_t in = size.height * size.width * RGB, out = size.out(size.out_height(), 0);
    std::vector<Floats> weights;  // for each LANES channels the 27 weights in the order of the pixels, and the bias
    for (int64_t c = 0; c < size.channels; c += LANES) {
        for (int k = 0; k < TAPS; k++) {
            Floats taps;
            for (int lane = 0; lane < LANES; lane++) taps[lane] = filters[(c + lane) * TAPS + k % RGB * 9 + k / RGB];
            weights.push_back(rounded<T>(taps));
        }
        weights.push_back(rounded<T>(read<Floats>(bias + c)));
    }
#pragma omp parallel num_threads(threads)
    {
        Padded padded(size);
        std::vector<Largest> scratch;
        std::vector<Floats> convolved(size.width + AT_ONCE);
#pragma omp for
        for (int64_t n = 0; n < batch; n++) {
            padded.fill(x + n * in, size);
            for (int64_t c = 0; c < size.channels; c += LANES) {
                const Floats* own = &weights[(TAPS + 1) * c / LANES];
                auto row = [&](int64_t h) {
                    convolve_row(padded, h, own, own[TAPS], convolved.data(), size.width);
                    return (const Float32*)convolved.data();
                };
                pool<Float32>(row, LANES, y + n * out + c, taps ? taps + n * out + c : nullptr, size, scratch);
            }
        }
    }
}

template <typename T>
void rgb_pool_backward(const T* x, const T* dy, const uint8_t* taps, float* sums, float* bias_sums, int64_t batch, Size size,
                       int threads) {
    int64_t in = size.height * size.width * RGB, out = size.out(size.out_height(), 0);
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {  // each adds up an equal share of the frames: the same every time
        Padded padded(size);
        std::vector<Floats> upper(size.width + 1), lower(size.width + 1), total((TAPS + 1) * size.channels / LANES);
        for (int64_t n = thread * batch / threads; n < (thread + 1) * batch / threads; n++) {
            padded.fill(x + n * in, size);
            for (int64_t c = 0; c < size.channels; c += LANES) {
                Floats* own = &total[(TAPS + 1) * c / LANES];
                for (int64_t i = 0; i < size.out_height(); i++) {
                    unpool(dy + n * out + c, taps + n * out + c, i, (Float32*)upper.data(), (Float32*)lower.data(), LANES, size);
                    correlate_row(padded, 2 * i, upper.data(), own, size.width);
                    if (2 * i + 1 < size.height) correlate_row(padded, 2 * i + 1, lower.data(), own, size.width);
                    for (int64_t j = 0; j < size.out_width(); j++) own[TAPS] += T::load(dy + n * out + size.out(i, j) + c);
                }
            }
        }
        for (int64_t c = 0; c < size.channels; c += LANES) {
            const Floats* own = &total[(TAPS + 1) * c / LANES];
            for (int k = 0; k < TAPS; k++) write(own[k], sums + (thread * TAPS + k) * size.channels + c);
            write(own[TAPS], bias_sums + thread * size.channels + c);
        }
    }
}

template <typename T, int IN, int OUT>
void conv_pool_forward(const T* x, const float* filters, const float* bias, T* y, uint8_t* taps, int64_t batch, Size size,
                       int threads) {
    const Aligned u = transform_filters<T, IN, OUT>(filters, false);
    const int64_t pixels = size.height * size.width, out = size.out(size.out_height(), 0);
    const int64_t at_once = frames_at_once(size.height, size.width);
#pragma omp parallel num_threads(threads)
    {
        Room room;
        std::vector<T> z(at_once * pixels * OUT);
        std::vector<Largest> scratch;
#pragma omp for
        for (int64_t first = 0; first < batch; first += at_once) {
            Frames frames{std::min(at_once, batch - first), size.height, size.width};
            convolve<T, IN, OUT>(x + first * pixels * IN, u, {bias, nullptr, nullptr}, z.data(), false, frames, room);
            for (int64_t n = 0; n < frames.count; n++) {
                int64_t to = (first + n) * out;
                pool_frame(z.data() + n * pixels * OUT, y + to, taps ? taps + to : nullptr, size, scratch);
            }
        }
    }
}

template <typename T, int IN, int OUT>
void conv_pool_backward(const T* x, const float* filters, const T* dy, const uint8_t* taps, T* dx, float* sums,
                        float* bias_sums, int64_t batch, Size size, int threads) {
    const Aligned u = transform_filters<T, OUT, IN>(filters, true);
    const int64_t pixels = size.height * size.width, out = size.out(size.out_height(), 0);
    const int64_t at_once = frames_at_once(size.height, size.width);
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {  // each adds up an equal share of the frames: the same every time
        Room room;
        FilterGradient<IN, OUT> gradient;
        std::vector<T> dz(at_once * pixels * OUT);
        const int64_t end = (thread + 1) * batch / threads;
        for (int64_t first = thread * batch / threads; first < end; first += at_once) {
            Frames frames{std::min(at_once, end - first), size.height, size.width};
            for (int64_t n = 0; n < frames.count; n++)
                unpool_frame(dy + (first + n) * out, taps + (first + n) * out, dz.data() + n * pixels * OUT, size);
            gradient.add(x + first * pixels * IN, dz.data(), false, frames, room);
            if (dx) convolve<T, OUT, IN>(dz.data(), u, {}, dx + first * pixels * IN, false, frames, room);
        }
        gradient.store(sums + thread * 9 * IN * OUT, bias_sums + thread * OUT);
    }
}

// Residual blocks: h = conv0(relu(x)), y = x + conv1(relu(h)).
template <typename T, int C>
void residual_forward(const T* x, const float* filters0, const float* bias0, const float* filters1, const float* bias1, T* h,
                      T* y, int64_t batch, int64_t height, int64_t width, int threads) {
    const Aligned u0 = transform_filters<T, C, C>(filters0, false), u1 = transform_filters<T, C, C>(filters1, false);
    const int64_t at_once = frames_at_once(height, width);
#pragma omp parallel num_threads(threads)
    {
        Room room;
#pragma omp for
        for (int64_t first = 0; first < batch; first += at_once) {
            Frames frames{std::min(at_once, batch - first), height, width};
            int64_t at = first * height * width * C, bytes = frames.pixels() * C * sizeof(T);
            room.ahead.ranges.clear();  // for want of time some may not have been fetched
            for (const T* each : {(const T*)y, (const T*)h, x}) room.ahead.want((const char*)(each + at) + bytes, bytes);
            convolve<T, C, C>(x + at, u0, {bias0, nullptr, nullptr}, h + at, true, frames, room);
            convolve<T, C, C>(h + at, u1, {bias1, nullptr, x + at}, y + at, true, frames, room);
        }
    }
}

template <typename T, int C>
void residual_backward(const T* x, const T* h, const T* dy, const float* filters0, const float* filters1, T* dx, float* sums0,
                       float* bias_sums0, float* sums1, float* bias_sums1, int64_t batch, int64_t height, int64_t width,
                       int threads) {
    const Aligned u0 = transform_filters<T, C, C>(filters0, true), u1 = transform_filters<T, C, C>(filters1, true);
    const int64_t at_once = frames_at_once(height, width);
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {  // each adds up an equal share of the frames: the same every time
        Room room;
        FilterGradient<C, C> gradient0, gradient1;
        std::vector<T> dh(at_once * height * width * C);
        const int64_t end = (thread + 1) * batch / threads;
        for (int64_t first = thread * batch / threads; first < end; first += at_once) {
            Frames frames{std::min(at_once, end - first), height, width};
            int64_t at = first * height * width * C, bytes = frames.pixels() * C * sizeof(T);
            room.ahead.ranges.clear();
            for (const T* each : {(const T*)dx, x, h, dy}) room.ahead.want((const char*)(each + at) + bytes, bytes);
            convolve<T, C, C>(dy + at, u1, {nullptr, h + at, nullptr}, dh.data(), false, frames, room);
            gradient1.add(h + at, dy + at, true, frames, room);
            convolve<T, C, C>(dh.data(), u0, {nullptr, x + at, dy + at}, dx + at, false, frames, room);
            gradient0.add(x + at, dh.data(), true, frames, room);
        }
        gradient0.store(sums0 + thread * 9 * C * C, bias_sums0 + thread * C);
        gradient1.store(sums1 + thread * 9 * C * C, bias_sums1 + thread * C);
    }
}

}  // namespace

// Filters are float32 [OUT, IN, 3, 3], their gradients `sums` [threads, 3, 3, IN, OUT], to be added up over the threads. OUT,
// `channels`, and the channels of pooled frames are multiples of 16; `taps` may be null in forward passes, and `dx`.
#define SIZES int64_t batch, int64_t height, int64_t width, int64_t channels, int64_t threads
#define GIVEN batch, Size{height, width, channels}, threads
#define FORWARD(T) const T *x, const float *filters, const float *bias, T *y, uint8_t *taps, SIZES
#define BACKWARD(T) const T *x, const float *filters, const T *dy, const uint8_t *taps, T *dx, float *sums, float *bias_sums, SIZES

#define POOLS(T, NAME)                                                                                                \
    extern "C" void pool_forward_##NAME(const T* x, T* y, uint8_t* taps, SIZES) { pool_forward(x, y, taps, GIVEN); }  \
    extern "C" void pool_backward_##NAME(const T* dy, const uint8_t* taps, T* dx, SIZES) {                            \
        pool_backward(dy, taps, dx, GIVEN);                                                                           \
    }                                                                                                                 \
    extern "C" void conv_pool_forward_3_##NAME(FORWARD(T)) { rgb_pool_forward(x, filters, bias, y, taps, GIVEN); }    \
    extern "C" void conv_pool_backward_3_##NAME(BACKWARD(T)) { rgb_pool_backward(x, dy, taps, sums, bias_sums, GIVEN); }

// Of frames with sides that are multiples of 4, and of 16 or 32 channels before and after.
#define CONVOLUTIONS(T, NAME, IN)                                                                                     \
    extern "C" void conv_pool_forward_##IN##_##NAME(FORWARD(T)) {                                                     \
        (channels == 16 ? conv_pool_forward<T, IN, 16> : conv_pool_forward<T, IN, 32>)(                               \
            x, filters, bias, y, taps, GIVEN);                                                                        \
    }                                                                                                                 \
    extern "C" void conv_pool_backward_##IN##_##NAME(BACKWARD(T)) {                                                   \
        (channels == 16 ? conv_pool_backward<T, IN, 16> : conv_pool_backward<T, IN, 32>)(                             \
            x, filters, dy, taps, dx, sums, bias_sums, GIVEN);                                                        \
    }                                                                                                                 \
    extern "C" void residual_forward_##IN##_##NAME(                                                                   \
        const T* x, const float* filters0, const float* bias0, const float* filters1, const float* bias1, T* h, T* y, \
        SIZES) {                                                                                                      \
        residual_forward<T, IN>(x, filters0, bias0, filters1, bias1, h, y, batch, height, width, threads);            \
    }                                                                                                                 \
    extern "C" void residual_backward_##IN##_##NAME(                                                                  \
        const T* x, const T* h, const T* dy, const float* filters0, const float* filters1, T* dx, float* sums0,       \
        float* bias_sums0, float* sums1, float* bias_sums1, SIZES) {                                                  \
        residual_backward<T, IN>(x, h, dy, filters0, filters1, dx, sums0, bias_sums0, sums1, bias_sums1, batch,       \
                                 height, width, threads);                                                             \
    }

#define ALL(T, NAME)          \
    POOLS(T, NAME)            \
    CONVOLUTIONS(T, NAME, 16) \
    CONVOLUTIONS(T, NAME, 32)

ALL(Float32, float32)
ALL(BFloat16, bfloat16)
