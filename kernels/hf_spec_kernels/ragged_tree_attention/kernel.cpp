// Attention of packed token trees on a CPU: every query by blocks of its own slot's keys.
//
// Queries that share a key head and a slot go through a block together, while it is near. What they
// get is the same to the last bit whoever else is in the batch, and on any number of threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../vectors.h"

namespace {

// Keys of a block: as many as a word has bits.
constexpr int BLOCK = 64;
// Where queries of a segment share a key head in such numbers, its blocks are turned first, so that
// sums need not be taken across lanes.
constexpr int WORTH_TURNING = 16;
// Queries that go through a block together; fewer, if threads were idle otherwise.
constexpr int MAX_ROWS = 64, MIN_ROWS = WORTH_TURNING;
// Those whose sums are in registers at a time, and vectors of each.
constexpr int TOGETHER = 4, VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline int64_t whole_vectors(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// (S, H, C, D) keys or values: where they are, and how many numbers further the next is.
template <typename T>
struct Pool {
    const T* data;
    int64_t slot, head, place;
};

// See RaggedLayout and Scoring.
struct Layout {
    const int32_t *slot, *query_start, *num_keys, *prefix;
    const uint8_t* bits;
    const int32_t *position, *first_position, *key_position, *key_start;
    int64_t num_segments, num_bytes;
};

struct Scoring {
    const float *slopes, *sinks;
    float scale, softcap;
    int32_t window, chunk;
};

template <typename T>
struct Call {
    const T* query;
    int64_t token, head;
    Pool<T> keys, values;
    T* out;
    Layout layout;
    Scoring scoring;
    int64_t num_heads, kv_heads, head_size, value_size;
};

// Some queries of one segment that share a key head.
struct Item {
    int64_t segment, head, begin, count;
    bool turning;
};

// A table in float32, rows `stride` apart.
struct Table {
    const float* data;
    int64_t stride;
};

// LANES numbers of a row of `size`, zeros after the last.
template <typename T>
inline Floats load_some(const T* row, int64_t from, int64_t size) {
    if (from + LANES <= size) return load(row + from);
    float found[LANES] = {};
    for (int64_t d = from; d < size; ++d) found[d - from] = widened(row[d]);
    return load(found);
}

// `count` keys or values of `size` numbers, in rows of whole vectors: as they lie, or copied.
template <typename T>
Table rows_of(const T* from, int64_t place, int64_t count, int64_t size, std::vector<float>& copy) {
    if constexpr (std::is_same_v<T, float>)
        if (size % LANES == 0) return {from, place};
    const int64_t stride = whole_vectors(size);
    copy.resize(BLOCK * stride);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < stride; d += LANES)
            store(copy.data() + i * stride + d, load_some(from + i * place, d, size));
    return {copy.data(), stride};
}

// `count` keys, a row for each of their `size` numbers.
template <typename T>
Table turned(const T* from, int64_t place, int64_t count, int64_t size, std::vector<float>& copy) {
    copy.resize(whole_vectors(size) * BLOCK);
    for (int64_t first = 0; first < count; first += LANES)
        for (int64_t d = 0; d < size; d += LANES) {
            Floats tile[LANES] = {};
            for (int i = 0; i < LANES; ++i)
                if (first + i < count) tile[i] = load_some(from + (first + i) * place, d, size);
            transpose(tile);
            for (int i = 0; i < LANES; ++i) store(copy.data() + (d + i) * BLOCK + first, tile[i]);
        }
    return {copy.data(), BLOCK};
}

// q.k of one query and LANES keys from `first` on, the last one again for those after `count`.
inline Floats products(const float* query, Table keys, int64_t first, int64_t count, int64_t size) {
    // So many at a time keep the multipliers busy, and their places fit the registers.
    constexpr int EACH = std::min(LANES, 8);
    Floats found[LANES] = {};
    for (int group = 0; group < LANES; group += EACH) {
        const float* from[EACH];
        for (int i = 0; i < EACH; ++i)
            from[i] = keys.data + std::min(first + group + i, count - 1) * keys.stride;
        Floats sums[EACH] = {};
        for (int64_t d = 0; d < size; d += LANES) {
            const Floats mine = load(query + d);
            for (int i = 0; i < EACH; ++i) sums[i] += mine * load(from[i] + d);
        }
        for (int i = 0; i < EACH; ++i) found[group + i] = sums[i];
    }
    return sums_of(found);
}

// Adds `count` rows of a table, weighted, to the sums of ROWS queries, WIDTH vectors of each.
template <int ROWS, int WIDTH>
inline void mix(float* sums, int64_t size, const float* weights, int64_t each, Table table,
                int64_t count, int64_t from) {
    Floats found[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) found[r][v] = load(sums + r * size + from + v * LANES);
    const float* row = table.data + from;
    for (int64_t k = 0; k < count; ++k, row += table.stride)
        for (int v = 0; v < WIDTH; ++v) {
            const Floats one = load(row + v * LANES);
            for (int r = 0; r < ROWS; ++r) found[r][v] += weights[r * each + k] * one;
        }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) store(sums + r * size + from + v * LANES, found[r][v]);
}

