// Linear layers of a few rows with 4-bit weights in the layout that bitsandbytes uses on processors
// with AVX512-BF16. Of every 32 outputs and two inputs the 64 codes lie in 32 bytes: the low halves
// belong to the first 16 outputs, the high halves to the others. Codes are expanded once for all
// rows of a group; sums of one scale block are multiplied by its scale. Without tiles, products are
// added in the order of the inputs.

#include <vector>

#include "../row_groups.h"
#include "../tiles.h"
#include "../vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define HAS_PAIRS
#endif

namespace {

constexpr int OUTPUTS = 32, HALF = OUTPUTS / 2;
// Two registers a row; a quarter is for codes, the table and states.
constexpr int MAX_ROWS = 12;
// Up to so many rows, sums of two scale blocks are added at a time: every addition waits for the one
// before it.
constexpr int FEW_ROWS = 2;
// Distance in bytes of the codes that are prefetched.
constexpr int AHEAD = 2048;

#if defined(HAS_PAIRS)
using Sums = __m512;

struct Table {
    __m512i values;

    explicit Table(const uint16_t* table)
        : values(_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)))) {}

    // Values of 16 outputs by two inputs, two times.
    void expand(const uint8_t* codes, __m512bh (&pairs)[2]) const {
        const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        // Only the low five bits select; both halves of `values` are the same.
        pairs[0] = (__m512bh)_mm512_permutexvar_epi16(wide, values);
        pairs[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), values);
    }
};

using Pairs = __m512bh;

inline Sums add(Sums sums, uint32_t states, Pairs pairs) {
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(static_cast<int>(states)), pairs);
}

inline Sums scaled(Sums sums, Sums part, const uint16_t* scales) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
    return _mm512_fmadd_ps(part, (__m512)_mm512_slli_epi32(bits, 16), sums);
}
#else
typedef float Sums __attribute__((vector_size(4 * HALF)));

struct Pairs {
    Sums first, second;
};

struct Table {
    float values[16];

    explicit Table(const uint16_t* table) {
        for (int i = 0; i < 16; ++i) values[i] = widened(bfloat16{table[i]});
    }

    void expand(const uint8_t* codes, Pairs (&pairs)[2]) const {
        for (int i = 0; i < HALF; ++i) {
            const uint8_t first = codes[2 * i], second = codes[2 * i + 1];
            pairs[0].first[i] = values[first & 15];
            pairs[0].second[i] = values[second & 15];
            pairs[1].first[i] = values[first >> 4];
            pairs[1].second[i] = values[second >> 4];
        }
    }
};

inline Sums add(Sums sums, uint32_t states, const Pairs& pairs) {
    const float first = widened(bfloat16{static_cast<uint16_t>(states)});
    const float second = widened(bfloat16{static_cast<uint16_t>(states >> 16)});
    return sums + pairs.second * second + pairs.first * first;
}

inline Sums scaled(Sums sums, Sums part, const uint16_t* scales) {
    for (int i = 0; i < HALF; ++i) sums[i] += part[i] * widened(bfloat16{scales[i]});
    return sums;
}
#endif

inline void write(const Sums (&sums)[2], bfloat16* to) {
    float found[OUTPUTS];
    std::memcpy(found, sums, sizeof found);
    for (int i = 0; i < OUTPUTS; ++i) narrow(found[i], to[i]);
}

// What one call computes. States are pairs of inputs; of a group of rows, one pair of all its rows
// lies after the other.
struct Product {
    const uint32_t* states;
    const uint8_t* codes;
    const uint16_t* scales;
    bfloat16* results;
    Table table;
    Groups groups;
    // Pairs of inputs: all, and those of one scale.
    int64_t steps, block, outputs;

    // ROWS rows from `row` on times the 32 outputs from `output` on.
    template <int ROWS>
    void tile(int64_t row, int64_t output) const {
        constexpr int BLOCKS = ROWS <= FEW_ROWS ? 2 : 1;
        Sums sums[ROWS][2] = {};
        int64_t begin = 0;
        for (; begin + BLOCKS * block <= steps; begin += BLOCKS * block) add_blocks<BLOCKS>(sums, row, output, begin);
        for (; begin < steps; begin += block) add_blocks<1>(sums, row, output, begin);
        for (int r = 0; r < ROWS; ++r) write(sums[r], results + (row + r) * outputs + output);
    }

