// Divides the rows of a matrix into pieces of work, and many vectors into a kernel's chunks.

#pragma once

#include <cstdint>

#include "matvec.h"

namespace gearbx {

// Taking a piece takes little time compared with its work, but pieces are small enough that a suspended thread delays
// little.
struct Pieces {
  int64_t rows, height;
  int count;

  // A piece has a multiple of `least` rows, except for the last.
  Pieces(int64_t rows, int64_t row_bytes, int vectors, int64_t least = 1) : rows(rows) {
    constexpr int64_t BYTES = 64 << 10, MOST = 1024;
    const int64_t cost = (row_bytes > 0 ? row_bytes : 1) * (1 + vectors / 4);
    height = BYTES / cost;
    if (height < (rows + MOST - 1) / MOST) height = (rows + MOST - 1) / MOST;
    height = height < least ? least : height / least * least;
    count = static_cast<int>((rows + height - 1) / height);
  }

  int64_t first(int piece) const { return piece * height < rows ? piece * height : rows; }
};

constexpr int64_t MAX_AT_ONCE = 512;  // vectors; with more, activations would take memory without a gain in speed

// Calls run(first, count) for chunks of at most `most` vectors of nearly equal size: nine and eight for seventeen
// vectors. Reading the weights for sixteen vectors and again for one would take longer.
template <class Run>
void in_chunks(int64_t vectors, Run run, int64_t most = GEARBX_MAX_VECTORS) {
  const int64_t chunks = (vectors + most - 1) / most;
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = i * vectors / chunks, end = (i + 1) * vectors / chunks;
    run(first, static_cast<int>(end - first));
  }
}

}  // namespace gearbx
