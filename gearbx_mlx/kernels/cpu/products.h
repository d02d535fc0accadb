// Matmuls of any number of vectors, and of mixtures of experts. Plain C, so that a test can call them without Python.

#pragma once

#include "matvec.h"

#ifdef __cplusplus
extern "C" {
#endif

// y (vectors, rows) = x (vectors, columns) times the transposed matrix. The weights are read once for every 512
// vectors; packed ones without x_bits once for every 16. The results are batch-invariant.
void gearbx_stack_product(const gearbx_stack* matrix, const float* x, int64_t vectors, float* y);
void gearbx_dense_product(const gearbx_dense* matrix, const float* x, int64_t vectors, float* y);

// y[i] = x times the transposed matrix i, for matrices of equal columns. Each result is bit-identical to a separate
// matmul. Threads start once, and activations are prepared once, for neighbors of equal type and x_bits; for stacks
// also of equal group, x_bits and order of codes.
void gearbx_stack_products(const gearbx_stack* const* matrices, int count, const float* x, int64_t vectors,
                           float* const* y);
void gearbx_dense_products(const gearbx_dense* const* matrices, int count, const float* x, int64_t vectors,
                           float* const* y);

// The pairs to compute: pair p is vector `vector[p]` of x times the matrix of expert `expert[p]`.
typedef struct {
  int64_t count;
  int experts;
  const int32_t* vector;
  const int32_t* expert;
} gearbx_pairs;

// y (count, rows). `first` is the first expert's matrix; the others follow it in memory. An expert's weights are read
// as often as for a matmul of its vectors, and not at all without vectors. A pair's bits do not depend on other pairs.
// The result for an expert that does not exist is NaN.
void gearbx_stack_experts(const gearbx_stack* first, const gearbx_pairs* pairs, const float* x, float* y);
void gearbx_dense_experts(const gearbx_dense* first, const gearbx_pairs* pairs, const float* x, float* y);

#ifdef __cplusplus
}

namespace gearbx {

// Each y (vectors, rows of its matrix) = x times the transposed matrix, for any number of vectors. Activations are
// quantized once for neighbors of equal columns, groups and order of codes. All of them have x_bits.
void integer_products(const gearbx_stack* const* matrices, int count, const float* x, int64_t vectors, float* const* y);

}  // namespace gearbx
#endif
