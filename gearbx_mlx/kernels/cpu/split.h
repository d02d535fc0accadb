// Divides the rows of a matrix into pieces of work, and many vectors into a kernel's chunks; finds later rows.

#pragma once

#include <cstdint>

#include "exact.h"
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

template <class T>
void advance(T*& pointer, int64_t bytes) {
  if (pointer) pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(bytes));
}

inline int64_t size_of(int type) { return type == GEARBX_FLOAT32 ? 4 : 2; }

// Lets a matrix begin `rows` later in memory: some rows of one, or a later expert of a stack.
struct SkipRows {
  int64_t rows;

  void operator()(gearbx_dense& m) const { advance(m.weights, rows * m.columns * size_of(m.type)); }

  void operator()(gearbx_stack& m) const {
    const int64_t groups = m.kind == GEARBX_SYMMETRIC_ROWS ? 1 : m.columns / m.group;
    for (int p = 0; p < m.planes; p++) {
      advance(m.weights[p], rows * bytes_of_row(m, p));
      advance(m.biases[p], rows * groups * size_of(m.scale_type));
    }
    advance(m.scales, rows * groups * size_of(m.scale_type));
  }

  void operator()(gearbx_exact& m) const {
    const int64_t groups = m.columns / m.group;
    advance(m.codes, rows * (m.columns / 2));
    advance(m.scales, rows * groups * 2);
    advance(m.biases, rows * groups * 2);
    advance(m.low, rows * m.columns);
    advance(m.offsets, rows * 4);
  }
};

}  // namespace gearbx
