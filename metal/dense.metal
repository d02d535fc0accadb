// out = x W^T for a dense W, of which each byte is read once.
//
// One SIMD group computes ROWS rows for all vectors. Its lanes advance along the columns, CHUNK at a time. With HOLDS_X,
// registers hold x for all vectors and one row of weights; otherwise they hold all rows and x for one vector.
//
// The kernel is batch-invariant: each sum has the same order for any VECTORS and ROWS, and `fma` fixes where it is rounded.
//
// Buffers: x (VECTORS, columns) T; weight (rows, columns), of a type of its own; sizes: rows and columns; out (VECTORS,
//     rows) T.
// Macros: VECTORS, ROWS, SIMD_GROUPS, CHUNK, HOLDS_X, RAGGED (columns is no multiple of CHUNK).
// The grid is whole threadgroups of SIMD_GROUPS * 32 threads.

const int rows = sizes[0];
const int columns = sizes[1];
const int lane = thread_index_in_simdgroup;
const int first_row = (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * ROWS;

// The part of a row that is this lane's.
#if RAGGED
#define LOAD(row, to) load_rest<CHUNK>((row) + k, columns - k, to)
#else
#define LOAD(row, to) load_numbers<CHUNK>((row) + k, to)
#endif

const auto own_rows = weight + size_t(first_row) * columns;
float sums[ROWS][VECTORS];
UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        sums[r][v] = 0.0f;
    }
}

for (int k = lane * CHUNK; k < columns; k += 32 * CHUNK) {
#if HOLDS_X
    float held[VECTORS][CHUNK];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        LOAD(x + v * columns, held[v]);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (first_row + r < rows) {
            float weights[CHUNK];
            LOAD(own_rows + r * columns, weights);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                UNROLL for (int i = 0; i < CHUNK; i++) {
                    sums[r][v] = fma(weights[i], held[v][i], sums[r][v]);
                }
            }
        }
    }
#else
    float weights[ROWS][CHUNK];
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (first_row + r < rows) {
            LOAD(own_rows + r * columns, weights[r]);
        } else {
            UNROLL for (int i = 0; i < CHUNK; i++) {
                weights[r][i] = 0.0f;
            }
        }
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        float held[CHUNK];
        LOAD(x + v * columns, held);
        UNROLL for (int i = 0; i < CHUNK; i++) {
            UNROLL for (int r = 0; r < ROWS; r++) {
                sums[r][v] = fma(weights[r][i], held[i], sums[r][v]);
            }
        }
    }
#endif
}

UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const float sum = simd_sum(sums[r][v]);
        if (lane == 0 && first_row + r < rows) {
            out[size_t(v) * rows + first_row + r] = T(sum);
        }
    }
}
