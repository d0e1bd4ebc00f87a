// Linear layers of a few rows with 8-bit weights in the storage of bitsandbytes and torchao: an output's
// codes lie one after the other, and each output has one scale. Codes are expanded once for all rows of a
// group, and two outputs share the states. Lanes hold sums of their own, which are added up at the end.

#include <cmath>
#include <limits>
#include <vector>

#include "../row_groups.h"
#include "../vectors.h"

namespace {

// Two sums a row with 32 registers, else one; the other registers are for weights and states.
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 8;
// With fewer rows, two outputs share the states.
constexpr int SHARED_ROWS = REGISTERS == 32 ? MAX_ROWS : 4;
// Distance in bytes of the codes that are prefetched.
constexpr int AHEAD = 1024;

// Products in float32.
struct Single {
    using State = float;
    using Sums = Floats;
    using Codes = Floats;
    static constexpr int INPUTS = LANES;

    static State state(float value) { return value; }
    static Codes expand(const int8_t* codes) { return load(codes); }
    static Sums add(Sums sums, const State* states, Codes codes) { return sums + load(states) * codes; }
    static float total(Sums sums, Sums) { return sum_of(sums); }
};

#if defined(__AVX512BF16__)
// Two products and their sum in one instruction. Codes are exact in bfloat16.
struct Pair {
    using State = uint16_t;
    using Sums = __m512;
    using Codes = __m512bh;
    static constexpr int INPUTS = 32;

    static State state(bfloat16 value) { return value.bits; }

    static Codes expand(const int8_t* codes) {
        return _mm512_cvtne2ps_pbh((__m512)load(codes + LANES), (__m512)load(codes));
    }

    static Sums add(Sums sums, const State* states, Codes codes) {
        return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(states), codes);
    }

    static float total(Sums sums, Sums) { return sum_of((Floats)sums); }
};
#else
struct Pair : Single {
    static State state(bfloat16 value) { return widened(value); }
};
#endif

// Products of integers, which are exact in any order.
#if defined(__AVX512VNNI__)
struct Whole {
    // Larger by OFFSET: the instruction reads one unsigned factor.
    using State = uint8_t;
    using Sums = __m512i;
    using Codes = __m512i;
    static constexpr int INPUTS = 64, OFFSET = 128;

    static State state(int8_t value) { return static_cast<State>(value + OFFSET); }
    static Codes expand(const int8_t* codes) { return _mm512_loadu_si512(codes); }

    static Sums add(Sums sums, const State* states, Codes codes) {
        return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(states), codes);
    }

    // `codes` has the sums of the codes themselves.
    static int32_t total(Sums sums, Sums codes) {
        return _mm512_reduce_add_epi32(_mm512_sub_epi32(sums, _mm512_slli_epi32(codes, 7)));
    }
};
#else
struct Whole {
    using State = int8_t;
    using Sums = Ints;
    using Codes = Ints;
    static constexpr int INPUTS = LANES;

    static State state(int8_t value) { return value; }

    static Codes expand(const int8_t* codes) {
        Codes values;
        for (int lane = 0; lane < LANES; ++lane) values[lane] = codes[lane];
        return values;
    }

    static Sums add(Sums sums, const State* states, Codes codes) { return sums + expand(states) * codes; }

    static int32_t total(Sums sums, Sums) {
        int32_t result = 0;
        for (int lane = 0; lane < LANES; ++lane) result += sums[lane];
        return result;
    }
};
#endif

// Rows of states, of a group those of one step together.
template <typename Kind, typename T>
std::vector<typename Kind::State> grouped(const T* states, int64_t inputs, const Groups& groups, int64_t rows) {
    std::vector<typename Kind::State> result(rows * inputs);
    auto to = result.begin();
    for (int64_t group = 0; group < groups.count; ++group) {
        const T* from = states + groups.begin(group) * inputs;
        for (int64_t input = 0; input < inputs; input += Kind::INPUTS)
            for (int64_t r = 0; r < groups.size(group); ++r)
                for (int i = 0; i < Kind::INPUTS; ++i) *to++ = Kind::state(from[r * inputs + input + i]);
    }
    return result;
}

