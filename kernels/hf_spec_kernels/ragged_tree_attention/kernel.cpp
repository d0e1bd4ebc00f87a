// Attention of packed token trees on a CPU: every query by blocks of its own slot's keys.
//
// Queries that share a key head and a slot go through a block together. A result has the same bits
// whatever else is in the step, and on any number of threads: sums depend on the keys that a query
// sees, not on others between them (a tree stores siblings there). So the largest score of all keys
// is found first, weights are added exactly, and values in the order of their entries.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../vectors.h"

namespace {

// Keys of a block: as many as a word has bits.
constexpr int BLOCK = 64;
// Where query heads share a key head in such numbers, blocks of keys are transposed first, so that
// sums need not be taken across lanes. This must not depend on the number of queries.
constexpr int WORTH_TRANSPOSING = 3;
// Queries that go through a block together; fewer, if threads were idle otherwise, or if their
// weights of all keys, in bytes, did not stay near.
constexpr int MAX_ROWS = 64, MIN_ROWS = 16, MAX_WEIGHTS = 1 << 20;
// Those whose sums are in registers at a time, and vectors of each.
constexpr int TOGETHER = REGISTERS == 32 ? 6 : 4, VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline int64_t whole_vectors(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// (S, H, C, D) keys or values: where they are, and how many numbers further the next is.
template <typename T>
struct Pool {
    const T* data;
    int64_t slot, head, entry;
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
};

// Rows of numbers or pairs, `stride` apart, and memory of the same size that is needed after them.
template <typename T>
struct Table {
    const T* data;
    int64_t stride;
    const void* next;
};

// What takes part in a product as 32 bits, and how many numbers it is.
template <typename T>
using Factor = std::conditional_t<std::is_same_v<T, bfloat16>, Bfloat16Pair, float>;

template <typename T>
constexpr int64_t NUMBERS = sizeof(Factor<T>) / sizeof(T);

template <typename T>
inline int64_t factors(int64_t size) {
    return (size + NUMBERS<T> - 1) / NUMBERS<T>;
}

// Keys or values of a block in memory.
template <typename T>
struct Block {
    const T *data, *next;
    int64_t entry, count, size;
};

// A block in rows of whole vectors: as it lies, or copied.
template <typename T>
Table<T> rows_of(const Block<T>& block, InLines<T>& copy) {
    if (block.size % LANES == 0) return {block.data, block.entry, block.next};
    const int64_t stride = whole_vectors(block.size);
    copy.resize(BLOCK * stride);
    for (int64_t i = 0; i < block.count; ++i)
        std::memcpy(&copy[i * stride], block.data + i * block.entry, block.size * sizeof(T));
    return {copy.data(), stride, block.next};
}

// A vector of factors, zeros after the last of `size` numbers.
template <typename T>
inline Floats factors_from(const T* from, int64_t size) {
    constexpr int64_t WHOLE = LANES * NUMBERS<T>;
    T found[WHOLE] = {};
    if (size < WHOLE) {
        for (int64_t i = 0; i < size; ++i) found[i] = from[i];
        from = found;
    }
    return load(reinterpret_cast<const float*>(from));
}

// A row for each factor of a block's keys.
template <typename T>
Table<Factor<T>> transposed(const Block<T>& block, InLines<Factor<T>>& copy) {
    const int64_t rows = factors<T>(block.size);
    copy.resize(whole_vectors(rows) * BLOCK);
    for (int64_t first = 0; first < block.count; first += LANES)
        for (int64_t row = 0; row < rows; row += LANES) {
            const int64_t d = row * NUMBERS<T>;
            Floats tile[LANES] = {};
            for (int i = 0; i < LANES; ++i)
                if (first + i < block.count)
                    tile[i] = factors_from(block.data + (first + i) * block.entry + d, block.size - d);
            transpose(tile);
            for (int i = 0; i < LANES; ++i)
                store(reinterpret_cast<float*>(&copy[(row + i) * BLOCK + first]), tile[i]);
        }
    return {copy.data(), BLOCK, block.next};
}

// A sum of numbers from 0 to 1, of at most 65,536 in all, in any order: it is exact but for what
// each has below 2^-37.
inline double exact_sum(const float* numbers, int64_t count) {
    constexpr double MAGIC = 1.5 * (1 << 15);  // Adding it rounds.
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += (double(numbers[i]) + MAGIC) - MAGIC;
    return sum;
}

// q.k of one query and LANES keys from `first` on, the last one again for those after `count`.
inline Floats products(const float* query, Table<float> keys, int64_t first, int64_t count, int64_t size) {
    // So many at a time keep the multipliers busy, and their sums fit the registers.
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

// Adds `count` rows of a table, weighted, to the sums of ROWS queries, WIDTH vectors of each. Meanwhile
// memory hands out what is next, in order: all at once it would not keep up.
template <int ROWS, int WIDTH, typename W, typename T>
inline void mix(float* sums, int64_t size, const W* weights, int64_t each, Table<T> table,
                int64_t count, int64_t from) {
    Floats found[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) found[r][v] = load(sums + r * size + from + v * LANES);
    constexpr int LINE = 64 / sizeof(T);
    const T *row = table.data + from, *next = static_cast<const T*>(table.next) + from;
    for (int64_t k = 0; k < count; ++k, row += table.stride, next += table.stride)
        for (int v = 0; v < WIDTH; ++v) {
            if (v * LANES % LINE == 0) __builtin_prefetch(next + v * LANES);
            const auto one = load(row + v * LANES);
            for (int r = 0; r < ROWS; ++r)
                found[r][v] = add_product(found[r][v], weights[r * each + k], one);
        }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) store(sums + r * size + from + v * LANES, found[r][v]);
}

// The same for any number of queries, whose sums are `size` apart and weights `each`, and the
// first `width` numbers of the rows.
template <int ROWS = TOGETHER, typename W, typename T>
void mix_all(float* sums, int64_t size, const W* weights, int64_t each, Table<T> table, int64_t count,
             int64_t width, int64_t queries) {
    for (; queries >= ROWS; queries -= ROWS, sums += ROWS * size, weights += ROWS * each) {
        int64_t d = 0;
        for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
            mix<ROWS, VECTORS>(sums, size, weights, each, table, count, d);
        for (; d < width; d += LANES) mix<ROWS, 1>(sums, size, weights, each, table, count, d);
    }
    if constexpr (ROWS > 1)
        if (queries) mix_all<ROWS - 1>(sums, size, weights, each, table, count, width, queries);
}

template <typename T>
inline bool is_finite(Table<T> values, int64_t count, int64_t size) {
    Floats zeros = {};
    for (int64_t k = 0; k < count; ++k)
        for (int64_t d = 0; d < size; d += LANES) zeros += 0.0f * load(values.data + k * values.stride + d);
    return sum_of(zeros) == 0.0f;
}

// The queries of an item, and what they add up.
template <typename T>
struct Rows {
    const Call<T>& call;
    const Item& item;
    int64_t groups, slot, key_size, value_size, first, num_keys, blocks, stride;
    bool transposing;
    // Weights of the keys from `first` on are `stride` apart; largest scores, and sums of weights.
    InLines<float> sums, weights;
    std::vector<float> largest, total;
    InLines<Factor<T>> queries, key_copy;
    InLines<T> value_copy;
    // By block, and in it by query: a bit for each key that the query sees.
    std::vector<uint64_t> sees;

    Rows(const Call<T>& call, const Item& item)
        : call(call),
          item(item),
          groups(call.num_heads / call.kv_heads),
          slot(call.layout.slot[item.segment]),
          key_size(whole_vectors(factors<T>(call.head_size))),
          value_size(whole_vectors(call.value_size)),
          first(first_entry() / BLOCK * BLOCK),
          num_keys(call.layout.num_keys[item.segment]),
          blocks(std::max<int64_t>(0, num_keys - first + BLOCK - 1) / BLOCK),
          // Rows a power of two apart would share few lines of a cache.
          stride(blocks * BLOCK + LANES),
          // In bfloat16 it takes no longer for a single query.
          transposing(std::is_same_v<T, bfloat16> || groups >= WORTH_TRANSPOSING),
          sums(item.count * value_size),
          weights(item.count * stride),
          largest(item.count, NEVER),
          total(item.count),
          queries(item.count * key_size),
          sees(item.count * blocks) {
        for (int64_t row = 0; row < item.count; ++row) {
            const T* from = call.query + token(row) * call.token + head(row) * call.head;
            std::memcpy(&queries[row * key_size], from, call.head_size * sizeof(T));
        }
    }

    void run() {
        for (int64_t begin = first; begin < num_keys; begin += BLOCK) score(begin);
        for (int64_t row = 0; row < item.count; ++row) weigh(row);
        for (int64_t begin = first; begin < num_keys; begin += BLOCK) add(begin);
        finish();
    }

    float* weights_of(int64_t row, int64_t begin) { return weights.data() + row * stride + begin - first; }

    uint64_t* seen_in(int64_t begin) { return sees.data() + (begin - first) / BLOCK * item.count; }

    // Of a block's keys: how many there are, and a bit for each.
    int64_t count_of(int64_t begin) const { return std::min<int64_t>(BLOCK, num_keys - begin); }

    Block<T> block_of(const Pool<T>& pool, int64_t size, int64_t begin) const {
        const T* data = pool.data + slot * pool.slot + item.head * pool.head + begin * pool.entry;
        return {data, data + BLOCK * pool.entry, pool.entry, count_of(begin), size};
    }

    static uint64_t all_of(int64_t count) { return count == BLOCK ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

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

    int64_t position_of(int64_t entry) const {
        const Layout& layout = call.layout;
        const int64_t after = entry - layout.prefix[item.segment];
        return after < 0 ? layout.first_position[item.segment] + entry
                         : layout.key_position[layout.key_start[item.segment] + after];
    }

    // A bit for each of `count` entries from `begin` on that a query sees.
    uint64_t seen(int64_t token, int64_t begin, int64_t count) const {
        const Layout& layout = call.layout;
        const int64_t prefix = layout.prefix[item.segment], oldest_seen = oldest(token);
        const int64_t known = std::clamp<int64_t>(prefix - begin, 0, count);
        uint64_t found = all_of(known);
        const uint8_t* bits = layout.bits + token * layout.num_bytes;
        for (int64_t i = known; i < count;) {
            const int64_t bit = begin + i - prefix;
            const uint64_t rest = bits[bit / 8] >> (bit % 8);
            found |= rest << i;
            i += 8 - bit % 8;
        }
        found &= all_of(count);
        if (oldest_seen > INT32_MIN)
            for (int64_t i = 0; i < count; ++i)
                if (position_of(begin + i) < oldest_seen) found &= ~(uint64_t{1} << i);
        return found;
    }

    // No query of these sees an entry before this one.
    int64_t first_entry() const {
        int64_t first = INT32_MAX;
        for (int64_t row = 0; row < item.count; row += groups) first = std::min(first, oldest(token(row)));
        first = std::min(first, oldest(token(item.count - 1)));
        // An entry is no further behind the first one by position than by number.
        return std::max<int64_t>(0, first - call.layout.first_position[item.segment]);
    }

    // Puts q.k of all queries and a block's keys where their weights will be.
    void multiply(const Block<T>& block, int64_t begin) {
        const int64_t count = block.count;
        if constexpr (std::is_same_v<T, float>)
            if (!transposing) {
                const Table<T> keys = rows_of(block, key_copy);
                for (int64_t row = 0; row < item.count; ++row)
                    for (int64_t i = 0; i < count; i += LANES)
                        store(weights_of(row, begin) + i,
                              products(queries.data() + row * key_size, keys, i, count, key_size));
                return;
            }
        mix_all(weights_of(0, begin), stride, queries.data(), key_size, transposed(block, key_copy),
                factors<T>(block.size), whole_vectors(count), item.count);
    }

    // Turns products of one query and a block's keys into scores.
    void scale(int64_t row, int64_t begin, int64_t count, uint64_t seen) {
        float* mine = weights_of(row, begin);
        const Scoring& scoring = call.scoring;
        Floats most = Floats{} + largest[row];
        for (int64_t i = 0; i < count; i += LANES) {
            Floats scores = load(mine + i) * scoring.scale;
            if (scoring.softcap > 0)
                for (int lane = 0; lane < LANES; ++lane)
                    scores[lane] = std::tanh(scores[lane] / scoring.softcap) * scoring.softcap;
            if (scoring.slopes)
                for (int lane = 0; lane < LANES && i + lane < count; ++lane)
                    scores[lane] -= scoring.slopes[head(row)] *
                                    (call.layout.position[token(row)] - position_of(begin + i + lane));
            if (~seen >> i) scores = lanes_of(seen >> i) ? scores : Floats{} + NEVER;
            most = scores > most ? scores : most;
            store(mine + i, scores);
        }
        largest[row] = largest_of(most);
    }

    void score(int64_t begin) {
        const int64_t count = count_of(begin);
        uint64_t *seen = seen_in(begin), anybody = 0;
        for (int64_t row = 0; row < item.count; ++row) {
            const bool same = row && token(row) == token(row - 1);
            seen[row] = same ? seen[row - 1] : this->seen(token(row), begin, count);
            anybody |= seen[row];
        }
        if (!anybody) return;
        Block<T> keys = block_of(call.keys, call.head_size, begin);
        if (begin + BLOCK >= num_keys) keys.next = block_of(call.values, call.value_size, first).data;
        multiply(keys, begin);
        for (int64_t row = 0; row < item.count; ++row) scale(row, begin, count, seen[row]);
    }

    // Turns all scores of a query into weights. Blocks that nobody sees are never looked at.
    void weigh(int64_t row) {
        // Where nothing is seen there is no number to take off.
        const float offset = largest[row] == NEVER ? 0.0f : largest[row];
        double sum = 0;
        for (int64_t begin = first; begin < num_keys; begin += BLOCK) {
            float* mine = weights_of(row, begin);
            if (!seen_in(begin)[row]) {
                std::fill_n(mine, BLOCK, 0.0f);
                continue;
            }
            const int64_t count = whole_vectors(count_of(begin));
            for (int64_t i = 0; i < count; i += LANES) store(mine + i, exp_of(load(mine + i) - offset));
            sum += exact_sum(mine, count);
        }
        total[row] = static_cast<float>(sum);
    }

    // Adds a block's values, weighted.
    void add(int64_t begin) {
        const int64_t count = count_of(begin);
        const uint64_t all = all_of(count), *seen = seen_in(begin);
        uint64_t everybody = all, anybody = 0;
        for (int64_t row = 0; row < item.count; ++row) {
            everybody &= seen[row];
            anybody |= seen[row];
        }
        if (!anybody) return;
        const Table<T> values = rows_of(block_of(call.values, call.value_size, begin), value_copy);
        // Zero times what is not finite would be added where nobody looks.
        if (everybody == all || is_finite(values, count, value_size))
            return mix_all(sums.data(), value_size, weights_of(0, begin), stride, values, count, value_size,
                           item.count);
        for (int64_t row = 0; row < item.count; ++row)
            for (int64_t i = 0; i < count; ++i)
                if (seen[row] >> i & 1)
                    mix_all(sums.data() + row * value_size, 0, weights_of(row, begin) + i, 0,
                            Table<T>{values.data + i * values.stride, 0, values.next}, 1, value_size, 1);
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
    const int64_t wanted = threads > 1 ? 2 * threads : 1;
    int64_t each = MAX_ROWS, longest = 0;
    for (int64_t segment = 0; segment < layout.num_segments; ++segment)
        longest = std::max<int64_t>(longest, layout.num_keys[segment]);
    while (each > MIN_ROWS && each * longest * int64_t{sizeof(float)} > MAX_WEIGHTS) each /= 2;
    std::vector<Item> items;
    for (;; each /= 2) {
        items.clear();
        for (int64_t segment = 0; segment < layout.num_segments; ++segment) {
            const int64_t rows = (layout.query_start[segment + 1] - layout.query_start[segment]) * groups;
            for (int64_t head = 0; head < call.kv_heads; ++head)
                for (int64_t row = 0; row < rows; row += each)
                    items.push_back({segment, head, row, std::min(each, rows - row)});
        }
        if (each <= MIN_ROWS || static_cast<int64_t>(items.size()) >= wanted) break;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (std::size_t index = 0; index < items.size(); ++index) Rows<T>(call, items[index]).run();
}

}  // namespace

#define ATTEND(NAME, TYPE)                                                                        \
    void attend_##NAME(                                                                            \
        const TYPE* query, int64_t token, int64_t head, const TYPE* keys, int64_t key_slot,        \
        int64_t key_head, int64_t key_entry, const TYPE* values, int64_t value_slot,               \
        int64_t value_head, int64_t value_entry, TYPE* out, const Layout* layout,                  \
        const float* slopes, const float* sinks, float scale, float softcap, int64_t window,       \
        int64_t chunk, int64_t num_heads, int64_t kv_heads, int64_t head_size, int64_t value_size, \
        int threads) {                                                                             \
        attend<TYPE>({query, token, head, {keys, key_slot, key_head, key_entry},                   \
                      {values, value_slot, value_head, value_entry}, out, *layout,                 \
                      {slopes, sinks, scale, softcap, int32_t(window), int32_t(chunk)},            \
                      num_heads, kv_heads, head_size, value_size}, threads);                       \
    }

extern "C" {
ATTEND(float32, float)
ATTEND(bfloat16, bfloat16)
}
