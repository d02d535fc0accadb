// Weights of the format `exact`, each packed byte read once: multiplied, out = x W^T + bias, or written if VECTORS is 0.
//
// One SIMD group computes ROWS rows for all vectors, so that a weight is decoded once. Its lanes go along the columns,
// CODES at a time. The bytes of `high` lie in the order of a row's columns: those that the lanes before a lane take, and
// all lanes in the steps before, say where its own begin.
//
// A vector's result has the same bits in any company: each sum goes through the same operations in the same order,
// whatever VECTORS and ROWS are. Multiplications are fused by name, so that no compiler chooses.
//
// Buffers: x (VECTORS, columns) T; codes (all rows, columns / 8) words; scales and biases (all rows, columns / GROUP_SIZE),
//     bits of bf16; low (all rows, columns) bytes; high (high_bytes) bytes; offsets (all rows + 1), where each row's bytes
//     begin; bias (rows) if HAS_BIAS; chosen (rows), which of all rows, if VECTORS is 0; sizes: rows, columns,
//     high_bytes, and how many all rows are; out (VECTORS, rows) T, or (rows, columns), bits of bf16.
// Offsets may lie: a weight whose byte is not in its row's part of `high` is no number, and nothing else is read.
// Macros, set by kernels/metal_products.py: VECTORS, ROWS, SIMD_GROUPS, HAS_BIAS, CODES. By kernels/metal_exact.py:
//     SIGN_BITS, 0; GROUP_SIZE; CODE_BITS.
// The grid is whole threadgroups of SIMD_GROUPS * 32 threads.

const int rows = sizes[0];
const int columns = sizes[1];
const int high_bytes = sizes[2];
const int lane = thread_index_in_simdgroup;
const int first_row = (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * ROWS;

uint row_of[ROWS];  // among all rows
uint next[ROWS];    // where the row's next byte is in `high`, and where its bytes end
uint end[ROWS];
UNROLL for (int r = 0; r < ROWS; r++) {
    const bool there = first_row + r < rows;
#if VECTORS
    row_of[r] = first_row + r;
#else
    row_of[r] = there ? min(uint(chosen[first_row + r]), uint(sizes[3] - 1)) : 0;
#endif
    next[r] = there ? offsets[row_of[r]] : 0;
    end[r] = there ? min(offsets[row_of[r] + 1], uint(high_bytes)) : 0;
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
for (int step = 0; step < columns; step += LANES * CODES) {
    const int k = step + lane * CODES;
    const bool inside = k < columns;
#if VECTORS
    float weights[ROWS][CODES];
#endif
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (first_row + r < rows) {
            const size_t unit = (size_t(row_of[r]) * columns + k) / CODES;
            float values[CODES];
            UNROLL for (int i = 0; i < CODES; i++) {
                values[i] = 0.0f;
            }
            ushort lows[LOW_BITS];
            uint near = 0;
            uint bytes = 0;
            if (inside) {
                ushort words[CODE_BITS];
                load_codes<CODE_BITS>((const device ushort*)codes + unit * CODE_BITS, words);
                add_codes<CODE_BITS, 0>(words, values);
                load_codes<LOW_BITS>((const device ushort*)low + unit * LOW_BITS, lows);
                const size_t group = unit * CODES / GROUP_SIZE;
                near = find_values(values, float_of(scales[group]), float_of(biases[group]));
                bytes = popcount(near);
            }
            const uint before = simd_prefix_exclusive_sum(bytes);
            const uint at = next[r] + before;
            next[r] += simd_broadcast(before + bytes, LANES - 1);
            if (inside) {
                const bool there = at <= end[r] && bytes <= end[r] - at;
                ushort found[CODES];
                find_weights(values, lows, near, high, at, there, found);
                UNROLL for (int i = 0; i < CODES; i++) {
#if VECTORS
                    weights[r][i] = float_of(found[i]);
#else
                    out[size_t(first_row + r) * columns + k + i] = found[i];
#endif
                }
            }
        }
    }
#if VECTORS
    if (inside) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float held[CODES];
            UNROLL for (int i = 0; i < CODES; i++) {
                held[i] = float(x[v * columns + k + i]);
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                if (first_row + r < rows) {
                    float dot = 0.0f;
                    UNROLL for (int i = 0; i < CODES; i++) {
                        dot = fma(weights[r][i], held[i], dot);
                    }
                    sums[r][v] += dot;
                }
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