// What one call computes; `finish(row, output, total)` writes a result.
template <typename Kind, typename Finish>
struct Product {
    using Sums = typename Kind::Sums;

    const typename Kind::State* states;
    const int8_t* codes;
    int64_t inputs;
    const Finish& finish;

    // ROWS rows from `row` on times OUTPUTS outputs from `output` on.
    template <int OUTPUTS, int ROWS>
    void tile(int64_t row, int64_t output) const {
        Sums sums[OUTPUTS][ROWS] = {}, of_codes[OUTPUTS] = {};
        const typename Kind::State* mine = states + row * inputs;
        const int8_t* from = codes + output * inputs;
        for (int64_t input = 0; input < inputs; input += Kind::INPUTS, mine += ROWS * Kind::INPUTS) {
            for (int o = 0; o < OUTPUTS; ++o) {
                const int8_t* own = from + o * inputs + input;
                __builtin_prefetch(own + AHEAD);
                const typename Kind::Codes expanded = Kind::expand(own);
                add_codes(of_codes[o], expanded);
                for (int r = 0; r < ROWS; ++r) sums[o][r] = Kind::add(sums[o][r], mine + r * Kind::INPUTS, expanded);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int o = 0; o < OUTPUTS; ++o) finish(row + r, output + o, Kind::total(sums[o][r], of_codes[o]));
    }

    static void add_codes(Sums& sums, const typename Kind::Codes& codes) {
#if defined(__AVX512VNNI__)
        if constexpr (std::is_same_v<Kind, Whole>) sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), codes);
#endif
    }
};

template <typename Kind, typename T, typename Finish>
void multiply(const T* states, const int8_t* codes, int64_t rows, int64_t inputs, int64_t outputs, int threads,
              const Finish& finish) {
    const Groups groups(rows, MAX_ROWS);
    const auto together = grouped<Kind>(states, inputs, groups, rows);
    const Product<Kind, Finish> product{together.data(), codes, inputs, finish};
    run_in_pairs<MAX_ROWS, SHARED_ROWS>(product, groups, outputs, threads);
}

template <typename T>
inline float rounded_to(float value) {
    T narrowed;
    narrow(value, narrowed);
    return widened(narrowed);
}

// Sum and scale are rounded to the dtype, then multiplied, as in torchao.
template <typename Kind, typename T>
void weight_only(const T* states, const int8_t* codes, const float* scales, T* results, int64_t rows, int64_t inputs,
                 int64_t outputs, int threads) {
    if (rows == 0) return;
    multiply<Kind>(states, codes, rows, inputs, outputs, threads, [=](int64_t row, int64_t output, float sum) {
        narrow(rounded_to<T>(sum) * rounded_to<T>(scales[output]), results[row * outputs + output]);
    });
}

struct Outlier {
    int64_t input;
    float state;
};

// Rows of states in 8 bits, and the inputs that have none.
struct Quantized {
    std::vector<int8_t> codes;
    std::vector<float> scales;
    std::vector<std::vector<Outlier>> outliers;
};

// Rounded to float16, ties to even; what is not a number stays one.
inline float rounded_to_half(float value) {
    constexpr float LEAST = 6.103515625e-05f, SUBNORMALS = 16777216.0f, OVERFLOWS = 65520.0f;
    const float size = std::fabs(value);
    if (size < LEAST) return std::nearbyint(value * SUBNORMALS) / SUBNORMALS;
    if (size >= OVERFLOWS) return std::copysign(std::numeric_limits<float>::infinity(), value);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
    if (size == size) std::memcpy(&value, &bits, sizeof bits);
    return value;
}