// The same for any number of queries, whose sums are `size` apart and weights `each`, and the
// first `width` numbers of the rows.
template <int ROWS = TOGETHER>
void mix_all(float* sums, int64_t size, const float* weights, int64_t each, Table table,
             int64_t count, int64_t width, int64_t queries) {
    if constexpr (ROWS > 1)
        if (queries < ROWS)
            return mix_all<ROWS - 1>(sums, size, weights, each, table, count, width, queries);
    for (; queries >= ROWS; queries -= ROWS, sums += ROWS * size, weights += ROWS * each) {
        int64_t d = 0;
        for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
            mix<ROWS, VECTORS>(sums, size, weights, each, table, count, d);
        for (; d < width; d += LANES) mix<ROWS, 1>(sums, size, weights, each, table, count, d);
    }
    if constexpr (ROWS > 1)
        if (queries) mix_all<ROWS - 1>(sums, size, weights, each, table, count, width, queries);
}

inline bool is_finite(Table values, int64_t count, int64_t size) {
    Floats zeros = {};
    for (int64_t k = 0; k < count; ++k)
        for (int64_t d = 0; d < size; d += LANES) zeros += 0.0f * load(values.data + k * values.stride + d);
    return sum_of(zeros) == 0.0f;
}

// Lets memory hand out keys or values while others are computed with.
template <typename T>
inline void ask_for(const T* from, int64_t place, int64_t count, int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < size; d += LINE) __builtin_prefetch(from + i * place + d, 0, 2);
}

// What the queries of an item have added up so far.
template <typename T>
struct Rows {
    const Call<T>& call;
    const Item& item;
    int64_t groups, slot, num_keys, key_size, value_size;
    std::vector<float> queries, sums, weights, largest, total, key_copy, value_copy;

    Rows(const Call<T>& call, const Item& item)
        : call(call),
          item(item),
          groups(call.num_heads / call.kv_heads),
          slot(call.layout.slot[item.segment]),
          num_keys(call.layout.num_keys[item.segment]),
          key_size(whole_vectors(call.head_size)),
          value_size(whole_vectors(call.value_size)),
          queries(item.count * key_size),
          sums(item.count * value_size),
          weights(item.count * BLOCK),
          largest(item.count, NEVER),
          total(item.count) {
        for (int64_t row = 0; row < item.count; ++row) {
            const T* from = call.query + token(row) * call.token + head(row) * call.head;
            for (int64_t d = 0; d < call.head_size; ++d) queries[row * key_size + d] = widened(from[d]);
        }
    }

    int64_t token(int64_t row) const {
        return call.layout.query_start[item.segment] + (item.begin + row) / groups;
    }

    int64_t head(int64_t row) const { return item.head * groups + (item.begin + row) % groups; }

    // The first position that a query may look at.
    int64_t oldest(int64_t token) const {
        const int64_t position = call.layout.position[token];
        if (call.scoring.window) return position - call.scoring.window + 1;
        return call.scoring.chunk ? position - position % call.scoring.chunk : INT32_MIN;
    }

    int64_t position_of(int64_t place) const {
        const Layout& layout = call.layout;
        const int64_t after = place - layout.prefix[item.segment];
        return after < 0 ? layout.first_position[item.segment] + place
                         : layout.key_position[layout.key_start[item.segment] + after];
    }

