// Splits rows into groups whose sums fit into registers, and runs products of these groups.

#pragma once

#include <algorithm>
#include <cstdint>

// Rows are taken in groups of almost one size, `each` of them or one more, and at most `most`.
struct Groups {
    int64_t count, each, larger;

    Groups(int64_t rows, int64_t most)
        : count((rows + most - 1) / most), each(rows / count), larger(rows % count) {}

    int64_t begin(int64_t group) const { return group * each + std::min(group, larger); }
    int64_t size(int64_t group) const { return each + (group < larger); }
};

// ROWS is the number of rows, at most its first value; up to SHARED rows, the outputs share the states.
template <int SHARED, int OUTPUTS, int ROWS, typename Product>
void run_tile(const Product& product, int64_t row, int64_t output, int64_t count) {
    if constexpr (ROWS > 1)
        if (count < ROWS) return run_tile<SHARED, OUTPUTS, ROWS - 1>(product, row, output, count);
    if constexpr (ROWS <= SHARED) {
        product.template tile<OUTPUTS, ROWS>(row, output);
    } else {
        for (int o = 0; o < OUTPUTS; ++o) product.template tile<1, ROWS>(row, output + o);
    }
}

// Calls `product.tile<OUTPUTS, ROWS>(row, output)` for two outputs at a time and groups of at most MOST rows.
template <int MOST, int SHARED, typename Product>
void run_in_pairs(const Product& product, const Groups& groups, int64_t outputs, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t output = 0; output < outputs; output += 2)
        // For groups after the first the codes are in the cache.
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t row = groups.begin(group), count = groups.size(group);
            if (output + 1 < outputs)
                run_tile<SHARED, 2, MOST>(product, row, output, count);
            else
                run_tile<SHARED, 1, MOST>(product, row, output, count);
        }
}
