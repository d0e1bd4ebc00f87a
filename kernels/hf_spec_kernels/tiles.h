// Matrix tiles of processors with AMX: 16 rows of 64 bytes.

#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES

// Rows of a tile, and inputs of each.
constexpr int TILE_ROWS = 16, TILE_INPUTS = 32, TILE = TILE_ROWS * TILE_INPUTS;

// Whether the operating system lets this process use the processor's tiles.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sums of one or two tiles of states by 32 outputs: tiles 0 and 1 are of the first tile of states, 2 and 3
// of the other; 4 to 7 are for the factors.
template <int COUNT>
inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (COUNT == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// 32 inputs of the states `one` and `other` by those of the first and the last 16 outputs, whose rows are
// `stride` bytes apart.
template <int COUNT>
inline void add_products(const void* one, const void* other, const void* first, const void* last, int64_t stride) {
    _tile_loadd(4, one, 64);
    _tile_loadd(6, first, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, last, stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (COUNT == 2) {
        _tile_loadd(5, other, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <int COUNT>
inline void store_sums(float (&to)[COUNT * TILE_ROWS][2 * TILE_ROWS]) {
    _tile_stored(0, to[0], sizeof to[0]);
    _tile_stored(1, to[0] + TILE_ROWS, sizeof to[0]);
    if constexpr (COUNT == 2) {
        _tile_stored(2, to[TILE_ROWS], sizeof to[0]);
        _tile_stored(3, to[TILE_ROWS] + TILE_ROWS, sizeof to[0]);
    }
}
#endif
