// Products with rounded activations (x_bits 8 or 16).

#pragma once

#include "matvec.h"

namespace gearbx {

// Each y (vectors, rows of its matrix) = x times the transposed matrix, for any number of vectors. Activations are
// rounded once for neighbours of equal columns, groups and order of codes. All of them have x_bits.
void integer_products(const gearbx_stack* const* matrices, int count, const float* x, int64_t vectors, float* const* y);

}  // namespace gearbx