    // Adds the products of BLOCKS scale blocks, from the pair of inputs `begin` on.
    template <int BLOCKS, int ROWS>
    void add_blocks(Sums (&sums)[ROWS][2], int64_t row, int64_t output, int64_t begin) const {
        Sums part[BLOCKS][ROWS][2] = {};
        const uint32_t* mine = states + row * steps + begin * ROWS;
        const uint8_t* from = codes + output * steps + begin * OUTPUTS;
        const uint8_t* next = from + AHEAD;
        for (int64_t step = 0; step < block; ++step, mine += ROWS, from += OUTPUTS, next += BLOCKS * OUTPUTS) {
            __builtin_prefetch(next);
            for (int b = 0; b < BLOCKS; ++b) {
                const uint32_t* of_block = mine + b * block * ROWS;
                Pairs pairs[2];
                table.expand(from + b * block * OUTPUTS, pairs);
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < 2; ++v) part[b][r][v] = add(part[b][r][v], of_block[r], pairs[v]);
            }
        }
        const uint16_t* scale = scales + begin / block * outputs + output;
        for (int b = 0; b < BLOCKS; ++b, scale += outputs)
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < 2; ++v) sums[r][v] = scaled(sums[r][v], part[b][r][v], scale + v * HALF);
    }

    template <int ROWS = MAX_ROWS>
    void tiles(int64_t row, int64_t output, int64_t count) const {
        if constexpr (ROWS > 1)
            if (count < ROWS) return tiles<ROWS - 1>(row, output, count);
        tile<ROWS>(row, output);
    }

    void run(int threads) const {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t output = 0; output < outputs; output += OUTPUTS)
            // For groups after the first the codes are in the cache.
            for (int64_t group = 0; group < groups.count; ++group)
                tiles(groups.begin(group), output, groups.size(group));
    }
};

#if defined(HAS_TILES)
// The same with matrix tiles: a tile of states by 16 outputs, 32 inputs at a time. Codes are expanded
// once for two tiles of states.
struct TiledProduct {
    // Tiles of rows, of each all its inputs.
    const uint16_t* states;
    const uint8_t* codes;
    const uint16_t* scales;
    bfloat16* results;
    Table table;
    // Pairs of inputs: all, and those of one scale.
    int64_t rows, steps, block, outputs;

    // One or two tiles of rows from `tile` on times the 32 outputs from `output` on.
    template <int COUNT>
    void tiles(int64_t tile, int64_t output) const {
        const int64_t first = tile * TILE_ROWS, count = std::min<int64_t>(COUNT * TILE_ROWS, rows - first);
        const uint16_t* one = states + first * 2 * steps;
        const uint16_t* other = one + TILE_ROWS * 2 * steps;
        const uint8_t* from = codes + output * steps;
        const uint16_t* scale = scales + output;
        alignas(64) Sums sums[COUNT * TILE_ROWS][2] = {};
        alignas(64) float part[COUNT * TILE_ROWS][OUTPUTS];
        // Two, so that one is filled while the other is read.
        alignas(64) uint16_t expanded[2][2][TILE];
        for (int64_t begin = 0; begin < steps; begin += block, scale += outputs) {
            zero_sums<COUNT>();
            for (int64_t step = 0; step < block; step += TILE_ROWS, one += TILE, other += TILE) {
                auto& values = expanded[step / TILE_ROWS % 2];
                for (int i = 0; i < TILE_ROWS; ++i, from += OUTPUTS) {
                    Pairs pairs[2];
                    __builtin_prefetch(from + AHEAD);
                    table.expand(from, pairs);
                    for (int v = 0; v < 2; ++v) std::memcpy(values[v] + i * TILE_INPUTS, &pairs[v], sizeof pairs[v]);
                }
                add_products<COUNT>(one, other, values[0], values[1], 64);
            }
            store_sums<COUNT>(part);
            for (int64_t r = 0; r < count; ++r)
                for (int v = 0; v < 2; ++v)
                    sums[r][v] = scaled(sums[r][v], _mm512_load_ps(part[r] + v * HALF), scale + v * HALF);
        }
        for (int64_t r = 0; r < count; ++r) write(sums[r], results + (first + r) * outputs + output);
    }

