// New keys or values of packed tokens into their slots, head by head, whatever their type.

#include <cstdint>
#include <cstring>

// Distances are in bytes; `place` has the slot of every token, -1 for nowhere, then its place.
extern "C" void kv_write(const char* states, int64_t token, int64_t head, char* pool, int64_t slot,
                         int64_t pool_head, int64_t pool_place, const int32_t* place,
                         int64_t num_tokens, int64_t num_heads, int64_t num_bytes) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        if (place[t] < 0) continue;
        char* to = pool + place[t] * slot + place[num_tokens + t] * pool_place;
        for (int64_t h = 0; h < num_heads; ++h)
            std::memcpy(to + h * pool_head, states + t * token + h * head, num_bytes);
    }
}
