// Splits many vectors into chunks that a kernel takes at once.

#pragma once

#include "matvec.h"

namespace gearbx {

constexpr int64_t MOST_AT_ONCE = 512;  // vectors: for more, activations would take memory, and gain nothing

// Calls run(first, count) for chunks of at most `most` whose sizes differ by at most one: nine and eight for seventeen
// vectors. To read the weights for sixteen vectors and again for one would take longer.
template <class Run>
void in_chunks(int64_t vectors, Run run, int64_t most = GEARBX_MAX_VECTORS) {
  const int64_t chunks = (vectors + most - 1) / most;
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = i * vectors / chunks, end = (i + 1) * vectors / chunks;
    run(first, static_cast<int>(end - first));
  }
}

}  // namespace gearbx