    // A bit for each of `count` places from `begin` on that a query sees.
    uint64_t seen(int64_t token, int64_t begin, int64_t count) const {
        const Layout& layout = call.layout;
        const int64_t prefix = layout.prefix[item.segment], oldest_seen = oldest(token);
        const int64_t known = std::clamp<int64_t>(prefix - begin, 0, count);
        uint64_t found = known == BLOCK ? ~uint64_t{0} : (uint64_t{1} << known) - 1;
        const uint8_t* bits = layout.bits + token * layout.num_bytes;
        for (int64_t i = known; i < count;) {
            const int64_t bit = begin + i - prefix;
            const uint64_t rest = bits[bit / 8] >> (bit % 8);
            found |= rest << i;
            i += 8 - bit % 8;
        }
        if (count < BLOCK) found &= (uint64_t{1} << count) - 1;
        if (oldest_seen > INT32_MIN)
            for (int64_t i = 0; i < count; ++i)
                if (position_of(begin + i) < oldest_seen) found &= ~(uint64_t{1} << i);
        return found;
    }

    // No query of these looks at a place before this one.
    int64_t first_place() const {
        int64_t first = INT32_MAX;
        for (int64_t row = 0; row < item.count; row += groups) first = std::min(first, oldest(token(row)));
        first = std::min(first, oldest(token(item.count - 1)));
        // A place lies no further behind the first one by position than by number.
        return std::max<int64_t>(0, first - call.layout.first_position[item.segment]);
    }

    // Puts q.k of all queries and `count` keys where their weights will be.
    void score(const T* from, int64_t count) {
        const int64_t place = call.keys.place, size = call.head_size;
        if (!item.turning) {
            const Table keys = rows_of(from, place, count, size, key_copy);
            for (int64_t row = 0; row < item.count; ++row)
                for (int64_t first = 0; first < count; first += LANES)
                    store(weights.data() + row * BLOCK + first,
                          products(queries.data() + row * key_size, keys, first, count, key_size));
            return;
        }
        const Table keys = turned(from, place, count, size, key_copy);
        std::fill(weights.begin(), weights.end(), 0.0f);
        mix_all(weights.data(), BLOCK, queries.data(), key_size, keys, size, whole_vectors(count),
                item.count);
    }

    // From the scores of one query on a block their weights; what was added before shrinks to fit.
    void weigh(int64_t row, int64_t begin, int64_t count, uint64_t sees) {
        float* mine = weights.data() + row * BLOCK;
        const Scoring& scoring = call.scoring;
        Floats most = Floats{} + largest[row];
        for (int64_t first = 0; first < count; first += LANES) {
            Floats scores = load(mine + first) * scoring.scale;
            if (scoring.softcap > 0)
                for (int i = 0; i < LANES; ++i)
                    scores[i] = std::tanh(scores[i] / scoring.softcap) * scoring.softcap;
            if (scoring.slopes)
                for (int i = 0; i < LANES && first + i < count; ++i)
                    scores[i] -= scoring.slopes[head(row)] *
                                 (call.layout.position[token(row)] - position_of(begin + first + i));
            if (~sees >> first) scores = lanes_of(sees >> first) ? scores : Floats{} + NEVER;
            most = scores > most ? scores : most;
            store(mine + first, scores);
        }
        const float peak = largest_of(most);
        // Nothing was seen so far: no number to take off.
        const float offset = peak == NEVER ? 0.0f : peak;
        Floats sum = {};
        for (int64_t first = 0; first < count; first += LANES) {
            const Floats weight = exp_of(load(mine + first) - offset);
            store(mine + first, weight);
            sum += weight;
        }
        if (peak > largest[row]) {
            const float factor = exp_of(Floats{} + (largest[row] - peak))[0];
            total[row] *= factor;
            for (int64_t d = 0; d < value_size; d += LANES) {
                float* at = sums.data() + row * value_size + d;
                store(at, load(at) * factor);
            }
            largest[row] = peak;
        }
        total[row] += sum_of(sum);
    }

