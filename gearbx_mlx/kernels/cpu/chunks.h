// More vectors than a kernel takes at once.

#pragma once

#include "matvec.h"

namespace gearbx {

// Call run(first, count) for chunks of at most GEARBX_MAX_VECTORS that differ by one at most: seventeen vectors as nine
// and eight, since one more vector costs much less than one more reading of the weights. No chunk for no vectors.
template <class Run>
void in_chunks(int64_t vectors, Run run) {
  const int64_t chunks = (vectors + GEARBX_MAX_VECTORS - 1) / GEARBX_MAX_VECTORS;
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = i * vectors / chunks, end = (i + 1) * vectors / chunks;
    run(first, static_cast<int>(end - first));
  }
}

}  // namespace gearbx
