// Products of a few rows with a weight that is read once, from its first byte to its last.
//
// At few rows a product takes as long as the memory needs to hand out the weight, and a processor
// reads fastest from one place onwards. So the weight lies in blocks of BLOCK outputs, one input
// after the other, and a block's sums stay in registers for as many rows as there is room for.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int VECTORS = 2;
constexpr int BLOCK = VECTORS * LANES;
// Some registers are for the weight and the states.
constexpr int MAX_ROWS = (REGISTERS - 4) / VECTORS;
// How far ahead of its use the weight is asked for, in elements; about a page.
constexpr int AHEAD = 1024;

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct bfloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load(const bfloat16* from) {
    const Halves bits = *reinterpret_cast<const Halves*>(from);
    return reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
}

inline float widened(float value) { return value; }

inline float widened(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float value, float& to) { to = value; }

// To the nearest, ties to even; what is not a number stays one.
inline void narrow(float value, bfloat16& to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = is_nan ? (bits >> 16 | 0x40u) : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Rows are taken in groups of almost one size, `each` of them or one more.
struct Groups {
    int64_t count, each, larger;

    explicit Groups(int64_t rows)
        : count((rows + MAX_ROWS - 1) / MAX_ROWS), each(rows / count), larger(rows % count) {}

    int64_t begin(int64_t group) const { return group * each + std::min(group, larger); }
    int64_t size(int64_t group) const { return each + (group < larger); }
};

// What one call computes: a weight in blocks, (rows, outputs) results, and states, of which a group
// lies together, one input of all its rows after the other.
template <typename T>
struct Product {
    const float* states;
    const T* weight;
    const T* bias;
    T* results;
    Groups groups;
    int64_t inputs, outputs;

    // ROWS rows from `row` on times the block whose first output is `output`.
    template <int ROWS>
    void tile(int64_t row, int64_t output) const {
        Floats sums[ROWS][VECTORS] = {};
        const float* mine = states + row * inputs;
        const T* from = weight + output * inputs;
        for (int64_t input = 0; input < inputs; ++input, mine += ROWS, from += BLOCK) {
            Floats block[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                block[v] = load(from + v * LANES);
                __builtin_prefetch(from + v * LANES + AHEAD);
            }
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v) sums[r][v] += mine[r] * block[v];
        }
        const int64_t wanted = std::min<int64_t>(BLOCK, outputs - output);
        for (int r = 0; r < ROWS; ++r) {
            float found[BLOCK];
            std::memcpy(found, sums[r], sizeof found);
            T* to = results + (row + r) * outputs + output;
            for (int64_t i = 0; i < wanted; ++i)
                narrow(bias ? found[i] + widened(bias[output + i]) : found[i], to[i]);
        }
    }

    template <int ROWS = MAX_ROWS>
    void tiles(int64_t row, int64_t output, int64_t count) const {
        if constexpr (ROWS > 1)
            if (count < ROWS) return tiles<ROWS - 1>(row, output, count);
        tile<ROWS>(row, output);
    }

    void run(int threads) const {
        const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t index = 0; index < blocks; ++index)
            // For groups after the first the block is still near.
            for (int64_t group = 0; group < groups.count; ++group)
                tiles(groups.begin(group), index * BLOCK, groups.size(group));
    }
};

template <typename T>
void linear(const T* states, const T* weight, const T* bias, T* results, int64_t rows,
            int64_t inputs, int64_t outputs, int threads) {
    if (rows == 0) return;
    const Groups groups(rows);
    std::vector<float> grouped(rows * inputs);
    for (int64_t group = 0; group < groups.count; ++group) {
        const int64_t size = groups.size(group), begin = groups.begin(group) * inputs;
        for (int64_t r = 0; r < size; ++r)
            for (int64_t input = 0; input < inputs; ++input)
                grouped[begin + input * size + r] = widened(states[begin + r * inputs + input]);
    }
    Product<T>{grouped.data(), weight, bias, results, groups, inputs, outputs}.run(threads);
}

}  // namespace

extern "C" {

// In this order lie the inputs of so many outputs.
int block_size() { return BLOCK; }

void linear_float32(const float* states, const float* weight, const float* bias, float* results,
                    int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    linear(states, weight, bias, results, rows, inputs, outputs, threads);
}

void linear_bfloat16(const bfloat16* states, const bfloat16* weight, const bfloat16* bias,
                     bfloat16* results, int64_t rows, int64_t inputs, int64_t outputs,
                     int threads) {
    linear(states, weight, bias, results, rows, inputs, outputs, threads);
}

}  // extern "C"
