// Linear layers of a few rows, which are memory-bound. The weight is read once, from its first byte to
// its last, in blocks of BLOCK outputs, one input after the other. A block's sums stay in registers
// for as many rows as fit. Inputs are added in one order, so a result has the same bits for any
// number of rows, and one loop is used for all of them, long prompts included.

#include <algorithm>
#include <vector>

#include "../row_groups.h"
#include "../tiles.h"
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
    // Zeros are added to inputs up to a multiple of this.
    static constexpr int MULTIPLE = 1;
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
#if defined(HAS_TILES)
    static constexpr int MULTIPLE = 32;
#else
    static constexpr int MULTIPLE = INPUTS;
#endif
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

// Writes sums of the block whose first output is `output` to a row of results.
template <typename T>
inline void finish(const float* sums, const T* bias, T* results, int64_t output, int64_t outputs) {
    T found[BLOCK];
    const int64_t wanted = std::min<int64_t>(BLOCK, outputs - output);
    if (bias) {
        float added[BLOCK] = {};
        for (int64_t i = 0; i < wanted; ++i) added[i] = widened(bias[output + i]);
        for (int64_t i = 0; i < BLOCK; ++i) narrow(sums[i] + added[i], found[i]);
    } else {
        for (int64_t i = 0; i < BLOCK; ++i) narrow(sums[i], found[i]);
    }
    if (wanted == BLOCK)
        std::memcpy(results + output, found, sizeof found);
    else
        std::copy_n(found, wanted, results + output);
}

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
        for (int r = 0; r < ROWS; ++r) {
            float found[BLOCK];
            std::memcpy(found, sums[r], sizeof found);
            finish(found, bias, results + (row + r) * outputs, output, outputs);
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

#if defined(HAS_TILES)
static_assert(BLOCK == 2 * TILE_ROWS, "a block's outputs are those of two tiles");

const TileShapes TILE_SHAPES;

// Of a weight this much, in bytes, stays near while all rows are multiplied with it.
constexpr int64_t NEAR = 512 << 10;

// The same with matrix tiles: 16 rows times 16 outputs, 32 inputs at a time. Tiles of few rows are
// filled up with zeros, since memory takes longer than they do.
template <typename T>
struct TiledProduct {
    // Tiles of rows, of each all its inputs.
    const uint16_t* states;
    const bfloat16* weight;
    const T* bias;
    T* results;
    int64_t rows, depth, outputs;

    // One or two tiles of rows from `tile` on times the block whose first output is `output`.
    template <int COUNT>
    void tiles(int64_t tile, int64_t output) const {
        const uint16_t* one = states + tile * depth * TILE;
        const uint16_t* other = one + depth * TILE;
        const bfloat16* from = weight + output * depth * TILE_INPUTS;
        zero_sums<COUNT>();
        for (int64_t step = 0; step < depth; ++step, one += TILE, other += TILE, from += 2 * TILE) {
            // For tiles after the first the block is still near.
            if (tile == 0)
                for (int64_t i = 0; i < 2 * TILE; i += 32)
                    __builtin_prefetch(reinterpret_cast<const char*>(from + i) + AHEAD);
            add_products<COUNT>(one, other, from, from + TILE_INPUTS, 128);
        }
        alignas(64) float sums[COUNT * TILE_ROWS][BLOCK];
        store_sums<COUNT>(sums);
        const int64_t first = tile * TILE_ROWS, count = std::min<int64_t>(COUNT * TILE_ROWS, rows - first);
        for (int64_t r = 0; r < count; ++r)
            finish(sums[r], bias, results + (first + r) * outputs, output, outputs);
    }

    void run(int threads) const {
        const int64_t blocks = (outputs + BLOCK - 1) / BLOCK, count = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t fair = (blocks + threads - 1) / threads, block_bytes = depth * 2 * TILE * sizeof(bfloat16);
        const int64_t each = std::clamp<int64_t>(NEAR / block_bytes, 1, count > 2 ? fair : 1);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            _tile_loadconfig(&TILE_SHAPES);
#pragma omp for schedule(static)
            for (int64_t first = 0; first < blocks; first += each) {
                const int64_t last = std::min(first + each, blocks);
                for (int64_t tile = 0; tile < count; tile += 2)
                    for (int64_t index = first; index < last; ++index)
                        tile + 1 < count ? tiles<2>(tile, index * BLOCK) : tiles<1>(tile, index * BLOCK);
            }
            _tile_release();
        }
    }
};

template <typename T>
void tiled_linear(const T* states, const bfloat16* weight, const T* bias, T* results, int64_t rows,
                  int64_t inputs, int64_t outputs, int threads) {
    const int64_t depth = (inputs + TILE_INPUTS - 1) / TILE_INPUTS;
    std::vector<uint16_t> tiled((rows + TILE_ROWS - 1) / TILE_ROWS * depth * TILE);
    for (int64_t row = 0; row < rows; ++row, states += inputs) {
        uint16_t* to = tiled.data() + row / TILE_ROWS * depth * TILE + row % TILE_ROWS * TILE_INPUTS;
        for (int64_t input = 0; input < inputs; input += TILE_INPUTS, to += TILE) {
            const int64_t count = std::min<int64_t>(TILE_INPUTS, inputs - input);
            if constexpr (std::is_same_v<T, bfloat16>)
                std::memcpy(to, states + input, count * sizeof(T));
            else
                for (int64_t i = 0; i < count; ++i) to[i] = Step<T, bfloat16>::bits(states[input + i]);
        }
    }
    TiledProduct<T>{tiled.data(), weight, bias, results, rows, depth, outputs}.run(threads);
}
#endif

template <typename T, typename W>
void linear(const T* states, const W* weight, const T* bias, T* results, int64_t rows,
            int64_t inputs, int64_t outputs, int threads) {
    if (rows == 0) return;
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<W, bfloat16>)
        if (may_use_tiles())
            return tiled_linear(states, weight, bias, results, rows, inputs, outputs, threads);
#endif
    constexpr int INPUTS = Step<T, W>::INPUTS, MULTIPLE = Step<T, W>::MULTIPLE;
    const Groups groups(rows, MAX_ROWS);
    const int64_t steps = (inputs + MULTIPLE - 1) / MULTIPLE * MULTIPLE / INPUTS;
    std::vector<typename Step<T, W>::State> grouped(rows * steps);
    auto to = grouped.begin();
    for (int64_t group = 0; group < groups.count; ++group) {
        const T* from = states + groups.begin(group) * inputs;
        const auto end = to + groups.size(group) * steps;
        for (int64_t input = 0; input < inputs; input += INPUTS)
            for (int64_t r = 0; r < groups.size(group); ++r)
                *to++ = Step<T, W>::state(from + r * inputs + input, inputs - input);
        // Zeros follow.
        to = end;
    }
    Product<T, W>{grouped.data(), weight, bias, results, groups, steps, outputs}.run(threads);
}

}  // namespace

#define LINEAR(NAME, STATES, WEIGHTS)                                                             \
    /* How many inputs of an output lie together. */                                              \
    int inputs_##NAME() { return Step<STATES, WEIGHTS>::INPUTS; }                                 \
    /* Of what their number is a multiple, zeros included. */                                     \
    int multiple_##NAME() { return Step<STATES, WEIGHTS>::MULTIPLE; }                             \
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
LINEAR(float32_by_int8, float, int8_t)

}  // extern "C"
