// Splits many vectors into chunks that a kernel takes at once.

#pragma once

#include "matvec.h"

namespace gearbx {

// Calls run(first, count) for chunks of at most GEARBX_MAX_VECTORS whose sizes differ by at most one: nine and eight
// for seventeen vectors. To read the weights for sixteen vectors and again for one would take longer.
template <class Run>
void in_chunks(int64_t vectors, Run run) {
  const int64_t chunks = (vectors + GEARBX_MAX_VECTORS - 1) / GEARBX_MAX_VECTORS;
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = i * vectors / chunks, end = (i + 1) * vectors / chunks;
    run(first, static_cast<int>(end - first));
  }
}

}  // namespace gearbx
