// Attention, the second of two launches: the blocks of keys put together.
//
// A thread has one dimension of one query, and goes through its blocks in their order. One in which it sees no key has a
// sum of 0, and is passed over: so a query's result has the same bits, whatever blocks come after those that it sees.
//
// Buffers: parts (B, H, L, blocks, DIMS + 2) float, from attention.metal; out (B, H, L, DIMS) T, 0 for a query that sees
//     no key.
// Macro: DIMS. The grid is a thread for each element of out.

const int blocks = parts_shape[3];
const int d = thread_position_in_grid.x % DIMS;
const size_t first = size_t(thread_position_in_grid.x / DIMS) * blocks * (DIMS + 2);

float best = -INFINITY;
for (int block = 0; block < blocks; block++) {
    const size_t at = first + size_t(block) * (DIMS + 2);
    if (parts[at + DIMS] != 0.0f) {
        best = max(best, parts[at + DIMS + 1]);
    }
}

float total = 0.0f;
float sum = 0.0f;
for (int block = 0; block < blocks; block++) {
    const size_t at = first + size_t(block) * (DIMS + 2);
    if (parts[at + DIMS] != 0.0f) {
        const float weight = precise::exp(parts[at + DIMS + 1] - best);
        total = fma(parts[at + DIMS], weight, total);
        sum = fma(parts[at + d], weight, sum);
    }
}
out[thread_position_in_grid.x] = T(total == 0.0f ? 0.0f : sum / total);
