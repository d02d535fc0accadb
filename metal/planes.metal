// out = x W^T + bias for W as a stack of bit planes, all planes read in one pass. Body of a kernel.
//
// One SIMD group computes ROWS rows for all vectors; its lanes go along the columns, 16 at a time.
// With S = scales[row, group], a weight is  S * sum_p 2^-SHIFT_p code_p  +  sum_p 2^-SHIFT_p bias_p:
// the second sum does not depend on the code, and is multiplied once by the sum of the 16 activations.
//
// Buffers: x (VECTORS, columns) T; w0, w1, ... (rows, columns * WIDTH / 32) uint; scales, b0, b1, ...
//     (rows, columns / GROUP_SIZE); bias (rows) if HAS_BIAS; rows, a number; out (VECTORS, rows) T.
// Macros, set by kernels/metal.py: VECTORS, ROWS, SIMD_GROUPS, GROUP_SIZE, HAS_BIAS, one of X_REGISTERS,
//     X_THREADGROUP, X_DEVICE, and PLANES(DO), which is DO(w0, b0, WIDTH, SHIFT) for every plane.
// Template: T, the type of x and out; STAGED, VECTORS * columns if X_THREADGROUP.
// columns is a multiple of 32, GROUP_SIZE too; the grid is whole threadgroups of SIMD_GROUPS * 32 threads.

const int columns = x_shape[1];
const int lane = thread_index_in_simdgroup;
const int first_row = (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * ROWS;

#if X_THREADGROUP
threadgroup T staged[STAGED];
for (int i = thread_index_in_threadgroup; i < VECTORS * columns; i += SIMD_GROUPS * LANES) {
    staged[i] = x[i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#endif

float sums[ROWS][VECTORS];
for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECTORS; v++) {
        sums[r][v] = 0.0f;
    }
}

for (int k = lane * CODES; k < columns; k += LANES * CODES) {
#if X_REGISTERS
    T held[VECTORS * CODES];
    for (int v = 0; v < VECTORS; v++) {
        for (int i = 0; i < CODES; i++) {
            held[v * CODES + i] = x[v * columns + k + i];
        }
    }
#define X_AT(v) (held + (v) * CODES)
#elif X_THREADGROUP
#define X_AT(v) (staged + (v) * columns + k)
#else
#define X_AT(v) (x + (v) * columns + k)
#endif
    float x_sums[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        x_sums[v] = sum_16(X_AT(v));
    }
    for (int r = 0; r < ROWS; r++) {
        const int row = first_row + r;
        if (row < rows) {
            const size_t at = size_t(row) * columns + k;
            const float scale = float(scales[at / GROUP_SIZE]);
            float offset = 0.0f;
#if VECTORS == 1
            float sum = 0.0f;
#define DO(w, b, WIDTH, SHIFT)                                                  \
    {                                                                           \
        ushort words[WIDTH];                                                    \
        load_codes<WIDTH>(w, at / CODES, words);                                \
        sum += dot_codes<WIDTH>(words, X_AT(0)) * (1.0f / float(1u << SHIFT));  \
        offset += float(b[at / GROUP_SIZE]) * (1.0f / float(1u << SHIFT));      \
    }
            PLANES(DO)
            sums[r][0] += scale * sum + offset * x_sums[0];
#else
            // More than one vector: codes are taken out of their words once, and used for all of them.
            float codes[CODES];
            for (int i = 0; i < CODES; i++) {
                codes[i] = 0.0f;
            }
#define DO(w, b, WIDTH, SHIFT)                                                  \
    {                                                                           \
        ushort words[WIDTH];                                                    \
        load_codes<WIDTH>(w, at / CODES, words);                                \
        add_codes<WIDTH, SHIFT>(words, codes);                                  \
        offset += float(b[at / GROUP_SIZE]) * (1.0f / float(1u << SHIFT));      \
    }
            PLANES(DO)
            for (int v = 0; v < VECTORS; v++) {
                sums[r][v] += scale * dot_16(codes, X_AT(v)) + offset * x_sums[v];
            }
#endif
        }
    }
}

for (int r = 0; r < ROWS; r++) {
    const int row = first_row + r;
    for (int v = 0; v < VECTORS; v++) {
        float y = simd_sum(sums[r][v]);
        if (lane == 0 && row < rows) {
#if HAS_BIAS
            y += float(bias[row]);
#endif
            out[size_t(v) * rows + row] = T(y);
        }
    }
}
