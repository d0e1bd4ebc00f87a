// Products of a few rows with a weight that is read once, from its first byte to its last.
//
// At few rows a product takes as long as the memory needs to hand out the weight, and a processor
// reads fastest from one place onwards. So the weight lies in blocks of BLOCK outputs, one input
// after the other, and a block's sums stay in registers for as many rows as there is room for.

#include <algorithm>
#include <vector>

#include "../vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int VECTORS = 2;
constexpr int BLOCK = VECTORS * LANES;
// A quarter of the registers is for the weight and the states.
constexpr int MAX_ROWS = REGISTERS * 3 / 4 / VECTORS;
// How far ahead of its use the weight is asked for, in bytes.
constexpr int AHEAD = 4096;

// How weights of one type meet states of another: INPUTS of them at a time.
template <typename T, typename W>
struct Step {
    static constexpr int INPUTS = 1;
    using State = float;

    static State state(const T* from, int64_t) { return widened(*from); }

    static Floats add(Floats sums, State state, const W* weights) {
        return sums + state * load(weights);
    }
};

#if defined(__AVX512BF16__)
// Two products and their sum in one instruction, for which states in float32 are rounded.
template <typename T>
struct Step<T, bfloat16> {
    static constexpr int INPUTS = 2;
    using State = uint32_t;

    static uint32_t bits(T value) {
        bfloat16 rounded;
        narrow(widened(value), rounded);
        return rounded.bits;
    }

    static State state(const T* from, int64_t left) {
        return bits(from[0]) | (left > 1 ? bits(from[1]) << 16 : 0u);
    }

    static Floats add(Floats sums, State state, const bfloat16* weights) {
        const auto pairs = (__m512bh)_mm512_set1_epi32(static_cast<int>(state));
        return _mm512_dpbf16_ps(sums, pairs, (__m512bh)_mm512_loadu_si512(weights));
    }
};
#endif

// Rows are taken in groups of almost one size, `each` of them or one more.
struct Groups {
    int64_t count, each, larger;

    explicit Groups(int64_t rows)
        : count((rows + MAX_ROWS - 1) / MAX_ROWS), each(rows / count), larger(rows % count) {}

    int64_t begin(int64_t group) const { return group * each + std::min(group, larger); }
    int64_t size(int64_t group) const { return each + (group < larger); }
};

// What one call computes: a weight in blocks, (rows, outputs) results, and states, of which a group
// lies together, one step of all its rows after the other.
template <typename T, typename W>
struct Product {
    using State = typename Step<T, W>::State;
    static constexpr int INPUTS = Step<T, W>::INPUTS;

    const State* states;
    const W* weight;
    const T* bias;
    T* results;
    Groups groups;
    int64_t steps, outputs;

    // ROWS rows from `row` on times the block whose first output is `output`.
    template <int ROWS>
    void tile(int64_t row, int64_t output) const {
        Floats sums[ROWS][VECTORS] = {};
        const State* mine = states + row * steps;
        const W* from = weight + output * steps * INPUTS;
        for (int64_t step = 0; step < steps; ++step, mine += ROWS, from += BLOCK * INPUTS) {
            for (int v = 0; v < VECTORS; ++v) {
                const W* weights = from + v * LANES * INPUTS;
                __builtin_prefetch(reinterpret_cast<const char*>(weights) + AHEAD);
                for (int r = 0; r < ROWS; ++r) sums[r][v] = Step<T, W>::add(sums[r][v], mine[r], weights);
            }
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

template <typename T, typename W>
void linear(const T* states, const W* weight, const T* bias, T* results, int64_t rows,
            int64_t inputs, int64_t outputs, int threads) {
    if (rows == 0) return;
    constexpr int INPUTS = Step<T, W>::INPUTS;
    const Groups groups(rows);
    const int64_t steps = (inputs + INPUTS - 1) / INPUTS;
    std::vector<typename Step<T, W>::State> grouped(rows * steps);
    auto to = grouped.begin();
    for (int64_t group = 0; group < groups.count; ++group) {
        const T* from = states + groups.begin(group) * inputs;
        for (int64_t input = 0; input < inputs; input += INPUTS)
            for (int64_t r = 0; r < groups.size(group); ++r)
                *to++ = Step<T, W>::state(from + r * inputs + input, inputs - input);
    }
    Product<T, W>{grouped.data(), weight, bias, results, groups, steps, outputs}.run(threads);
}

}  // namespace

#define LINEAR(NAME, STATES, WEIGHTS)                                                             \
    /* How many inputs of an output lie together. */                                              \
    int inputs_##NAME() { return Step<STATES, WEIGHTS>::INPUTS; }                                 \
    void linear_##NAME(const STATES* states, const WEIGHTS* weight, const STATES* bias,           \
                       STATES* results, int64_t rows, int64_t inputs, int64_t outputs,            \
                       int threads) {                                                             \
        linear(states, weight, bias, results, rows, inputs, outputs, threads);                    \
    }

extern "C" {

// A weight lies in blocks of so many outputs.
int block_size() { return BLOCK; }

LINEAR(float32, float, float)
LINEAR(bfloat16, bfloat16, bfloat16)
LINEAR(float32_by_bfloat16, float, bfloat16)

}  // extern "C"
