// Kernels for common/conv_pool.py: max-pooling (windows of 3x3, stride 2, padding 1), alone and together with the
// convolution before it (3x3, stride 1, padding 1). Frames are channels-last, [batch, height, width, channels].
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16;  // channels worked on at once
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
    operator float() const { return value; }
};

struct BFloat16 {
    uint16_t bits;
    static Floats load(const BFloat16* from) { return (Floats)(__builtin_convertvector(read<Shorts>(from), Ints) << 16); }
    static void store(Floats x, BFloat16* to) {  // rounds to nearest, ties to even
        Ints bits = (Ints)x, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        Ints nan = Ints{} + 0x7FC0;
        write(__builtin_convertvector(x == x ? rounded : nan, Shorts), to);
    }
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        return read<float>(&wide);
    }
};

// A frame's size, of its 16 channels that are worked on, and of the frame that pooling makes of it.
struct Size {
    int64_t height, width, channels;
    int64_t out_height() const { return (height + 1) / 2; }
    int64_t out_width() const { return (width + 1) / 2; }
    int64_t out(int64_t i, int64_t j) const { return (i * out_width() + j) * channels; }
};

struct Largest {
    Floats value;
    Ints where;  // in the window: 3 * row + column, the first if there are several
    void consider(Floats other, Ints there) {
        Ints take = (other > value) | (other != other);  // NaN is larger than all
        value = take ? other : value;
        where = take ? there : where;
    }
};

// Pool 16 channels. `row(h)` gives row h as a pointer to pixels that lie `stride` values apart; it is called for each row
// in turn, once. `taps` [out_height, out_width, channels] gets where the largest values were found; it may be null.
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

// The gradient of pooling for 16 channels of rows 2i and 2i + 1: that of each pixel is the sum of dy over the windows (at
// most four) that took their largest value from there. Windows (i, j), (i, j + 1), (i + 1, j) and (i + 1, j + 1) are all
// that reach into the 2x2 pixels from (2i, 2j). The last row and column may lie outside of the frame; they are written.
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

// 16 channels of row h of the convolution: `out` gets its pixels, and a few more up to a whole group of them.
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

// Add to `sums` [28] for row h what its gradient `dy` gives for the 27 weights of 16 channels.
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
#define SIZES int64_t batch, int64_t height, int64_t width, int64_t channels, int threads
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
