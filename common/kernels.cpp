// Kernels for common/kernels.py: convolution (3x3, stride 1, padding 1), max-pooling (windows of 3x3, stride 2,
// padding 1), and both at once for RGB frames. Frames are channels-last, [batch, height, width, channels].
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX512BF16__
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

struct Float32 {
    float value;
    static Floats load(const Float32* from) { return read<Floats>(from); }
    static void store(Floats x, Float32* to) { write(x, to); }
    static void relu(const Float32* from, Float32* to) {
        Floats x = load(from);
        store(x < 0 ? Floats{} : x, to);  // NaN stays
    }
    operator float() const { return value; }
};

struct BFloat16 {
    uint16_t bits;
    static Ints load_bits(const BFloat16* from) { return __builtin_convertvector(read<Shorts>(from), Ints); }
    static Floats load(const BFloat16* from) { return (Floats)(load_bits(from) << 16); }
    static void store(Floats x, BFloat16* to) {  // rounds to nearest, ties to even
        Ints bits = (Ints)x, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        Ints nan = Ints{} + 0x7FC0;
        write(__builtin_convertvector(x == x ? rounded : nan, Shorts), to);
    }
    static void relu(const BFloat16* from, BFloat16* to) {
        Shorts bits = read<Shorts>(from);
        write((Shorts)((bits >= 0x8000) & (bits <= 0xFF80) ? Shorts{} : bits), to);  // -0 to -inf, not NaN
    }
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        return read<float>(&wide);
    }
};

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
void convolve(const Padded& x, int64_t h, const Floats* weights, Floats bias, Floats* out, int64_t width) {
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
void correlate(const Padded& x, int64_t h, const Floats* dy, Floats* sums, int64_t width) {
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

// ------------------------------------------------------------------------------------ convolution, 16 or 32 channels

// A frame with zeros around it, its negative values set to zero if `relu`.
template <typename T, int IN>
struct PaddedFrame {
    int64_t width;
    std::vector<T> values;

    PaddedFrame(int64_t height, int64_t width) : width(width), values((height + 2) * (width + 2) * IN + IN) {}

    void fill(const T* x, int64_t height, bool relu) {
        for (int64_t i = 0; i < height; i++) {
            T* to = at(i + 1, 1);
            const T* from = x + i * width * IN;
            if (!relu) std::memcpy(to, from, width * IN * sizeof(T));
            for (int64_t k = 0; relu && k < width * IN; k += LANES) T::relu(from + k, to + k);
        }
    }
    T* at(int64_t row, int64_t column) { return values.data() + (row * (width + 2) + column) * IN; }
};

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

// --------------------------------------------------------------------------------------- float32: Winograd convolution

// F(4x4, 3x3) of Lavin and Gray (2016, https://arxiv.org/abs/1509.09308): tiles of 6x6 pixels, which overlap by two, and
// filters each become 36 points. What these give, multiplied point by point and added up over the channels, becomes 4x4
// pixels: 36 multiplications in place of 144. Rounding errors are some ten times those of plain convolution.
constexpr int POINTS = 36;
constexpr int STRIP = 32;  // tiles worked on at once: their points stay in the second cache
constexpr int BLOCK = 4;   // tiles, or input channels, whose sums are in registers at once

template <int N>
struct Line {
    Floats at[N];
};

Line<6> input_points(Line<6> d) {  // the paper's B^T d
    Floats even = d.at[4] - 4 * d.at[2], odd = d.at[3] - 4 * d.at[1];
    Floats near = d.at[4] - d.at[2], far = 2 * (d.at[3] - d.at[1]);
    Floats first = 4 * d.at[0] - 5 * d.at[2] + d.at[4], last = 4 * d.at[1] - 5 * d.at[3] + d.at[5];
    return {first, even + odd, even - odd, near + far, near - far, last};
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

// Apply one of these functions to the columns and then to the rows of what `get(row, column)` returns; `put(row, column,
// value)` takes the result.
template <int FROM, int TO, typename Get, typename Put>
inline void transform(Line<TO> (&function)(Line<FROM>), Get get, Put put) {
    Line<TO> columns[FROM];
    for (int b = 0; b < FROM; b++) {
        Line<FROM> column;
        for (int a = 0; a < FROM; a++) column.at[a] = get(a, b);
        columns[b] = function(column);
    }
    for (int a = 0; a < TO; a++) {
        Line<FROM> row;
        for (int b = 0; b < FROM; b++) row.at[b] = columns[b].at[a];
        Line<TO> result = function(row);
        for (int b = 0; b < TO; b++) put(a, b, result.at[b]);
    }
}

// Some rows of tiles, enough for STRIP of them or the whole frame. Their points are [36, tiles, channels].
struct Strip {
    int64_t columns, rows, tiles;

    Strip(int64_t height, int64_t width) : columns(width / 4), rows(std::min(height / 4, (STRIP + columns - 1) / columns)) {
        tiles = (rows * columns + BLOCK - 1) / BLOCK * BLOCK;
    }
    // From one point to the next. At a power of two, all 36 would compete for the same places in the nearest cache.
    int64_t stride(int channels) const { return tiles * channels + 16; }

    int64_t tiles_from(int64_t row, int64_t height) const { return std::min(rows, height / 4 - row) * columns; }

    // Call `function(tile, i, j)` for those from this row of tiles on, which give the 4x4 pixels from (i, j) on.
    template <typename Function>
    void each_tile(int64_t row, int64_t height, Function function) const {
        for (int64_t t = 0; t < tiles_from(row, height); t++) function(t, 4 * (row + t / columns), 4 * (t % columns));
    }
};

// Filters [OUT, IN, 3, 3] as points [36, IN, OUT]; or for the gradient of the frames, with the roles of IN and OUT
// exchanged and rows and columns in reverse order, from filters [IN, OUT, 3, 3].
template <int IN, int OUT>
std::vector<float> transform_filters(const float* filters, bool transposed) {
    std::vector<float> u(POINTS * IN * OUT);
    for (int in = 0; in < IN; in++)
        for (int out = 0; out < OUT; out += LANES) {
            auto get = [&](int a, int b) {
                Floats taps;
                for (int k = 0; k < LANES; k++)
                    taps[k] = transposed ? filters[(in * OUT + out + k) * 9 + 8 - (3 * a + b)]
                                         : filters[((out + k) * IN + in) * 9 + 3 * a + b];
                return taps;
            };
            float* to = u.data() + in * OUT + out;
            transform(filter_points, get, [&](int a, int b, Floats x) { write(x, to + (6 * a + b) * IN * OUT); });
        }
    return u;
}

// The points `v` of the tiles in a strip that begins with this row of tiles.
template <int IN>
void transform_tiles(PaddedFrame<Float32, IN>& frame, const Strip& strip, int64_t row, int64_t height, float* v) {
    const int64_t width = frame.width + 2, stride = strip.stride(IN);
    strip.each_tile(row, height, [&](int64_t t, int64_t i, int64_t j) {
        for (int c = 0; c < IN; c += LANES) {
            const Float32* from = frame.at(i, j) + c;
            float* to = v + t * IN + c;
            transform(
                input_points, [&](int a, int b) { return Float32::load(from + (a * width + b) * IN); },
                [&](int a, int b, Floats x) { write(x, to + (6 * a + b) * stride); });
        }
    });
}

// A block of the matrix product of `a`, whose rows lie ROW numbers apart and columns COLUMN, and `b`, whose rows lie OUT
// apart: BLOCK rows of `a`, all of its `columns`, and BLOCKS * LANES columns of `b`. Written to `to`, or added to what is
// there.
template <int BLOCKS, int ROW, int COLUMN, int OUT>
inline void multiply_block(const float* a, const float* b, int64_t columns, float* to, bool add) {
    Floats sums[BLOCK][BLOCKS] = {};
#pragma GCC unroll 16
    for (int p = 0; p < BLOCK; p++)
        for (int c = 0; c < BLOCKS; c++)
            if (add) sums[p][c] = read<Floats>(to + p * OUT + c * LANES);
#pragma GCC unroll 4
    for (int64_t k = 0; k < columns; k++) {
        Floats own[BLOCKS];
        for (int c = 0; c < BLOCKS; c++) own[c] = read<Floats>(b + k * OUT + c * LANES);
#pragma GCC unroll 16
        for (int p = 0; p < BLOCK; p++)
            for (int c = 0; c < BLOCKS; c++) sums[p][c] += own[c] * a[p * ROW + k * COLUMN];
    }
#pragma GCC unroll 16
    for (int p = 0; p < BLOCK; p++)
        for (int c = 0; c < BLOCKS; c++) write(sums[p][c], to + p * OUT + c * LANES);
}

template <int IN, int OUT>
void convolve_frames(const Float32* x, const float* filters, Epilogue<Float32> epilogue, Float32* y, bool relu,
                     bool transposed, int64_t batch, int64_t height, int64_t width, int threads) {
    constexpr int BLOCKS = std::min(2, OUT / LANES);
    const std::vector<float> u = transform_filters<IN, OUT>(filters, transposed);
    const Strip strip(height, width);
#pragma omp parallel num_threads(threads)
    {
        PaddedFrame<Float32, IN> frame(height, width);
        std::vector<float> v(POINTS * strip.stride(IN)), m(POINTS * strip.stride(OUT));
#pragma omp for
        for (int64_t n = 0; n < batch; n++) {
            frame.fill(x + n * height * width * IN, height, relu);
            for (int64_t row = 0; row < height / 4; row += strip.rows) {
                transform_tiles(frame, strip, row, height, v.data());
                for (int point = 0; point < POINTS; point++)
                    for (int out = 0; out < OUT; out += BLOCKS * LANES)
                        for (int64_t t = 0; t < strip.tiles; t += BLOCK) {
                            const float* from = v.data() + point * strip.stride(IN) + t * IN;
                            const float* own = u.data() + point * IN * OUT + out;
                            float* to = m.data() + point * strip.stride(OUT) + t * OUT + out;
                            multiply_block<BLOCKS, IN, 1, OUT>(from, own, IN, to, false);
                        }
                strip.each_tile(row, height, [&](int64_t t, int64_t i, int64_t j) {
                    for (int out = 0; out < OUT; out += LANES) {
                        const float* from = m.data() + t * OUT + out;
                        int64_t to = ((n * height + i) * width + j) * OUT + out;
                        Floats bias = epilogue.start(out);
                        transform(
                            output_pixels,
                            [&](int a, int b) { return read<Floats>(from + (6 * a + b) * strip.stride(OUT)); },
                            [&](int a, int b, Floats sum) { epilogue.store(bias + sum, y, to + (a * width + b) * OUT); });
                    }
                });
            }
        }
    }
}

// Gradients of filters and bias: `sums` [threads, 3, 3, IN, OUT] and `bias_sums` [threads, OUT] are written.
template <int IN, int OUT>
void correlate_frames(const Float32* x, const Float32* dy, float* sums, float* bias_sums, bool relu, int64_t batch,
                      int64_t height, int64_t width, int threads) {
    constexpr int BLOCKS = std::min(2, OUT / LANES);
    const Strip strip(height, width);
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {  // each adds up an equal share of the frames: the same every time
        PaddedFrame<Float32, IN> frame(height, width);
        std::vector<float> v(POINTS * strip.stride(IN)), dm(POINTS * strip.stride(OUT)), du(POINTS * IN * OUT);
        Floats bias[OUT / LANES] = {};
        for (int64_t n = thread * batch / threads; n < (thread + 1) * batch / threads; n++) {
            frame.fill(x + n * height * width * IN, height, relu);
            for (int64_t row = 0; row < height / 4; row += strip.rows) {
                transform_tiles(frame, strip, row, height, v.data());
                strip.each_tile(row, height, [&](int64_t t, int64_t i, int64_t j) {
                    for (int out = 0; out < OUT; out += LANES) {
                        const Float32* from = dy + ((n * height + i) * width + j) * OUT + out;
                        float* to = dm.data() + t * OUT + out;
                        auto get = [&](int a, int b) {
                            Floats gradient = Float32::load(from + (a * width + b) * OUT);
                            bias[out / LANES] += gradient;
                            return gradient;
                        };
                        transform(output_gradient, get, [&](int a, int b, Floats value) {
                            write(value, to + (6 * a + b) * strip.stride(OUT));
                        });
                    }
                });
                for (int point = 0; point < POINTS; point++)
                    for (int in = 0; in < IN; in += BLOCK)
                        for (int out = 0; out < OUT; out += BLOCKS * LANES) {
                            const float* inputs = v.data() + point * strip.stride(IN) + in;
                            const float* outputs = dm.data() + point * strip.stride(OUT) + out;
                            float* to = du.data() + (point * IN + in) * OUT + out;
                            int64_t tiles = strip.tiles_from(row, height);
                            multiply_block<BLOCKS, 1, IN, OUT>(inputs, outputs, tiles, to, true);
                        }
            }
        }
        float* own = sums + thread * 9 * IN * OUT;
        for (int k = 0; k < IN * OUT; k += LANES)
            transform(
                filter_gradient, [&](int a, int b) { return read<Floats>(&du[(6 * a + b) * IN * OUT + k]); },
                [&](int a, int b, Floats value) { write(value, own + (3 * a + b) * IN * OUT + k); });
        for (int c = 0; c < OUT / LANES; c++) write(bias[c], bias_sums + thread * OUT + c * LANES);
    }
}

// --------------------------------------------------------------------------------- bfloat16: AVX-512's sums of products

#ifdef __AVX512BF16__

// The processor multiplies pairs of bfloat16 values, 16 pairs at a time, and adds the products to 16 float32 sums. A pair
// is kept in 32 bits, the first value in the lower half.
typedef int32_t Pair;

Ints pairs(const BFloat16* first, const BFloat16* second) {  // 16 of them
    return BFloat16::load_bits(first) | (BFloat16::load_bits(second) << 16);
}

void add_products(Floats& sums, Ints a, Pair b) {
    sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
}

// Filters float32 [OUT, IN, 3, 3] as pairs [3, 3, IN / 2, OUT], of two input channels; or for the gradient of the frames,
// with the roles of IN and OUT exchanged and rows and columns in reverse order, from filters [IN, OUT, 3, 3].
template <int IN, int OUT>
std::vector<Pair> pack(const float* filters, bool transposed) {
    auto value = [&](int out, int in, int tap) {
        float x = transposed ? filters[(in * OUT + out) * 9 + 8 - tap] : filters[(out * IN + in) * 9 + tap];
        uint32_t bits = read<uint32_t>(&x);
        return x == x ? (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 : 0x7FC0u;
    };
    std::vector<Pair> packed(9 * IN / 2 * OUT);
    for (int tap = 0; tap < 9; tap++)
        for (int in = 0; in < IN; in += 2)
            for (int out = 0; out < OUT; out++)
                packed[(tap * IN / 2 + in / 2) * OUT + out] = value(out, in, tap) | value(out, in + 1, tap) << 16;
    return packed;
}

template <int IN, int OUT>
void convolve_frames(const BFloat16* x, const float* filters, Epilogue<BFloat16> epilogue, BFloat16* y, bool relu,
                     bool transposed, int64_t batch, int64_t height, int64_t width, int threads) {
    constexpr int BLOCKS = OUT / LANES, PIXELS = 16 / BLOCKS;  // as many sums as registers hold beside their operands
    std::vector<Pair> weights = pack<IN, OUT>(filters, transposed);
#pragma omp parallel num_threads(threads)
    {
        PaddedFrame<BFloat16, IN> frame(height, width);
#pragma omp for
        for (int64_t n = 0; n < batch; n++) {
            frame.fill(x + n * height * width * IN, height, relu);
            for (int64_t i = 0; i < height; i++)
                for (int64_t j = 0; j < width; j += PIXELS) {
                    Floats sums[PIXELS][BLOCKS];
                    for (int p = 0; p < PIXELS; p++)
                        for (int c = 0; c < BLOCKS; c++)
                            sums[p][c] = epilogue.start(c * LANES);
                    for (int tap = 0; tap < 9; tap++) {
                        const BFloat16* from = frame.at(i + tap / 3, j + tap % 3);
                        const Pair* own = weights.data() + tap * IN / 2 * OUT;
#pragma GCC unroll 4
                        for (int k = 0; k < IN / 2; k++) {
                            Ints weight[BLOCKS];
                            for (int c = 0; c < BLOCKS; c++) weight[c] = read<Ints>(own + k * OUT + c * LANES);
#pragma GCC unroll 16
                            for (int p = 0; p < PIXELS; p++)
                                for (int c = 0; c < BLOCKS; c++)
                                    add_products(sums[p][c], weight[c], read<Pair>(from + p * IN + 2 * k));
                        }
                    }
                    int64_t at = ((n * height + i) * width + j) * OUT;
                    for (int p = 0; p < PIXELS; p++)
                        for (int c = 0; c < BLOCKS; c++, at += LANES) epilogue.store(sums[p][c], y, at);
                }
        }
    }
}

// Gradients of filters and bias: `sums` [threads, 3, 3, IN, OUT] and `bias_sums` [threads, OUT] are written.
template <int IN, int OUT>
void correlate_frames(const BFloat16* x, const BFloat16* dy, float* sums, float* bias_sums, bool relu, int64_t batch,
                      int64_t height, int64_t width, int threads) {
    constexpr int ROWS = 8;  // worked on at once, so that they stay in the nearest cache
    constexpr int BLOCKS = OUT / LANES, INPUTS = 16 / BLOCKS;
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {  // each adds up an equal share of the frames: the same every time
        PaddedFrame<BFloat16, IN> frame(height, width);
        std::vector<Pair> x_pairs((ROWS + 2) * (width + 2) * IN), dy_pairs(ROWS * width / 2 * OUT);
        std::vector<float> own(9 * IN * OUT);
        Floats bias[BLOCKS] = {};
        for (int64_t n = thread * batch / threads; n < (thread + 1) * batch / threads; n++) {
            frame.fill(x + n * height * width * IN, height, relu);
            for (int64_t first = 0; first < height; first += ROWS) {
                int64_t rows = height - first < ROWS ? height - first : ROWS;
                const BFloat16* from = frame.at(first, 0);  // pairs of neighbouring pixels, from each pixel on
                for (int64_t k = 0; k < (rows + 2) * (width + 2) * IN; k += LANES)
                    write(pairs(from + k, from + k + IN), &x_pairs[k]);
                const BFloat16* gradient = dy + (n * height + first) * width * OUT;  // and from each second pixel on
                for (int64_t k = 0; k < rows * width / 2 * OUT; k += LANES) {
                    const BFloat16* left = gradient + k / OUT * 2 * OUT + k % OUT;
                    write(pairs(left, left + OUT), &dy_pairs[k]);
                    bias[k % OUT / LANES] += BFloat16::load(left) + BFloat16::load(left + OUT);
                }
                for (int tap = 0; tap < 9; tap++)
                    for (int in = 0; in < IN; in += INPUTS) {
                        float* to = own.data() + (tap * IN + in) * OUT;
                        Floats part[INPUTS][BLOCKS];
#pragma GCC unroll 16
                        for (int k = 0; k < INPUTS; k++)
                            for (int c = 0; c < BLOCKS; c++) part[k][c] = read<Floats>(to + k * OUT + c * LANES);
                        for (int64_t i = 0; i < rows; i++) {
                            const Pair* inputs = &x_pairs[((i + tap / 3) * (width + 2) + tap % 3) * IN + in];
                            const Pair* outputs = &dy_pairs[i * width / 2 * OUT];
                            for (int64_t p = 0; p < width / 2; p++) {
                                Ints output[BLOCKS];
                                for (int c = 0; c < BLOCKS; c++) output[c] = read<Ints>(outputs + p * OUT + c * LANES);
#pragma GCC unroll 16
                                for (int k = 0; k < INPUTS; k++)
                                    for (int c = 0; c < BLOCKS; c++)
                                        add_products(part[k][c], output[c], inputs[2 * p * IN + k]);
                            }
                        }
#pragma GCC unroll 16
                        for (int k = 0; k < INPUTS; k++)
                            for (int c = 0; c < BLOCKS; c++) write(part[k][c], to + k * OUT + c * LANES);
                    }
            }
        }
        std::memcpy(sums + thread * 9 * IN * OUT, own.data(), own.size() * sizeof(float));
        for (int c = 0; c < BLOCKS; c++) write(bias[c], bias_sums + thread * OUT + c * LANES);
    }
}

#endif

// -------------------------------------------------------------------------------------------------- batches of frames

template <typename T>
void pool_forward(const T* x, T* y, uint8_t* taps, int64_t batch, Size size, int threads) {
    int64_t in = size.height * size.width * size.channels, out = size.out(size.out_height(), 0);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Largest> scratch;
#pragma omp for
        for (int64_t n = 0; n < batch; n++)
            for (int64_t c = 0; c < size.channels; c += LANES) {
                auto row = [&](int64_t h) { return x + n * in + h * size.width * size.channels + c; };
                pool<T>(row, size.channels, y + n * out + c, taps ? taps + n * out + c : nullptr, size, scratch);
            }
    }
}

template <typename T>
void pool_backward(const T* dy, const uint8_t* taps, T* dx, int64_t batch, Size size, int threads) {
    int64_t row = size.width * size.channels, out = size.out(size.out_height(), 0);
#pragma omp parallel for num_threads(threads)
    for (int64_t n = 0; n < batch; n++)
        for (int64_t i = 0; i < size.out_height(); i++)
            for (int64_t c = 0; c < size.channels; c += LANES) {
                T* upper = dx + (n * size.height + 2 * i) * row + c;
                T* lower = 2 * i + 1 < size.height ? upper + row : nullptr;
                unpool(dy + n * out + c, taps + n * out + c, i, upper, lower, size.channels, size);
            }
}

template <typename T>
void conv_pool_forward(const T* x, const float* weights, T* y, uint8_t* taps, int64_t batch, Size size, int threads) {
    int64_t in = size.height * size.width * RGB, out = size.out(size.out_height(), 0);
#pragma omp parallel num_threads(threads)
    {
        Padded padded(size);
        std::vector<Largest> scratch;
        std::vector<Floats> convolved(size.width + AT_ONCE);
#pragma omp for
        for (int64_t n = 0; n < batch; n++) {
            padded.fill(x + n * in, size);
            for (int64_t c = 0; c < size.channels; c += LANES) {
                Floats own[TAPS + 1];
                for (int k = 0; k <= TAPS; k++) own[k] = read<Floats>(weights + k * size.channels + c);
                auto row = [&](int64_t h) {
                    convolve(padded, h, own, own[TAPS], convolved.data(), size.width);
                    return (const Float32*)convolved.data();
                };
                pool<Float32>(row, LANES, y + n * out + c, taps ? taps + n * out + c : nullptr, size, scratch);
            }
        }
    }
}

template <typename T>
void conv_pool_backward(
    const T* x, const T* dy, const uint8_t* taps, float* sums, int64_t batch, Size size, int threads) {
    int64_t in = size.height * size.width * RGB, out = size.out(size.out_height(), 0);
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {  // each adds up an equal share of the frames: the same every time
        Padded padded(size);
        std::vector<Floats> upper(size.width + 1), lower(size.width + 1);
        for (int64_t n = thread * batch / threads; n < (thread + 1) * batch / threads; n++) {
            padded.fill(x + n * in, size);
            for (int64_t c = 0; c < size.channels; c += LANES) {
                Floats own[TAPS + 1] = {};
                for (int64_t i = 0; i < size.out_height(); i++) {
                    unpool(dy + n * out + c, taps + n * out + c, i, (Float32*)upper.data(), (Float32*)lower.data(), LANES, size);
                    correlate(padded, 2 * i, upper.data(), own, size.width);
                    if (2 * i + 1 < size.height) correlate(padded, 2 * i + 1, lower.data(), own, size.width);
                    for (int64_t j = 0; j < size.out_width(); j++) own[TAPS] += T::load(dy + n * out + size.out(i, j) + c);
                }
                for (int k = 0; k <= TAPS; k++) {
                    float* to = sums + (thread * (TAPS + 1) + k) * size.channels + c;
                    write(read<Floats>(to) + own[k], to);
                }
            }
        }
    }
}

}  // namespace

// `channels` is a multiple of 16, of the pooled frames and those that are pooled; `taps` may be null in forward passes.
// `weights` and `sums` are float32 [28, channels]: for each row, column and colour of the filters; the last is the bias.
// `sums` [threads, 28, channels] holds zeros at first.
#define SIZES int64_t batch, int64_t height, int64_t width, int64_t channels, int64_t threads
#define GIVEN batch, Size{height, width, channels}, threads
#define KERNELS(T, NAME)                                                                                             \
    extern "C" void pool_forward_##NAME(const T* x, T* y, uint8_t* taps, SIZES) { pool_forward(x, y, taps, GIVEN); } \
    extern "C" void pool_backward_##NAME(const T* dy, const uint8_t* taps, T* dx, SIZES) {                           \
        pool_backward(dy, taps, dx, GIVEN);                                                                          \
    }                                                                                                                \
    extern "C" void conv_pool_forward_##NAME(const T* x, const float* weights, T* y, uint8_t* taps, SIZES) {         \
        conv_pool_forward(x, weights, y, taps, GIVEN);                                                               \
    }                                                                                                                \
    extern "C" void conv_pool_backward_##NAME(const T* x, const T* dy, const uint8_t* taps, float* sums, SIZES) {    \
        conv_pool_backward(x, dy, taps, sums, GIVEN);                                                                \
    }

