// Max-pooling of channels-last frames for common/max_pool.py: windows of 3x3, stride 2, padding 1. See there.
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int LANES = 16;  // channels worked on at once
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

template <typename V>
V read(const void* from) {
    V vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

struct Float32 {
    float value;
    static Floats load(const Float32* from) { return read<Floats>(from); }
    static void store(Floats x, Float32* to) { std::memcpy(to, &x, sizeof x); }
};

struct BFloat16 {
    uint16_t bits;
    static Floats load(const BFloat16* from) { return (Floats)(__builtin_convertvector(read<Shorts>(from), Ints) << 16); }
    static void store(Floats x, BFloat16* to) {  // rounds to nearest, ties to even
        Ints bits = (Ints)x, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        Ints nan = Ints{} + 0x7FC0;
        Shorts result = __builtin_convertvector(x == x ? rounded : nan, Shorts);
        std::memcpy(to, &result, sizeof result);
    }
};

// y[i, j] = the largest x of window (i, j), NaN if any is; taps[i, j] = where it was first found, 3 * row + column.
template <typename T>
void forward(const T* x, T* y, uint8_t* taps, int64_t height, int64_t width, int64_t channels) {
    int64_t out_height = (height + 1) / 2, out_width = (width + 1) / 2;
    for (int64_t i = 0; i < out_height; i++)
        for (int64_t j = 0; j < out_width; j++)
            for (int64_t c = 0; c < channels; c += LANES) {
                Floats best = Floats{} - std::numeric_limits<float>::infinity();
                Ints where = Ints{} + (i == 0 ? 3 : 0) + (j == 0 ? 1 : 0);  // the first in the window
                for (int64_t a = (i == 0); a < 3 && 2 * i - 1 + a < height; a++)
                    for (int64_t b = (j == 0); b < 3 && 2 * j - 1 + b < width; b++) {
                        Floats value = T::load(x + ((2 * i - 1 + a) * width + 2 * j - 1 + b) * channels + c);
                        Ints take = (value > best) | (value != value);
                        best = take ? value : best;
                        where = take ? Ints{} + int32_t(3 * a + b) : where;
                    }
                int64_t at = (i * out_width + j) * channels + c;
                T::store(best, y + at);
                if (taps) {
                    Bytes bytes = __builtin_convertvector(where, Bytes);
                    std::memcpy(taps + at, &bytes, sizeof bytes);
                }
            }
}

// dx[h, w] = the sum of dy over the windows (at most four) that took their largest value from there. Worked through in
// blocks of 2x2: the windows (i, j), (i, j + 1), (i + 1, j) and (i + 1, j + 1) are all that reach into block (i, j).
template <typename T>
void backward(const T* dy, const uint8_t* taps, T* dx, int64_t height, int64_t width, int64_t channels) {
    int64_t out_height = (height + 1) / 2, out_width = (width + 1) / 2;
    for (int64_t i = 0; i < out_height; i++)
        for (int64_t j = 0; j < out_width; j++)
            for (int64_t c = 0; c < channels; c += LANES) {
                Floats grad[2][2];
                Ints where[2][2];
                for (int a = 0; a < 2; a++)
                    for (int b = 0; b < 2; b++) {
                        bool inside = i + a < out_height && j + b < out_width;
                        int64_t at = inside ? ((i + a) * out_width + j + b) * channels + c : c;
                        where[a][b] = inside ? __builtin_convertvector(read<Bytes>(taps + at), Ints) : Ints{} - 1;
                        grad[a][b] = T::load(dy + at);
                    }
                auto part = [&](int a, int b, int tap) { return where[a][b] == tap ? grad[a][b] : Floats{}; };
                T* to = dx + (2 * i * width + 2 * j) * channels + c;
                bool right = 2 * j + 1 < width, below = 2 * i + 1 < height;
                T::store(part(0, 0, 4), to);
                if (right) T::store(part(0, 0, 5) + part(0, 1, 3), to + channels);
                if (below) T::store(part(0, 0, 7) + part(1, 0, 1), to + width * channels);
                if (right && below)
                    T::store(part(0, 0, 8) + part(0, 1, 6) + part(1, 0, 2) + part(1, 1, 0), to + (width + 1) * channels);
            }
}

}  // namespace

// Frames [batch, height, width, channels], channels a multiple of 16; `taps` may be null in the forward pass.
#define MAX_POOL(T, NAME)                                                                                             \
    extern "C" void forward_##NAME(const T* x, T* y, uint8_t* taps, int64_t batch, int64_t height, int64_t width,     \
                                   int64_t channels, int threads) {                                                   \
        int64_t in = height * width * channels, out = (height + 1) / 2 * ((width + 1) / 2) * channels;                \
        _Pragma("omp parallel for num_threads(threads)") for (int64_t n = 0; n < batch; n++)                          \
            forward(x + n * in, y + n * out, taps ? taps + n * out : nullptr, height, width, channels);               \
    }                                                                                                                 \
    extern "C" void backward_##NAME(const T* dy, const uint8_t* taps, T* dx, int64_t batch, int64_t height,           \
                                    int64_t width, int64_t channels, int threads) {                                   \
        int64_t in = height * width * channels, out = (height + 1) / 2 * ((width + 1) / 2) * channels;                \
        _Pragma("omp parallel for num_threads(threads)") for (int64_t n = 0; n < batch; n++)                          \
            backward(dy + n * out, taps + n * out, dx + n * in, height, width, channels);                             \
    }

MAX_POOL(Float32, float32)
MAX_POOL(BFloat16, bfloat16)