    void add(int64_t begin) {
        const int64_t count = std::min<int64_t>(BLOCK, num_keys - begin);
        const uint64_t all = count == BLOCK ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
        uint64_t sees[MAX_ROWS], everybody = all, anybody = 0;
        for (int64_t row = 0; row < item.count; ++row) {
            const bool same = row && token(row) == token(row - 1);
            sees[row] = same ? sees[row - 1] : seen(token(row), begin, count);
            everybody &= sees[row];
            anybody |= sees[row];
        }
        if (!anybody) return;
        const Pool<T>&k = call.keys, &v = call.values;
        const T* key = k.data + slot * k.slot + item.head * k.head + begin * k.place;
        const T* value = v.data + slot * v.slot + item.head * v.head + begin * v.place;
        ask_for(value, v.place, count, call.value_size);
        score(key, count);
        for (int64_t row = 0; row < item.count; ++row) weigh(row, begin, count, sees[row]);
        const int64_t next = std::min<int64_t>(BLOCK, num_keys - begin - BLOCK);
        ask_for(key + BLOCK * k.place, k.place, next, call.head_size);
        const Table values = rows_of(value, v.place, count, call.value_size, value_copy);
        // Zero times what is not finite would be added where nobody looks.
        if (everybody == all || is_finite(values, count, value_size))
            return mix_all(sums.data(), value_size, weights.data(), BLOCK, values, count, value_size,
                           item.count);
        for (int64_t row = 0; row < item.count; ++row)
            for (int64_t i = 0; i < count; ++i)
                if (sees[row] >> i & 1)
                    mix_all(sums.data() + row * value_size, 0, weights.data() + row * BLOCK + i, 0,
                            {values.data + i * values.stride, 0}, 1, value_size, 1);
    }

    void finish() const {
        for (int64_t row = 0; row < item.count; ++row) {
            float whole = total[row];
            const float* found = sums.data() + row * value_size;
            float factor = 1.0f;
            if (call.scoring.sinks && largest[row] != NEVER) {
                const float sink = call.scoring.sinks[head(row)], peak = std::max(sink, largest[row]);
                factor = std::exp(largest[row] - peak);
                whole = whole * factor + std::exp(sink - peak);
            }
            factor = largest[row] == NEVER ? 0.0f : factor / whole;
            float zero = 0.0f;
            for (int64_t d = 0; d < call.value_size; ++d) zero += 0.0f * found[d];
            T* to = call.out + (token(row) * call.num_heads + head(row)) * call.value_size;
            // Zero, or NaN for all if one is not finite.
            for (int64_t d = 0; d < call.value_size; ++d) narrow(found[d] * factor + zero, to[d]);
        }
    }
};

template <typename T>
void attend(const Call<T>& call, int threads) {
    const Layout& layout = call.layout;
    const int64_t groups = call.num_heads / call.kv_heads;
    int64_t each = MAX_ROWS, wanted = threads > 1 ? 2 * threads : 1;
    std::vector<Item> items;
    for (;; each /= 2) {
        items.clear();
        for (int64_t segment = 0; segment < layout.num_segments; ++segment) {
            const int64_t rows = (layout.query_start[segment + 1] - layout.query_start[segment]) * groups;
            for (int64_t head = 0; head < call.kv_heads; ++head)
                for (int64_t row = 0; row < rows; row += each)
                    items.push_back({segment, head, row, std::min(each, rows - row), rows >= WORTH_TURNING});
        }
        if (each <= MIN_ROWS || static_cast<int64_t>(items.size()) >= wanted) break;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (std::size_t index = 0; index < items.size(); ++index) {
        Rows<T> rows(call, items[index]);
        for (int64_t begin = rows.first_place() / BLOCK * BLOCK; begin < rows.num_keys; begin += BLOCK)
            rows.add(begin);
        rows.finish();
    }
}

}  // namespace

#define ATTEND(NAME, TYPE)                                                                        \
    void attend_##NAME(                                                                            \
        const TYPE* query, int64_t token, int64_t head, const TYPE* keys, int64_t key_slot,        \
        int64_t key_head, int64_t key_place, const TYPE* values, int64_t value_slot,               \
        int64_t value_head, int64_t value_place, TYPE* out, const Layout* layout,                  \
        const float* slopes, const float* sinks, float scale, float softcap, int64_t window,       \
        int64_t chunk, int64_t num_heads, int64_t kv_heads, int64_t head_size, int64_t value_size, \
        int threads) {                                                                             \
        attend<TYPE>({query, token, head, {keys, key_slot, key_head, key_place},                   \
                      {values, value_slot, value_head, value_place}, out, *layout,                 \
                      {slopes, sinks, scale, softcap, int32_t(window), int32_t(chunk)},            \
                      num_heads, kv_heads, head_size, value_size}, threads);                       \
    }

extern "C" {
ATTEND(float32, float)
ATTEND(bfloat16, bfloat16)
}
