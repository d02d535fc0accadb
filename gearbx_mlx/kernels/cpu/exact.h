// Matmuls over bf16 weights that are stored bit for bit inside their own low gear. Plain C, so that a test can call
// them without Python.
//
// A code has the value v = scale * code + bias of the low gear, v determines the neighborhood of the weight, and the
// stored low byte identifies the neighbor. If v is too near zero for that, in the zero cell, `high` has the high bytes,
// row by row and column by column.

#pragma once

#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t rows, columns;    // columns is a multiple of group
  int group;                // 32, 64 or 128
  const uint8_t* codes;     // (rows, columns / 2) bytes, 4-bit codes as packed by MLX
  const uint16_t* scales;   // (rows, columns / group), the bits of bf16
  const uint16_t* biases;   // as scales
  const uint8_t* low;       // (rows, columns)
  const uint8_t* high;      // (count)
  const uint32_t* offsets;  // (rows + 1): start of each row in `high`
  int64_t count;
  int x_bits;               // as in gearbx_dense
  int panel_rows;           // of codes, scales and biases, as in gearbx_stack; other arrays are row by row
} gearbx_exact;

// y (vectors, rows) = x (vectors, columns) times the transposed matrix. Each row is decoded once for all vectors. The
// results are bit-identical to gearbx_dense_product's on the decoded weights. A row is NaN if its offsets do not
// ascend or exceed `high`, or if it needs more bytes than it has.
void gearbx_exact_product(const gearbx_exact* matrix, const float* x, int64_t vectors, float* y);

// As gearbx_dense_products.
void gearbx_exact_products(const gearbx_exact* const* matrices, int count, const float* x, int64_t vectors,
                           float* const* y);

// y (count, rows). `first` is the first expert's matrix; the other experts follow in memory, and share `high`.
void gearbx_exact_experts(const gearbx_exact* first, const gearbx_pairs* pairs, const float* x, float* y);

// The decoded weights (rows, columns), as bits of bf16.
void gearbx_exact_decode(const gearbx_exact* matrix, uint16_t* weights);

// Data that is stored beside the codes, and the check that weights are restored exactly (exact_encode.cpp).
typedef struct {
  int64_t rows, columns;   // columns is a multiple of group
  int group;               // 32, 64 or 128
  const uint16_t* values;  // (rows, columns), the bits of bf16
  const uint8_t* codes;    // (rows, columns / 2) bytes, 4-bit codes as packed by MLX
  const uint16_t* scales;  // (rows, columns / group), the bits of bf16
  const uint16_t* biases;  // as scales
} gearbx_exact_source;

// kept (rows, columns / group): 1, or 0 for a group that is not restored from its codes; its codes, scale and biases
// count as 0. low: as in gearbx_exact. counts (rows): bytes that each row stores in `high`.
void gearbx_exact_examine(const gearbx_exact_source* source, uint8_t* kept, uint8_t* low, uint32_t* counts);

// Writes `high`. offsets (rows): start of each row there.
void gearbx_exact_write_high(const gearbx_exact_source* source, const uint8_t* kept, const uint32_t* offsets,
                             uint8_t* high);

#ifdef __cplusplus
}
#endif