    void run(int threads) const {
        const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
        TileShapes shapes;
        // Rows that are not there cost time, too.
        if (count == 1) shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = static_cast<uint8_t>(rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            _tile_loadconfig(&shapes);
#pragma omp for schedule(static)
            for (int64_t output = 0; output < outputs; output += OUTPUTS)
                for (int64_t tile = 0; tile < count; tile += 2)
                    tile + 1 < count ? tiles<2>(tile, output) : tiles<1>(tile, output);
            _tile_release();
        }
    }
};

std::vector<uint16_t> tiled(const uint16_t* states, int64_t rows, int64_t inputs) {
    std::vector<uint16_t> result((rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * inputs);
    for (int64_t row = 0; row < rows; ++row, states += inputs) {
        uint16_t* to = result.data() + row / TILE_ROWS * TILE_ROWS * inputs + row % TILE_ROWS * TILE_INPUTS;
        for (int64_t input = 0; input < inputs; input += TILE_INPUTS, to += TILE)
            std::memcpy(to, states + input, TILE_INPUTS * sizeof(uint16_t));
    }
    return result;
}
#endif

}  // namespace

extern "C" {

// `outputs` is a multiple of 32 and `inputs` of `block`, which is even.
void four_bit_linear(const uint16_t* states, const uint8_t* codes, const uint16_t* scales, const uint16_t* table,
                     bfloat16* results, int64_t rows, int64_t inputs, int64_t outputs, int64_t block, int threads) {
    if (rows == 0) return;
    const int64_t steps = inputs / 2;
#if defined(HAS_TILES)
    if (block % TILE_INPUTS == 0 && may_use_tiles()) {
        const std::vector<uint16_t> together = tiled(states, rows, inputs);
        TiledProduct{together.data(), codes, scales, results, Table(table), rows, steps, block / 2, outputs}.run(threads);
        return;
    }
#endif
    const Groups groups(rows, MAX_ROWS);
    std::vector<uint32_t> grouped(rows * steps);
    auto to = grouped.begin();
    for (int64_t group = 0; group < groups.count; ++group) {
        const uint16_t* from = states + groups.begin(group) * inputs;
        for (int64_t step = 0; step < steps; ++step)
            for (int64_t r = 0; r < groups.size(group); ++r)
                std::memcpy(&*to++, from + r * inputs + 2 * step, sizeof(uint32_t));
    }
    Product{grouped.data(), codes, scales, results, Table(table), groups, steps, block / 2, outputs}.run(threads);
}

// A weight as decoder layers hold it; its arrays are those of `four_bit_linear`.
struct FourBitWeight {
    const uint8_t* codes;
    const uint16_t *scales, *table;
    int64_t block;
};

// `Weight::multiply` of decoder layers. The sum with the bias is rounded once more, as outside of them.
void four_bit_multiply(const void* states, const void* weight, const void* bias, void* results, int64_t rows,
                       int64_t inputs, int64_t outputs, int threads) {
    const FourBitWeight& from = *static_cast<const FourBitWeight*>(weight);
    bfloat16* to = static_cast<bfloat16*>(results);
    four_bit_linear(static_cast<const uint16_t*>(states), from.codes, from.scales, from.table, to, rows, inputs,
                    outputs, from.block, threads);
    if (!bias) return;
    const bfloat16* added = static_cast<const bfloat16*>(bias);
    for (int64_t row = 0; row < rows; ++row, to += outputs)
        for (int64_t i = 0; i < outputs; ++i) narrow(widened(to[i]) + widened(added[i]), to[i]);
}

}  // extern "C"
