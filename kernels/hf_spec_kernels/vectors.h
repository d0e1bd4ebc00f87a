// Vectors of a processor's own width, and the numbers that C++ kernels read and write.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct bfloat16 {
    uint16_t bits;
};

// Two of them, the first in the lower half.
struct Bfloat16Pair {
    uint32_t bits;
};

// Allocates lines of a cache: a vector that lies across two takes twice as long to load.
template <typename T>
struct Lines {
    using value_type = T;
    static constexpr std::align_val_t SIZE{64};

    Lines() = default;
    template <typename U>
    Lines(const Lines<U>&) {}

    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), SIZE)); }
    void deallocate(T* data, std::size_t) { ::operator delete(data, SIZE); }

    friend bool operator==(const Lines&, const Lines&) { return true; }
    friend bool operator!=(const Lines&, const Lines&) { return false; }
};

template <typename T>
using InLines = std::vector<T, Lines<T>>;

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

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load(const bfloat16* from) {
#if defined(__AVX512F__)
    const auto wide = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
#elif defined(__AVX2__)
    const auto wide = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
#else
    const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words);
#endif
    return reinterpret_cast<Floats>(wide << 16);
}

inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
    Ints wide;
    for (int i = 0; i < LANES; ++i) wide[i] = from[i];
    return __builtin_convertvector(wide, Floats);
#endif
}

inline Words load(const Bfloat16Pair* from) {
    return reinterpret_cast<Words>(load(reinterpret_cast<const float*>(from)));
}

// A weight times numbers, added to sums.
inline Floats add_product(Floats sums, float weight, Floats numbers) { return sums + weight * numbers; }

// The same for pairs: both products are added.
inline Floats add_product(Floats sums, Bfloat16Pair weight, Words pairs) {
    const Words weights = Words{} + weight.bits;
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)pairs);
#else
    constexpr uint32_t SECOND = 0xffff0000u;
    sums += reinterpret_cast<Floats>(weights << 16) * reinterpret_cast<Floats>(pairs << 16);
    return sums + reinterpret_cast<Floats>(weights & SECOND) * reinterpret_cast<Floats>(pairs & SECOND);
#endif
}

inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }

template <std::size_t... LANE>
inline Ints numbered(std::index_sequence<LANE...>) {
    return Ints{int32_t(LANE)...};
}

// All bits of lane i where bit i is set, none elsewhere.
inline Ints lanes_of(uint64_t bits) {
    const Ints own = 1 << numbered(std::make_index_sequence<LANES>());
    return (static_cast<int32_t>(bits) & own) == own;
}

// Lanes of two vectors by index, those of the second counted after the first's.
#if defined(__clang__) || __GNUC__ >= 12
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Swaps halves of two vectors, HALF lanes at a time: what `a` has on the right for what `b` has on the left.
template <int HALF, std::size_t... LANE>
inline void swap_lanes(Floats& a, Floats& b, std::index_sequence<LANE...>) {
    const Floats left = LANES_OF(a, b, ((LANE & HALF) ? int(LANE) - HALF + LANES : int(LANE))...);
    b = LANES_OF(a, b, ((LANE & HALF) ? int(LANE) + LANES : int(LANE) + HALF)...);
    a = left;
}

// Lane i of vector j becomes lane j of vector i.
template <int HALF = 1>
inline void transpose(Floats (&vectors)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & HALF)) swap_lanes<HALF>(vectors[i], vectors[i + HALF], std::make_index_sequence<LANES>());
    if constexpr (2 * HALF < LANES) transpose<2 * HALF>(vectors);
}

// The vector with neighbours changed over, HALF lanes at a time.
template <int HALF, std::size_t... LANE>
inline Floats changed_over(Floats vector, std::index_sequence<LANE...>) {
    return LANES_OF(vector, vector, int(LANE ^ HALF)...);
}

template <int HALF>
inline Floats changed_over(Floats vector) {
    return changed_over<HALF>(vector, std::make_index_sequence<LANES>());
}

template <int HALF = LANES / 2>
inline float sum_of(Floats vector) {
    vector += changed_over<HALF>(vector);
    if constexpr (HALF > 1) return sum_of<HALF / 2>(vector);
    return vector[0];
}

template <int HALF = LANES / 2>
inline float largest_of(Floats vector) {
    const Floats other = changed_over<HALF>(vector);
    vector = other > vector ? other : vector;
    if constexpr (HALF > 1) return largest_of<HALF / 2>(vector);
    return vector[0];
}

// Lane i of the result is the sum of all lanes of vector i; the vectors are used up.
template <int HALF = 1>
inline Floats sums_of(Floats* vectors) {
    const Ints right = (numbered(std::make_index_sequence<LANES>()) & HALF) != 0;
    for (int i = 0; i < LANES / HALF; i += 2) {
        const Floats a = vectors[i], b = vectors[i + 1];
        vectors[i / 2] = (right ? b : a) + changed_over<HALF>(right ? a : b);
    }
    if constexpr (2 * HALF < LANES) return sums_of<2 * HALF>(vectors);
    return vectors[0];
}

// e to the power of small numbers, one or a vector of them, by Cephes' polynomial.
template <typename Number>
inline Number small_exp_of(Number x) {
    Number y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    return y * x * x + x + 1.0f;
}

// e to the power of numbers that are not positive; NaN stays NaN.
inline Floats exp_of(Floats x) {
    constexpr float LEAST = -87.0f, MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    const Ints too_small = x < LEAST;
    x = too_small ? Floats{} + LEAST : x;
    const Floats shifted = x * 1.44269504088896341f + MAGIC;
    const Floats power = shifted - MAGIC;
    x = x - power * 0.693359375f + power * 2.12194440e-4f;
    const Floats y = small_exp_of(x);
    const Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
    return too_small ? Floats{} : y * reinterpret_cast<Floats>(exponent);
}
