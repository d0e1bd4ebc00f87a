// New keys or values of packed tokens into their slots, head by head, whatever their type.

#include <cstdint>
#include <cstring>

// Distances are in bytes; `slot_mapping` has the slot of every token, -1 for none, then its entry.
extern "C" void kv_write(const char* states, int64_t token, int64_t head, char* pool, int64_t slot,
                         int64_t pool_head, int64_t pool_entry, const int32_t* slot_mapping,
                         int64_t num_tokens, int64_t num_heads, int64_t num_bytes) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        if (slot_mapping[t] < 0) continue;
        char* to = pool + slot_mapping[t] * slot + slot_mapping[num_tokens + t] * pool_entry;
        for (int64_t h = 0; h < num_heads; ++h)
            std::memcpy(to + h * pool_head, states + t * token + h * head, num_bytes);
    }
}
