// Products of any number of vectors, and of mixtures of experts. Plain C.

#pragma once

#include "matvec.h"

#ifdef __cplusplus
extern "C" {
#endif

// y (vectors, rows) = x (vectors, columns) times the transposed matrix. The weights are read once for every 16 vectors,
// and a vector's result has the same bits whatever else is in the call.
void gearbx_stack_product(const gearbx_stack* matrix, const float* x, int64_t vectors, float* y);
void gearbx_dense_product(const gearbx_dense* matrix, const float* x, int64_t vectors, float* y);

// What is to be multiplied: pair p is the vector `vector[p]` of x and the matrix of expert `expert[p]`.
typedef struct {
  int64_t count;
  int experts;
  const int32_t* vector;
  const int32_t* expert;
} gearbx_pairs;

// y (count, rows). `first` is the first expert's matrix, the others lie behind it in memory. An expert's weights are
// read once for every 16 vectors that chose it, and not at all if none did. A pair's result has the same bits whatever
// the other pairs are; that of an expert which does not exist is NaN.
void gearbx_stack_experts(const gearbx_stack* first, const gearbx_pairs* pairs, const float* x, float* y);
void gearbx_dense_experts(const gearbx_dense* first, const gearbx_pairs* pairs, const float* x, float* y);

#ifdef __cplusplus
}
#endif
