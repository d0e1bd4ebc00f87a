// Building blocks of the C++ generated for decoder layers (`hf_spec/backend/cpu/layer_source.py`).
//
// Arithmetic is in float; values of a bfloat16 tensor are rounded to bfloat16 after every operation,
// as in PyTorch. All functions are written for loops that the compiler vectorizes.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../vectors.h"

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A weight: packed, with the function of `packed_linear` that reads it, or unpacked without one.
struct Weight {
    void (*multiply)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int);
    const void* numbers;
};

// Buffer of keys or values, and its strides between slots, heads and entries, in elements.
struct Storage {
    void* numbers;
    int64_t slot, head, entry;
};

// The kernels and buffers of a layer's attention. `write` is null where the layer shares the keys and
// values of another one.
struct Attention {
    void (*write)(const void*, int64_t, int64_t, void*, int64_t, int64_t, int64_t, const int32_t*,
                  int64_t, int64_t, int64_t);
    void (*attend)(const void*, int64_t, int64_t, const void*, int64_t, int64_t, int64_t, const void*,
                   int64_t, int64_t, int64_t, void*, const void*, const float*, const float*, float,
                   float, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int);
    Storage keys, values;
    int64_t window, chunk;
};

// Arguments that change with every call: addresses of the tensors that go in and come out; the slot
// and position where each token is stored, and the layout of the step, both for attention.
struct Call {
    const void* const* inputs;
    void* const* outputs;
    const int32_t* slot_mapping;
    const void* layout;
    int64_t tokens;
    int64_t threads;
};

// Values in memory, as float.
inline float number(float value) { return value; }
inline float number(bfloat16 value) { return widened(value); }

// Rounded to bfloat16.
inline float rounded(float value) {
    bfloat16 narrowed;
    narrow(value, narrowed);
    return widened(narrowed);
}

inline float square(float x) { return x * x; }

inline float cube(float x) { return x * x * x; }

// Branch-free exponential.
inline float exp_of(float x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    const float limited = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    const float shifted = limited * 1.44269504088896341f + MAGIC;
    const float power = shifted - MAGIC;
    const float r = limited - power * 0.693359375f + power * 2.12194440e-4f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int32_t exponent = (bits - 0x4b400000 + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    const float found = x < -87.0f ? 0.0f : (x > 88.0f ? INFINITY : small_exp_of(r) * scale);
    return x != x ? x : found;
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

inline float silu_of(float x) { return x / (1.0f + exp_of(-x)); }

inline float tanh_of(float x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

inline float gelu_none_of(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); }

inline float gelu_tanh_of(float x) {
    const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh_of(inner));
}

// GEMM of rows of states with a weight of (outputs, inputs).
template <typename T>
void multiply(const Weight& weight, const T* states, const void* bias, T* results, int64_t rows,
              int64_t inputs, int64_t outputs, int threads) {
    if (weight.multiply) {
        weight.multiply(states, weight.numbers, bias, results, rows, inputs, outputs, threads);
        return;
    }
    for (int64_t row = 0; row < rows; ++row, states += inputs) {
        const T* factors = static_cast<const T*>(weight.numbers);
        for (int64_t output = 0; output < outputs; ++output, factors += inputs) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < inputs; ++i) sum += number(states[i]) * number(factors[i]);
            if (bias) sum += number(static_cast<const T*>(bias)[output]);
            narrow(sum, *results++);
        }
    }
}

// Adds the low-rank change x A^T B^T to the results of the tokens that the gate chooses, by A of
// (RANK, inputs) and B^T of (RANK, outputs). Other results are not touched.
template <int RANK, typename T>
void change(const T* states, const void* down, const void* up, const void* gate, T* results,
            int64_t tokens, int64_t inputs, int64_t outputs, int threads) {
    constexpr int64_t BLOCK = 64;
    std::vector<int64_t> chosen;
    for (int64_t token = 0; token < tokens; ++token)
        if (static_cast<const bool*>(gate)[token]) chosen.push_back(token);
    const int64_t rows = chosen.size();
    std::vector<float> narrowed(rows * RANK);
#pragma omp parallel num_threads(threads) if (threads > 1 && rows > 0)
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < RANK; ++k) {
            const T* const factors = static_cast<const T*>(down) + k * inputs;
            for (int64_t row = 0; row < rows; ++row) {
                const T* const source = states + chosen[row] * inputs;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < inputs; ++i) sum += number(source[i]) * number(factors[i]);
                narrowed[row * RANK + k] = sum;
            }
        }
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs; first += BLOCK) {
            const int64_t size = std::min(BLOCK, outputs - first);
            for (int64_t row = 0; row < rows; ++row) {
                float sums[BLOCK] = {};
                for (int64_t k = 0; k < RANK; ++k) {
                    const T* const factors = static_cast<const T*>(up) + k * outputs + first;
                    const float factor = narrowed[row * RANK + k];
#pragma omp simd
                    for (int64_t i = 0; i < size; ++i) sums[i] += factor * number(factors[i]);
                }
                T* const to = results + chosen[row] * outputs + first;
                for (int64_t i = 0; i < size; ++i) narrow(number(to[i]) + sums[i], to[i]);
            }
        }
    }
}

// Writes new keys or values to their entries; strides between tokens and heads are in elements.
template <typename T>
void store(const Attention& attention, const Storage& to, const int32_t* slot_mapping, const T* states,
           int64_t token, int64_t head, int64_t tokens, int64_t heads, int64_t width) {
    constexpr int64_t SIZE = sizeof(T);
    if (attention.write)
        attention.write(states, SIZE * token, SIZE * head, to.numbers, SIZE * to.slot, SIZE * to.head,
                        SIZE * to.entry, slot_mapping, tokens, heads, SIZE * width);
}

// Attention of queries on the entries that the step's layout shows them.
template <typename T>
void attend(const Attention& attention, const void* layout, const T* query, int64_t token,
            int64_t head, T* results, const float* sinks, float scale, float softcap, int64_t heads,
            int64_t kv_heads, int64_t width, int64_t value_width, int threads) {
    const Storage &keys = attention.keys, &values = attention.values;
    attention.attend(query, token, head, keys.numbers, keys.slot, keys.head, keys.entry, values.numbers,
                     values.slot, values.head, values.entry, results, layout, nullptr, sinks, scale,
                     softcap, attention.window, attention.chunk, heads, kv_heads, width, value_width,
                     threads);
}

// Scratch memory of a thread, reused by later calls. The first step after a long prompt frees the
// memory that only the prompt needed.
inline char* scratch(int64_t bytes) {
    constexpr int64_t MAX_KEPT = 32 << 20;
    static thread_local std::vector<char> memory;
    if (static_cast<int64_t>(memory.size()) > MAX_KEPT && bytes <= MAX_KEPT) memory = {};
    if (static_cast<int64_t>(memory.size()) < bytes + 64) memory.resize(bytes + 64);
    return reinterpret_cast<char*>(aligned(reinterpret_cast<int64_t>(memory.data())));
}
