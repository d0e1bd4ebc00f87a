// Linear layers of a few rows with 4-bit weights in the storage of bitsandbytes: the codes of an
// output lie one after the other, two in a byte, the first in its high half. The 16 values of a
// block are computed once from its scale. Codes are expanded once for all rows of a group, and two
// outputs share the states. Lanes hold sums of their own, which are added up at the end.

#include <vector>

#include "../row_groups.h"
#include "../vectors.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Two sums a row with 32 registers, else one; the other registers are for values, weights and states.
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 8;
// With fewer rows, two outputs share the states.
constexpr int SHARED_ROWS = REGISTERS == 32 ? MAX_ROWS : 4;
// Inputs of a step, whose codes fill a byte per lane.
constexpr int INPUTS = 2 * LANES;
// Distance in bytes of the codes that are prefetched.
constexpr int AHEAD = 1024;

// One scale per block. With double quantization, scales have codes of 8 bits.
struct Scales {
    static constexpr int64_t BLOCK = 256;

    const float* values;
    const uint8_t* codes;
    const float* table;
    const float* offset;

    float operator[](int64_t index) const {
        if (!codes) return values[index];
        // Rounded before the offset is added, as in bitsandbytes: no fused instruction.
        const volatile float product = table[codes[index]] * values[index / BLOCK];
        return product + *offset;
    }
};

inline Floats rounded_to(float, Floats value) { return value; }

// To the nearest, ties to even; what is not a number stays one.
inline Floats rounded_to(bfloat16, Floats value) {
    const Words bits = reinterpret_cast<Words>(value);
    const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    return value == value ? reinterpret_cast<Floats>(rounded) : value;
}

// The values of the 16 codes of a block, rounded to the type of the weight.
struct Values {
    Floats parts[16 / LANES];

    template <typename W>
    void set(W type, const float* table, float scale) {
        for (int i = 0; i < 16 / LANES; ++i) parts[i] = rounded_to(type, load(table + i * LANES) * scale);
    }

    // Expands one byte of codes per lane: the weights of the high halves, then those of the low halves.
    void expand(const uint8_t* codes, Floats (&weights)[2]) const {
#if defined(__AVX512F__)
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        // Only the low four bits of an index select.
        weights[0] = (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), (__m512)parts[0]);
        weights[1] = (Floats)_mm512_permutexvar_ps(wide, (__m512)parts[0]);
#elif defined(__AVX2__)
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
        weights[0] = select(_mm256_srli_epi32(wide, 4), _mm256_slli_epi32(wide, 24));
        weights[1] = select(wide, _mm256_slli_epi32(wide, 28));
#else
        const float* values = reinterpret_cast<const float*>(parts);
        for (int lane = 0; lane < LANES; ++lane) {
            weights[0][lane] = values[codes[lane] >> 4];
            weights[1][lane] = values[codes[lane] & 15];
        }
#endif
    }

#if defined(__AVX2__) && !defined(__AVX512F__)
    // Only the low three bits of an index select; the sign bit of `upper` is the fourth.
    Floats select(__m256i index, __m256i upper) const {
        const __m256 low = _mm256_permutevar8x32_ps((__m256)parts[0], index);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)parts[1], index);
        return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(upper));
    }
#endif
};

// What one call computes. Of a group of rows, the states of one step lie together: those of the
// first inputs of all bytes, one row after the other, then those of the second inputs.
template <typename W>
struct Product {
    const float* states;
    const uint8_t* codes;
    Scales scales;
    const float* table;
    float* results;
    int64_t inputs, outputs, block;

    // ROWS rows from `row` on times OUTPUTS outputs from `output` on.
    template <int OUTPUTS, int ROWS>
    void tile(int64_t row, int64_t output) const {
        Floats sums[OUTPUTS][ROWS] = {};
        Values values[OUTPUTS];
        const float* mine = states + row * inputs;
        const int64_t bytes = inputs / 2, blocks = inputs / block;
        const uint8_t* from = codes + output * bytes;
        for (int64_t index = 0; index < blocks; ++index) {
            for (int o = 0; o < OUTPUTS; ++o) {
                values[o].set(W(), table, scales[(output + o) * blocks + index]);
                __builtin_prefetch(from + o * bytes + AHEAD);
            }
            for (int64_t step = 0; step < block; step += INPUTS, mine += ROWS * INPUTS, from += LANES) {
                Floats weights[OUTPUTS][2] = {};
                for (int o = 0; o < OUTPUTS; ++o) values[o].expand(from + o * bytes, weights[o]);
                for (int half = 0; half < 2; ++half)
                    for (int r = 0; r < ROWS; ++r) {
                        const Floats state = load(mine + (half * ROWS + r) * LANES);
                        for (int o = 0; o < OUTPUTS; ++o) sums[o][r] += weights[o][half] * state;
                    }
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int o = 0; o < OUTPUTS; ++o) results[(row + r) * outputs + output + o] = sum_of(sums[o][r]);
    }
};

std::vector<float> grouped(const float* states, int64_t inputs, const Groups& groups, int64_t rows) {
    std::vector<float> result(rows * inputs);
    auto to = result.begin();
    for (int64_t group = 0; group < groups.count; ++group) {
        const float* from = states + groups.begin(group) * inputs;
        for (int64_t input = 0; input < inputs; input += INPUTS)
            for (int half = 0; half < 2; ++half)
                for (int64_t r = 0; r < groups.size(group); ++r)
                    for (int lane = 0; lane < LANES; ++lane)
                        *to++ = from[r * inputs + input + 2 * lane + half];
    }
    return result;
}

template <typename W>
void linear(const float* states, const uint8_t* codes, Scales scales, const float* table, float* results,
            int64_t rows, int64_t inputs, int64_t outputs, int64_t block, int threads) {
    if (rows == 0) return;
    const Groups groups(rows, MAX_ROWS);
    const std::vector<float> together = grouped(states, inputs, groups, rows);
    const Product<W> product{together.data(), codes, scales, table, results, inputs, outputs, block};
    run_in_pairs<MAX_ROWS, SHARED_ROWS>(product, groups, outputs, threads);
}

}  // namespace

// `inputs` is a multiple of `block`, and `block` of 32. Without double quantization `scale_codes` is null.
#define LINEAR(NAME, W)                                                                                       \
    void linear_##NAME(const float* states, const uint8_t* codes, const float* scales,                        \
                       const uint8_t* scale_codes, const float* scale_table, const float* scale_offset,       \
                       const float* table, float* results, int64_t rows, int64_t inputs, int64_t outputs,     \
                       int64_t block, int threads) {                                                          \
        linear<W>(states, codes, {scales, scale_codes, scale_table, scale_offset}, table, results, rows,      \
                  inputs, outputs, block, threads);                                                           \
    }

extern "C" {

LINEAR(float32, float)
LINEAR(bfloat16, bfloat16)

}  // extern "C"
