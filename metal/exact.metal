// Weights of the format `exact`, each packed byte read once: multiplied, out = x W^T + bias, or decoded if VECTORS is 0.
//
// One SIMD group computes ROWS rows for all vectors, so that a weight is decoded once. Its lanes advance along the columns,
// CODES at a time. The bytes of `high` have the order of a row's columns: a lane's bytes follow those of the lanes before it
// and of all lanes in previous steps. Each step first loads the data of all rows, to wait for memory once. One sum over the
// lanes counts for both rows, with 16 bits for each.
//
// The kernel is batch-invariant: each sum has the same operations in the same order for any VECTORS and ROWS, and `fma`
// fixes where it is rounded.
//
// Buffers: x (VECTORS, columns) T; codes (all rows, columns / 8) words; scales and biases (all rows, columns / GROUP_SIZE),
//     bits of bf16; low (all rows, columns) bytes; high (high_bytes) bytes; offsets (all rows + 1), the start of each row's
//     bytes; bias (rows) if HAS_BIAS; chosen (rows), indices of rows, if VECTORS is 0; sizes: rows, columns, high_bytes,
//     number of all rows; out (VECTORS, rows) T, or (rows, columns), bits of bf16.
// Offsets may be wrong: a weight without a byte in its row's part of `high` is NaN, and no other byte is read.
// Macros, set by kernels/metal.py: VECTORS, ROWS, 1 or 2, SIMD_GROUPS, HAS_BIAS, CODES, 8. By
//     kernels/metal_exact.py: SIGN_BITS, 0; GROUP_SIZE; CODE_BITS.
// The grid is whole threadgroups of SIMD_GROUPS * 32 threads.

const int rows = sizes[0];
const int columns = sizes[1];
const int high_bytes = sizes[2];
const int lane = thread_index_in_simdgroup;
const int first_row = (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * ROWS;

const uint units = uint(columns) / CODES;  // units of a row, of which a lane takes one at a time

uint units_before[ROWS];  // units and groups of all previous rows
uint groups_before[ROWS];
uint next[ROWS];  // index of the row's next byte in `high`, and number of bytes from it on
uint left[ROWS];
UNROLL for (int r = 0; r < ROWS; r++) {
    const bool there = first_row + r < rows;
#if VECTORS
    const uint row = first_row + r;
#else
    const uint row = there ? min(uint(chosen[first_row + r]), uint(sizes[3] - 1)) : 0;
#endif
    units_before[r] = row * units;
    groups_before[r] = row * (uint(columns) / GROUP_SIZE);
    next[r] = there ? offsets[row] : 0;
    const uint end = there ? min(offsets[row + 1], uint(high_bytes)) : 0;
    left[r] = end > next[r] ? end - next[r] : 0;
}

#if VECTORS
float sums[ROWS][VECTORS];
UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        sums[r][v] = 0.0f;
    }
}
#endif

// All lanes take every step, since they count together; in the last step, some have no columns.
for (uint step = 0; step < units; step += LANES) {
    const uint at = step + lane;
    const bool inside = at < units;
    uint words[ROWS];
    ushort lows[ROWS][CODES];
    ushort scale_bits[ROWS];
    ushort offset_bits[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        words[r] = 0;
        scale_bits[r] = 0;
        offset_bits[r] = 0;
        if (inside && first_row + r < rows) {
            const uint unit = units_before[r] + at;
            const uint group = groups_before[r] + at / (GROUP_SIZE / CODES);
            words[r] = codes[unit];
            scale_bits[r] = scales[group];
            offset_bits[r] = biases[group];
            load_numbers<CODES>((const device uchar*)((const device packed_uchar4*)low + unit * (CODES / 4)), lows[r]);
        }
    }

    float weights[ROWS][CODES];  // values of codes, then the weights
    uint near = 0;  // number of this lane's values near zero
    UNROLL for (int r = 0; r < ROWS; r++) {
        const uint count = find_values(words[r], float_of(scale_bits[r]), float_of(offset_bits[r]), weights[r]);
        near |= (inside && first_row + r < rows ? count : 0) << (r * 16);
    }
    const uint before = simd_prefix_exclusive_sum(near);
    const uint all = simd_broadcast(before + near, LANES - 1);

    UNROLL for (int r = 0; r < ROWS; r++) {
        const uint first = as_type<ushort2>(before)[r];
        const uint total = as_type<ushort2>(all)[r];
        find_weights(weights[r], lows[r], float_of(scale_bits[r]), high + next[r], first, total, left[r], lane);
        next[r] += total;
        left[r] -= min(left[r], total);
#if !VECTORS
        if (inside && first_row + r < rows) {
            UNROLL for (int i = 0; i < CODES; i++) {
                out[size_t(first_row + r) * columns + at * CODES + i] = as_type<ushort2>(weights[r][i]).y;
            }
        }
#endif
    }
#if VECTORS
    if (inside) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float held[CODES];
            load_numbers<CODES>(x + v * columns + at * CODES, held);
            UNROLL for (int r = 0; r < ROWS; r++) {
                float dot = 0.0f;
                UNROLL for (int i = 0; i < CODES; i++) {
                    dot = fma(weights[r][i], held[i], dot);
                }
                sums[r][v] += dot;
            }
        }
    }
#endif
}

#if VECTORS
UNROLL for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r;
    UNROLL for (int v = 0; v < VECTORS; v++) {
        float y = simd_sum(sums[r][v]);
        if (lane == 0 && row < rows) {
#if HAS_BIAS
            y += float(bias[row]);
#endif
            out[size_t(v) * rows + row] = T(y);
        }
    }
}
#endif