KERNELS(Float32, float32)
KERNELS(BFloat16, bfloat16)

// Filters are float32 [OUT, IN, 3, 3] (of the convolution that is meant, if `transposed`); see Epilogue for null pointers.
// In float32 height and width are multiples of 4; in bfloat16 the width is a multiple of 16, or of 8 for 32 channels.
#define CONVOLUTIONS(T, NAME, IN, OUT)                                                                                   \
    extern "C" void conv_forward_##IN##_##OUT##_##NAME(                                                                  \
        const T* x, const float* filters, const float* bias, const T* gate, const T* residual, T* y, int64_t relu,       \
        int64_t transposed, int64_t batch, int64_t height, int64_t width, int64_t threads) {                             \
        Epilogue<T> epilogue{bias, gate, residual};                                                                      \
        convolve_frames<IN, OUT>(x, filters, epilogue, y, relu, transposed, batch, height, width, threads);              \
    }                                                                                                                    \
    extern "C" void conv_backward_##IN##_##OUT##_##NAME(                                                                 \
        const T* x, const T* dy, float* sums, float* bias_sums, int64_t relu, int64_t batch, int64_t height,             \
        int64_t width, int64_t threads) {                                                                                \
        correlate_frames<IN, OUT>(x, dy, sums, bias_sums, relu, batch, height, width, threads);                          \
    }
#define ALL_CONVOLUTIONS(T, NAME) \
    CONVOLUTIONS(T, NAME, 16, 16) \
    CONVOLUTIONS(T, NAME, 16, 32) \
    CONVOLUTIONS(T, NAME, 32, 16) \
    CONVOLUTIONS(T, NAME, 32, 32)

ALL_CONVOLUTIONS(Float32, float32)
#ifdef __AVX512BF16__
ALL_CONVOLUTIONS(BFloat16, bfloat16)
#endif
