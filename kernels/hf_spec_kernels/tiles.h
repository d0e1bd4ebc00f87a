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
#endif
