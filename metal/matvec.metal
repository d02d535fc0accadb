// out = x W^T + bias for packed W, each byte of which is read once. Body of the kernel of every format.
//
// One SIMD group computes ROWS rows for all vectors. Its lanes advance along the columns, CODES at a time: packed words,
// codes, products with the activations, scale. A weight is
//     ROW_SCALE(row) * (GROUP_SCALE * sum over planes of 2^-SHIFT code + GROUP_OFFSET);
// terms without the code are multiplied once by the sum of the activations. With TABLES, a code selects an entry, which
// replaces the code. A row's outliers are weights with other values than their codes' entries; they are stored row by row,
// and a row's lanes add them at its end.
//
// The kernel is batch-invariant: sums have the same order in every variant and for any VECTORS, and `fma` fixes where they
// are rounded.
//
// With EXPERTS, every array has the matrices of a mixture in sequence. Adjacent threadgroups compute one pair of a vector and
// an expert, and first move every pointer to the pair's data.
//
// Buffers: x (VECTORS, columns) T; those named by the macros; bias (rows) if HAS_BIAS; sizes: rows, columns and row_words;
//     out (VECTORS, rows) T. With TABLES: codebook (ALL_TABLES, ENTRIES), outliers and outlier_columns, and outlier_offsets
//     (rows + 1), the start of each row's outliers. With EXPERTS: experts (pairs), x (pairs / pairs_of_a_vector, columns), out
//     (pairs, rows), VECTORS 1, and in sizes also pairs_of_a_vector and, with TABLES, the length of an expert's outliers.
// Macros, set by kernels/metal.py: VECTORS, ROWS, SIMD_GROUPS, HAS_BIAS, EXPERTS (without a bias), RAGGED (columns is
//     no multiple of CODES), CODES, PLANE_COUNT, TABLES (per threadgroup, or 0), one of X_REGISTERS, X_THREADGROUP, X_DEVICE;
//     STAGED, VECTORS * columns if X_THREADGROUP.
// Macros, set by kernels/metal_products.py: PLANES(DO): DO(w0, WIDTH, SHIFT) for every plane; ROW_WORDS(WIDTH), words per
//     row; SIGN_BITS, of a word of signed codes; GROUP_SIZE; GROUP_SCALE and GROUP_OFFSET, from `group` and `scale`;
//     ROW_SCALE(row); SCALE_ARRAYS(DO): DO(array, its elements per matrix) for each array of scales and other data of rows or
//     groups. With TABLES: BITS and PLACE(i) of a code; ENTRIES of a table; ALL_TABLES, and the FIRST_TABLE of a threadgroup;
//     TABLE(row, group), a table's address; STEP_WORDS, words of CODES; OWN_CODE, whether each outlier has its own code, or
//     all outliers of a row the first one's.
// T is the type of x and out.
// The grid is whole threadgroups of SIMD_GROUPS * 32 threads.

const int rows = sizes[0];
const int columns = sizes[1];
const int row_words = sizes[2];
const int lane = thread_index_in_simdgroup;
const int groups = (columns + GROUP_SIZE - 1) / GROUP_SIZE;
#if EXPERTS
const int of_a_pair = (rows + SIMD_GROUPS * ROWS - 1) / (SIMD_GROUPS * ROWS);
const int threadgroup_number = threadgroup_position_in_grid.x % of_a_pair;
const int pair = threadgroup_position_in_grid.x / of_a_pair;
const size_t expert = experts[pair];
const int pairs_of_a_vector = sizes[3];
#define NEXT(array, count) array += expert * (count);
#define NEXT_PLANE(w, WIDTH, SHIFT) NEXT(w, rows * ROW_WORDS(WIDTH) * 2 / sizeof(*w))
PLANES(NEXT_PLANE)
SCALE_ARRAYS(NEXT)
#if TABLES
const int most_outliers = sizes[4];
NEXT(codebook, ALL_TABLES * ENTRIES)
NEXT(outliers, most_outliers)
NEXT(outlier_columns, most_outliers)
NEXT(outlier_offsets, rows + 1)
#endif
x += size_t(pair / pairs_of_a_vector) * columns;
out += size_t(pair) * rows;
#else
const int threadgroup_number = threadgroup_position_in_grid.x;
#endif
const int first_row = (threadgroup_number * SIMD_GROUPS + simdgroup_index_in_threadgroup) * ROWS;

