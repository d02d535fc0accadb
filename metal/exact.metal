// Weights of the format `exact`, each packed byte read once: multiplied, out = x W^T + bias, or written if VECTORS is 0.
//
// One SIMD group computes ROWS rows for all vectors, so that a weight is decoded once. Its lanes go along the columns,
// CODES at a time. The bytes of `high` lie in the order of a row's columns: those that the lanes before a lane take, and
// all lanes in the steps before, say where its own begin. What a step reads of all rows is asked for first, so that memory is
// waited for once; and one sum over the lanes counts for both rows, 16 bits for each.
//
// A vector's result has the same bits in any company: each sum goes through the same operations in the same order,
// whatever VECTORS and ROWS are. Multiplications are fused by name, so that no compiler chooses.
//
// Buffers: x (VECTORS, columns) T; codes (all rows, columns / 8) words; scales and biases (all rows, columns / GROUP_SIZE),
//     bits of bf16; low (all rows, columns) bytes; high (high_bytes) bytes; offsets (all rows + 1), where each row's bytes
//     begin; bias (rows) if HAS_BIAS; chosen (rows), which of all rows, if VECTORS is 0; sizes: rows, columns,
//     high_bytes, and how many all rows are; out (VECTORS, rows) T, or (rows, columns), bits of bf16.
// Offsets may lie: a weight whose byte is not in its row's part of `high` is no number, and nothing else is read.
// Macros, set by kernels/metal_products.py: VECTORS, ROWS, 1 or 2, SIMD_GROUPS, HAS_BIAS, CODES, 8. By
//     kernels/metal_exact.py: SIGN_BITS, 0; GROUP_SIZE; CODE_BITS.
// The grid is whole threadgroups of SIMD_GROUPS * 32 threads.

const int rows = sizes[0];
const int columns = sizes[1];
const int high_bytes = sizes[2];
const int lane = thread_index_in_simdgroup;
const int first_row = (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * ROWS;

const uint units = uint(columns) / CODES;  // of a row: what a lane takes at a time

uint units_before[ROWS];  // of all rows, those before this one; the same of groups
uint groups_before[ROWS];
uint next[ROWS];  // where the row's next byte is in `high`, and how many are there from it on
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

// All lanes take every step, since they count together; in the last one some have no columns.
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

    float weights[ROWS][CODES];  // what codes stand for, then the weights
    uint near = 0;               // how many of this lane's are near zero
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
