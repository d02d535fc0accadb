// Puts the activations in the order of unpacked codes (codes.h), once per call.

#pragma once

#include <vector>

#include "planes.h"

namespace gearbx {

// x: per group, per vector, per block, lane l of register k is input 4 l + k divided by PLACE[k]. The vectors of a
// group are neighbours, since vectors a power of two apart would compete for the same lines of the cache. sums: of the
// activations, per vector and group, with zeros up to whole registers; they are multiplied by the offset that a group's
// weights share.
struct Prepared {
  std::vector<float> x, sums, padded;
  int64_t sums_stride;
};

inline void prepare(const gearbx_stack& matrix, const float* x, int vectors, Prepared& out) {
  const int64_t columns = matrix.columns, groups = columns / matrix.group;
  x = padded(matrix, x, vectors, out.padded);
  out.sums_stride = (groups + 7) / 8 * 8;
  out.x.resize(static_cast<size_t>(vectors * columns));
  out.sums.assign(static_cast<size_t>(vectors * out.sums_stride), 0.0f);
  for (int v = 0; v < vectors; v++) {
    const float* from = x + v * columns;
    for (int64_t g = 0; g < groups; g++) {
      float* to = out.x.data() + (g * vectors + v) * matrix.group;
      for (int block = 0; block < matrix.group; block += BLOCK)
        for (int k = 0; k < 4; k++)
          for (int l = 0; l < 8; l++)
            to[block + 8 * k + l] = from[g * matrix.group + block + 4 * l + k] * (1.0f / PLACE[k]);
      F8 sum = zero8();
      for (int i = 0; i < matrix.group; i += 8) sum = add8(sum, load8(from + g * matrix.group + i));
      out.sums[static_cast<size_t>(v * out.sums_stride + g)] = sum8(sum);
    }
  }
}

}  // namespace gearbx
