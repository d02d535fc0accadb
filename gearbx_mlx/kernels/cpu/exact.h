// Products over bf16 weights that are stored bit for bit inside their own low gear. Plain C, so that a test can call
// them without Python.
//
// A code gives the value v = scale * code + bias of the low gear, v gives the neighbourhood of the weight, and the
// stored low bits say which of the neighbours it is. Where v is too near zero for that, in the zero cell, `high` has
// the missing bits, row after row, column after column.
//
// One plane of 3 or 4 bits: `low` is the low byte of each weight, (rows, columns) bytes, and `high` the high bytes of
// the zero cell. Planes of 4 and 4 bits: `low` is the 5 low bits of each weight, packed as MLX packs codes, and `high`
// a byte for each weight near zero, or, in groups of scale 0, both bytes of each weight.

#pragma once

#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t rows, columns;      // columns is a multiple of group
  int group;                  // 32, 64 or 128
  int planes;                 // 1 or 2
  int bits;                   // of the first plane: 3 or 4; 4 if there are two
  const uint8_t* weights[2];  // (rows, columns * bits / 8) bytes, as MLX packs them
  const uint16_t* scales;     // (rows, columns / group), the bits of bf16
  const uint16_t* biases[2];  // as scales
  const uint8_t* low;
  const uint8_t* high;        // (count)
  const uint32_t* offsets;    // (rows + 1): where each row begins in `high`
  int64_t count;
  int x_bits;                 // as in gearbx_dense
  int panel_rows;             // of weights, scales and biases, as in gearbx_stack; `low` and the rest are row after row
} gearbx_exact;

// y (vectors, rows) = x (vectors, columns) times the transposed matrix. Each row is decoded once for all vectors. The
// results are those of gearbx_dense_product on the decoded weights, bit for bit. A row whose offsets do not ascend, or
// leave `high`, or that needs more bytes than it has, gives NaN.
void gearbx_exact_product(const gearbx_exact* matrix, const float* x, int64_t vectors, float* y);

// As gearbx_dense_products.
void gearbx_exact_products(const gearbx_exact* const* matrices, int count, const float* x, int64_t vectors,
                           float* const* y);

// y (count, rows). `first` is the first expert's matrix; the others follow it, and share `high`.
void gearbx_exact_experts(const gearbx_exact* first, const gearbx_pairs* pairs, const float* x, float* y);

// The weights themselves (rows, columns), as bits of bf16.
void gearbx_exact_decode(const gearbx_exact* matrix, uint16_t* weights);

#ifdef __cplusplus
}
#endif
