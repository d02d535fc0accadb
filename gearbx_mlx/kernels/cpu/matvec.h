// Matrix times a few vectors, over weights in MLX's layouts. Plain C, so that a test can call it without Python.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { GEARBX_FLOAT32 = 0, GEARBX_BFLOAT16 = 1, GEARBX_FLOAT16 = 2 };
enum { GEARBX_MAX_PLANES = 8, GEARBX_MAX_VECTORS = 16 };

// A stack of bit planes, most significant first; one plane is an ordinary affine weight of MLX.
//
// A plane's weight is scale * code + bias, with a scale and a bias per group of inputs. The planes of a stack share the
// scale, each has its own biases or none, and plane i is multiplied by 2^-(widths[1] + ... + widths[i]). If a stack has
// the first bits of longer codes, with their biases, `middle` times the scale is added to the biases.
//
// Symmetric codes are one plane without biases. A weight is scale * (code - 2^(width - 1)); for 8-bit codes (stored
// signed), it is scale * code. Rows may be padded, and may end within a group.
enum { GEARBX_AFFINE = 0, GEARBX_SYMMETRIC_GROUPS = 1, GEARBX_SYMMETRIC_ROWS = 2 };

typedef struct {
  int64_t rows, columns;  // columns is a multiple of group
  int group;              // 32, 64 or 128
  int planes;             // of 1 to 6 or 8 bits, at most 8 in all
  int widths[GEARBX_MAX_PLANES];           // zeros after the last
  const void* weights[GEARBX_MAX_PLANES];  // (rows, columns * width / 32) uint32; symmetric: (rows, row_bytes)
  const void* scales;                      // (rows, columns / group); GEARBX_SYMMETRIC_ROWS: (rows)
  const void* biases[GEARBX_MAX_PLANES];   // (rows, columns / group); null: zeros; symmetric: none
  float middle;                            // 0, or (1 - 2^-r) / 2 for r omitted bits
  int scale_type;                          // of scales and biases
  int kind;
  int64_t inputs, row_bytes;  // symmetric: columns without padding; bytes per row
  int x_bits;  // 0: unquantized activations; 8, 16: quantized, with a scale per vector and group, for integer matmuls
  // 0, or the rows of a panel, gearbx_panel_rows(). Its data are interleaved: the first uint32 of each row, then the
  // second, and so on; scales and biases too. Only for affine stacks with x_bits, of an 8-bit plane, or of a 4-bit
  // plane and possibly a second of 4, 2 or 1.
  int panel_rows;
} gearbx_stack;

typedef struct {
  int64_t rows, columns;
  const void* weights;  // (rows, columns)
  int type;
  // 0: unquantized activations. Otherwise, for bf16 weights, activations of whole groups of 32 columns are rounded to
  // bf16, if gearbx_rounds_to_bf16(). Subnormal activations, weights and sums then count as 0.
  int x_bits;
} gearbx_dense;

// y (vectors, rows) = x (vectors, columns) times the transposed matrix, accumulated in float32, 1 to 16 vectors.
// Weights are read once. Results are batch-invariant, and independent of the number of threads.
void gearbx_stack_matvec(const gearbx_stack* matrix, const float* x, int vectors, float* y);

// Shannon entropy in bits of each row of log-probabilities or logits (rows, count).
void gearbx_entropy_bits(const float* logprobs, int64_t rows, int64_t count, float* bits);

// The logarithm of the sum of exponentials of each row (rows, count): y (rows).
void gearbx_logsumexp(const float* logits, int64_t rows, int64_t count, float* y);

// For each row of logits (rows, count): the most likely token, the entropy in bits, the two largest log-probabilities,
// and the largest magnitude of a logit: y (rows, 5). Equal numbers count separately, and the first one is the token;
// NaN is ignored.
void gearbx_choices(const float* logits, int64_t rows, int64_t count, float* y);

// Indices of the `most` largest of at least as many numbers, in descending order, the first of equal ones first. NaN is
// the smallest.
void gearbx_largest(const float* x, int64_t count, int most, int64_t* places);

// Settings of sampling (GumbelSampler in decoding/sampling.py). top_p 1, min_p 0 and top_k 0 keep every token. key: of
// MLX's random numbers.
typedef struct {
  float temp, top_p, min_p;
  int top_k;
  uint32_t key[2];
} gearbx_sampling;

// The token with the largest sum of logit over temperature and Gumbel noise, among `count` tokens that the filters
// keep. margin, if not null: its lead times the temperature; its logit could drop by this much.
int64_t gearbx_sampled(const float* logits, int64_t count, const gearbx_sampling* how, float* margin);

// The sum of 32-bit words, modulo 2^32, on all threads, to measure memory bandwidth.
uint32_t gearbx_read_sum(const uint32_t* words, int64_t count);

// The rows of a panel (gearbx_stack): the number that this processor multiplies together.
int gearbx_panel_rows(void);

// Converts a panel's interleaved data to consecutive rows. dwords, words: per row.
void gearbx_rows_of_dwords(const uint32_t* panel, int64_t dwords, uint32_t* rows);
void gearbx_rows_of_words(const uint16_t* panel, int64_t words, uint16_t* rows);

// Whether this processor multiplies bf16 so fast that activations are rounded to it for bf16 weights.
int gearbx_rounds_to_bf16(void);

// 1: products are by matrix tiles (matrix_tiles.h); 0: these kernels have none; -1: the system refuses them.
int gearbx_tiles(void);

// The number of threads of a matmul, with the caller's (pool.h).
int gearbx_threads(void);

#ifdef __cplusplus
}

namespace gearbx {
inline int64_t inputs_of(const gearbx_stack& m) { return m.kind == GEARBX_AFFINE ? m.columns : m.inputs; }
inline int64_t inputs_of(const gearbx_dense& m) { return m.columns; }

// The bytes per row of a plane.
inline int64_t bytes_of_row(const gearbx_stack& m, int plane) {
  return m.kind == GEARBX_AFFINE ? m.columns / 8 * m.widths[plane] : m.row_bytes;
}

inline int64_t row_bytes(const gearbx_stack& m) {
  int bits = 0;
  for (int p = 0; p < m.planes; p++) bits += m.widths[p];
  return m.columns * bits / 8;
}
}  // namespace gearbx
#endif
