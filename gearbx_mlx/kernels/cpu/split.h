// Divides the rows of a matrix into pieces of work, and many vectors into chunks that a kernel takes at once.

#pragma once

#include <cstdint>

#include "matvec.h"

namespace gearbx {

// Pieces are large enough that taking one takes no time compared with its work, and small enough that a thread which
// the system does not run delays little.
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

constexpr int64_t MAX_AT_ONCE = 512;  // vectors: for more, activations would take memory, and gain nothing

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