#if X_THREADGROUP
threadgroup T staged[STAGED];
for (int i = thread_index_in_threadgroup; i < VECTORS * columns; i += SIMD_GROUPS * LANES) {
    staged[i] = x[i];
}
#endif
#if TABLES
threadgroup float table[TABLES * ENTRIES];
for (int i = thread_index_in_threadgroup; i < TABLES * ENTRIES; i += SIMD_GROUPS * LANES) {
    const int entry = FIRST_TABLE * ENTRIES + i;
    if (entry < ALL_TABLES * ENTRIES) {
        table[i] = float(codebook[entry]);
    }
}
#endif
#if X_THREADGROUP || TABLES
threadgroup_barrier(mem_flags::mem_threadgroup);
#endif

float sums[ROWS][VECTORS];
UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        sums[r][v] = 0.0f;
    }
}

for (int k = lane * CODES; k < columns; k += LANES * CODES) {
#if X_REGISTERS
    T held[VECTORS * CODES];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const auto from = rest_of_row<T>(x + v * columns + k, columns - k);
        UNROLL for (int i = 0; i < CODES; i++) {
            held[v * CODES + i] = from[i];
        }
    }
#define X_AT(v) (held + (v) * CODES)
#elif X_THREADGROUP
#define X_AT(v) rest_of_row<T>(staged + (v) * columns + k, columns - k)
#else
#define X_AT(v) rest_of_row<T>(x + (v) * columns + k, columns - k)
#endif
    float x_sums[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        x_sums[v] = sum_all(X_AT(v));
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = first_row + r;
        if (row < rows) {
#define LOAD(w, WIDTH)                                                                                        \
    const int at = k / CODES * WIDTH;                                                                         \
    const device ushort* row_of_words = (const device ushort*)w + size_t(row) * ROW_WORDS(WIDTH);             \
    ushort words[WIDTH];                                                                                      \
    load_codes<WIDTH>(rest_of_row<ushort>(row_of_words + at, ROW_WORDS(WIDTH) - at), words);
            const size_t group = size_t(row) * groups + k / GROUP_SIZE;
            // Codes are unpacked once for all vectors.
            float dots[VECTORS];
            float codes[CODES];
#if PLANE_COUNT == 1 && !TABLES
#define DO(w, WIDTH, SHIFT)                               \
    {                                                     \
        LOAD(w, WIDTH)                                    \
        mask_codes<WIDTH>(words, codes);                  \
        UNROLL for (int v = 0; v < VECTORS; v++) {        \
            dots[v] = dot_masked<WIDTH>(codes, X_AT(v));  \
        }                                                 \
    }
            PLANES(DO)
#else
            UNROLL for (int i = 0; i < CODES; i++) {
                codes[i] = 0.0f;
            }
#if TABLES
#define DO(w, WIDTH, SHIFT)                        \
    {                                              \
        LOAD(w, WIDTH)                             \
        look_up(words, TABLE(row, group), codes);  \
    }
#else
#define DO(w, WIDTH, SHIFT)                     \
    {                                           \
        LOAD(w, WIDTH)                          \
        add_codes<WIDTH, SHIFT>(words, codes);  \
    }
#endif
            PLANES(DO)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                dots[v] = dot_all(codes, X_AT(v));
            }
#endif
            const float scale = GROUP_SCALE;
            const float offset = GROUP_OFFSET;
            UNROLL for (int v = 0; v < VECTORS; v++) {
                sums[r][v] = fma(scale, dots[v], fma(offset, x_sums[v], sums[r][v]));
            }
        }
    }
}

#if TABLES
// Subtract the values of outliers' codes, and add the outliers.
UNROLL for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r;
    if (row < rows) {
        const int begin = outlier_offsets[row];
        const int end = outlier_offsets[row + 1];
        const device ushort* row_of_words = (const device ushort*)w0 + size_t(row) * ROW_WORDS(STEP_WORDS);
        float below = 0.0f;
        for (int i = begin + lane; i < end; i += LANES) {
            const int column = outlier_columns[i];
            if (OWN_CODE || i == begin + lane) {
                const int coded = OWN_CODE ? column : outlier_columns[begin];
                const device ushort* words = row_of_words + coded / CODES * STEP_WORDS;
                const size_t group = size_t(row) * groups + coded / GROUP_SIZE;
                const float scale = GROUP_SCALE;
                below = fma(scale, TABLE(row, group)[code_from<BITS>(words, PLACE(coded % CODES))], GROUP_OFFSET);
            }
            const float off = float(outliers[i]) - below;
            UNROLL for (int v = 0; v < VECTORS; v++) {
                sums[r][v] = fma(off, float(x[v * columns + column]), sums[r][v]);
            }
        }
    }
}
#endif

UNROLL for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r;
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const float sum = simd_sum(sums[r][v]);
        if (lane == 0 && row < rows) {
#if HAS_BIAS
            const float y = fma(sum, ROW_SCALE(row), float(bias[row]));
#else
            const float y = sum * ROW_SCALE(row);
#endif
            out[size_t(v) * rows + row] = T(y);
        }
    }
}
