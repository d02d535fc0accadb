// Matrix times a few vectors, over weights as MLX holds them. Plain C, so that a test can call it without Python.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { GEARBX_FLOAT32 = 0, GEARBX_BFLOAT16 = 1, GEARBX_FLOAT16 = 2 };
enum { GEARBX_MAX_PLANES = 8, GEARBX_MAX_VECTORS = 16 };

// A stack of bit planes, most significant first; one plane is an ordinary affine weight of MLX.
//
// A weight stands for scale * code + bias per group of inputs, where the planes of a stack share the scale, each has
// biases of its own, and plane i counts 2^-(widths[1] + ... + widths[i]).
//
// Symmetric codes are one plane without biases: a weight stands for scale * (code - 2^(width - 1)), or, since codes of 8
// bits are stored with a sign, for scale * code. Their rows may be padded, and may end within a group.
enum { GEARBX_AFFINE = 0, GEARBX_SYMMETRIC_GROUPS = 1, GEARBX_SYMMETRIC_ROWS = 2 };

typedef struct {
  int64_t rows, columns;  // columns is a multiple of group
  int group;              // 32, 64 or 128
  int planes;             // widths of 1 to 6 or 8 bits, 8 together at most
  int widths[GEARBX_MAX_PLANES];           // zeros after the last
  const void* weights[GEARBX_MAX_PLANES];  // (rows, columns * width / 32) uint32, or (rows, row_bytes)
  const void* scales;                      // (rows, columns / group), or of symmetric rows (rows)
  const void* biases[GEARBX_MAX_PLANES];   // (rows, columns / group), none of symmetric codes
  int scale_type;                          // of scales and biases
  int kind;
  int64_t inputs, row_bytes;  // of symmetric codes: inputs that there are, of the columns; bytes from row to row
  int x_bits;  // 0: activations as they are; 8, 16: rounded, with a step per vector and group, and integer products
} gearbx_stack;

typedef struct {
  int64_t rows, columns;
  const void* weights;  // (rows, columns)
  int type;
} gearbx_dense;

// y (vectors, rows) = x (vectors, columns) times the transposed matrix, accumulated in float32, 1 to 16 vectors.
// The weights are read once. A vector's result has the same bits whatever the other vectors are, and on however many
// threads.
void gearbx_stack_matvec(const gearbx_stack* matrix, const float* x, int vectors, float* y);
void gearbx_dense_matvec(const gearbx_dense* matrix, const float* x, int vectors, float* y);

// Shannon entropy in bits of each row of log-probabilities or logits (rows, count).
void gearbx_entropy_bits(const float* logprobs, int64_t rows, int64_t count, float* bits);

// The sum of 32-bit words, modulo 2^32, on all threads: reads memory and does next to nothing else.
uint32_t gearbx_read_sum(const uint32_t* words, int64_t count);

// Threads that work on one product, the caller's included: the number of cores, or GEARBX_THREADS.
int gearbx_threads(void);

#ifdef __cplusplus
}

namespace gearbx {
inline int64_t inputs_of(const gearbx_stack& m) { return m.kind == GEARBX_AFFINE ? m.columns : m.inputs; }
inline int64_t inputs_of(const gearbx_dense& m) { return m.columns; }
}  // namespace gearbx
#endif
