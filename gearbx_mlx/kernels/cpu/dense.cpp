// Matrix times vectors over dense weights in the type they are stored in, accumulated in float32.

#include "matvec.h"
#include "pool.h"
#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

struct Job {
  const gearbx_dense* matrix;
  const float* x;
  int vectors;
  float* y;
  Pieces pieces;
};

// V: the number of vectors, or 0 for any. Four sums for each, as many as hide the latency of one addition.
template <class T, int V>
void do_rows(const Job& job, int64_t first, int64_t end) {
  const gearbx_dense& m = *job.matrix;
  const int vectors = V ? V : job.vectors;
  const int64_t columns = m.columns;
  F8 sums[V ? V : GEARBX_MAX_VECTORS][4];
  for (int64_t row = first; row < end; row++) {
    const T* w = static_cast<const T*>(m.weights) + row * columns;
    for (int v = 0; v < vectors; v++)
      for (int k = 0; k < 4; k++) sums[v][k] = zero8();
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32) {
      const F8 weights[4] = {load8(w + i), load8(w + i + 8), load8(w + i + 16), load8(w + i + 24)};
      for (int v = 0; v < vectors; v++)
        for (int k = 0; k < 4; k++)
          sums[v][k] = multiply_add8(weights[k], load8(job.x + v * columns + i + 8 * k), sums[v][k]);
    }
    for (; i + 8 <= columns; i += 8) {
      const F8 weights = load8(w + i);
      for (int v = 0; v < vectors; v++)
        sums[v][0] = multiply_add8(weights, load8(job.x + v * columns + i), sums[v][0]);
    }
    for (int v = 0; v < vectors; v++) {
      float rest = 0.0f;
      for (int64_t j = i; j < columns; j++) rest = multiply_add(to_float(w[j]), job.x[v * columns + j], rest);
      job.y[v * m.rows + row] = sum8(add8(add8(sums[v][0], sums[v][1]), add8(sums[v][2], sums[v][3]))) + rest;
    }
  }
}

template <class T>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t first = job.pieces.first(piece), end = job.pieces.first(piece + 1);
  if (job.vectors == 1)
    do_rows<T, 1>(job, first, end);
  else
    do_rows<T, 0>(job, first, end);
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_dense_matvec(const gearbx_dense* matrix, const float* x, int vectors, float* y) {
  using namespace gearbx;
  const int size = matrix->type == GEARBX_FLOAT32 ? 4 : 2;
  const Job job = {matrix, x, vectors, y, Pieces(matrix->rows, matrix->columns * size, vectors)};
  const auto work = matrix->type == GEARBX_BFLOAT16  ? do_piece<Bf16>
                    : matrix->type == GEARBX_FLOAT16 ? do_piece<Fp16>
                                                     : do_piece<float>;
  share_out(job.pieces.count, work, &job);
}
