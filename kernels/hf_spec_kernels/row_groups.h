// Splits rows into groups whose sums fit into registers.

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
