// Matrix times vectors over learned codebooks, with outliers stored separately. Plain C, so that a test can call it
// without Python.

#pragma once

#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GEARBX_CODEBOOK_GROUP = 128, GEARBX_CODEBOOK_LIBRARY = 32 };  // columns of a group, codebooks of a library

// A weight is an entry of a codebook, or an outlier. Floating values are fp16, as raw bits.
//
// One codebook per row (V2 of XFP): `entries` is NULL, and a weight is codebook[row][code]. All outliers of a row have
// the same code. A word contains 16, 10, 8, 6 (3 in each half) or 5 codes, the first in the lowest bits.
//
// A library of codebooks (V2a): each group of 128 columns has an entry, a scale and a midpoint, and a weight is
// midpoint + scale * library[entry][code]. Codes are packed as by MLX.
typedef struct {
  int64_t rows, columns;
  int bits;                  // 2 to 6; with a library 2 to 4
  int64_t row_words;         // words of a packed row
  const uint32_t* weights;   // (rows, row_words)
  const uint16_t* codebook;  // (rows, 2^bits), or the library (32, 2^bits)
  const uint8_t* entries;    // (rows, groups) or NULL
  const uint16_t* scales;    // (rows, groups)
  const uint16_t* midpoints;
  const uint16_t* outliers;         // values, row by row
  const uint16_t* outlier_columns;
  const uint32_t* outlier_offsets;  // (rows + 1)
  int64_t most_outliers;            // for experts: the length of each one's lists of outliers, with padding
} gearbx_codebook;

// y (vectors, rows) = x (vectors, columns) times the transposed matrix, accumulated in float32. The weights are read
// once for every 16 vectors. The results are batch-invariant.
void gearbx_codebook_product(const gearbx_codebook* matrix, const float* x, int64_t vectors, float* y);

// As gearbx_stack_experts. Each expert has its own codebooks, or its own library, and its own outliers.
void gearbx_codebook_experts(const gearbx_codebook* first, const gearbx_pairs* pairs, const float* x, float* y);

#ifdef __cplusplus
}

namespace gearbx {
inline int64_t inputs_of(const gearbx_codebook& m) { return m.columns; }
}
#endif