// As bitsandbytes does it, row by row: of states rounded to float16.
template <typename T>
Quantized quantized(const T* states, int64_t rows, int64_t inputs, float threshold) {
    Quantized result{std::vector<int8_t>(rows * inputs), std::vector<float>(rows),
                     std::vector<std::vector<Outlier>>(rows)};
    std::vector<float> halves(inputs);
    for (int64_t row = 0; row < rows; ++row, states += inputs) {
        for (int64_t i = 0; i < inputs; ++i) halves[i] = rounded_to_half(widened(states[i]));
        auto& outliers = result.outliers[row];
        float largest = 0;
        for (int64_t i = 0; i < inputs; ++i) {
            const float size = std::fabs(halves[i]);
            if (threshold > 0 && size >= threshold)
                outliers.push_back({i, widened(states[i])});
            else
                largest = std::max(largest, size);
        }
        result.scales[row] = largest;
        // PyTorch divides a number by a tensor in this way.
        const float factor = largest > 0 ? 1.0f / largest * 127.0f : 0.0f;
        int8_t* to = result.codes.data() + row * inputs;
        for (int64_t i = 0; i < inputs; ++i) to[i] = static_cast<int8_t>(std::nearbyint(halves[i] * factor));
        for (const Outlier& outlier : outliers) to[outlier.input] = 0;
    }
    return result;
}

// States are quantized, too, except outliers, which meet dequantized weights.
template <typename T>
void dynamic(const T* states, const int8_t* codes, const float* scales, const T* bias, T* results,
             int64_t rows, int64_t inputs, int64_t outputs, float threshold, int threads) {
    if (rows == 0) return;
    const Quantized found = quantized(states, rows, inputs, threshold);
    multiply<Whole>(found.codes.data(), codes, rows, inputs, outputs, threads,
                    [&](int64_t row, int64_t output, int32_t sum) {
                        // Rounded before the bias is added: no fused instruction.
                        const volatile float product =
                            static_cast<float>(sum) * (found.scales[row] * scales[output]) * 6.200124e-05f;
                        float value = product;
                        if (bias) value += widened(bias[output]);
                        const auto& outliers = found.outliers[row];
                        if (!outliers.empty()) {
                            float more = 0;
                            const int8_t* own = codes + output * inputs;
                            for (const Outlier& outlier : outliers)
                                more += outlier.state *
                                        rounded_to<T>(own[outlier.input] * scales[output] * 7.874015718698502e-3f);
                            value = rounded_to<T>(value) + more;
                        }
                        narrow(value, results[row * outputs + output]);
                    });
}

}  // namespace

#define LINEAR(NAME, T, KIND)                                                                                  \
    void weight_only_##NAME(const T* states, const int8_t* codes, const float* scales, T* results,             \
                            int64_t rows, int64_t inputs, int64_t outputs, int threads) {                      \
        weight_only<KIND>(states, codes, scales, results, rows, inputs, outputs, threads);                     \
    }                                                                                                          \
    void dynamic_##NAME(const T* states, const int8_t* codes, const float* scales, const T* bias, T* results,  \
                        int64_t rows, int64_t inputs, int64_t outputs, float threshold, int threads) {         \
        dynamic(states, codes, scales, bias, results, rows, inputs, outputs, threshold, threads);              \
    }

extern "C" {

// `inputs` is a multiple of 64.
LINEAR(float32, float, Single)
LINEAR(bfloat16, bfloat16, Pair)

// A weight as decoder layers hold it; its arrays are those of `dynamic_bfloat16`.
struct EightBitWeight {
    const int8_t* codes;
    const float* scales;
    float threshold;
};

// `Weight::multiply` of decoder layers.
void dynamic_multiply(const void* states, const void* weight, const void* bias, void* results, int64_t rows,
                      int64_t inputs, int64_t outputs, int threads) {
    const EightBitWeight& from = *static_cast<const EightBitWeight*>(weight);
    dynamic_bfloat16(static_cast<const bfloat16*>(states), from.codes, from.scales, static_cast<const bfloat16*>(bias),
                     static_cast<bfloat16*>(results), rows, inputs, outputs, from.threshold, threads);
}

}  // extern "C"
