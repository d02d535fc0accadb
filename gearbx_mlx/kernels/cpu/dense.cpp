// Matrix times vectors over dense weights, which are read in the type that they are stored in. Sums are float32.

#include "matvec.h"
#include "pool.h"
#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int AHEAD = 1024;  // distance of the prefetch, in weights

struct Job {
  const gearbx_dense* matrix;
  const float* x;
  int vectors;
  float* y;
  Pieces pieces;
};

// Two sums for each row and vector, so that an addition need not wait for the one before.
struct Sums {
  F8 even, odd;
};

// Adds the columns after the last multiple of 16: eight at a time to the first sum, and then one by one.
template <class T>
float add_tail(const T* w, const float* x, int64_t from, int64_t columns, Sums sums) {
  int64_t i = from;
  for (; i + 8 <= columns; i += 8) sums.even = multiply_add8(load8(w + i), load8(x + i), sums.even);
  float rest = 0.0f;
  for (; i < columns; i++) rest = multiply_add(to_float(w[i]), x[i], rest);
  return sum8(add8(sums.even, sums.odd)) + rest;
}

// R rows times V vectors, whose sums fit the registers. Every loaded weight is used V times, every activation R times.
// A row and a vector go through the same operations in every tile.
template <class T, int R, int V>
void tile(const Job& job, int64_t row, int vector) {
  const int64_t columns = job.matrix->columns, whole = columns / 16 * 16;
  const T* w = static_cast<const T*>(job.matrix->weights) + row * columns;
  const float* x = job.x + vector * columns;
  F8 even[R][V], odd[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) even[r][v] = odd[r][v] = zero8();
  const auto add = [&](int64_t i, F8 sums[R][V]) __attribute__((always_inline)) {
    F8 part[V];
    for (int v = 0; v < V; v++) part[v] = hold(load8(x + v * columns + i));
    for (int r = 0; r < R; r++) {
      const F8 wide = hold(load8(w + r * columns + i));
      for (int v = 0; v < V; v++) sums[r][v] = multiply_add8(wide, part[v], sums[r][v]);
    }
  };
  for (int64_t i = 0; i < whole; i += 16) {
    if (vector == 0)
      for (int r = 0; r < R; r++) __builtin_prefetch(w + r * columns + i + AHEAD);
    add(i, even);
    add(i + 8, odd);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      job.y[(vector + v) * job.matrix->rows + row + r] =
          add_tail(w + r * columns, x + v * columns, whole, columns, {even[r][v], odd[r][v]});
}

// The weights are read from memory for the first vectors, and from the cache for the others.
template <class T, int R>
void rows_times_vectors(const Job& job, int64_t row) {
  int v = 0;
  for (; v + 2 <= job.vectors; v += 2) tile<T, R, 2>(job, row, v);
  if (v < job.vectors) tile<T, R, 1>(job, row, v);
}

template <class T>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t end = job.pieces.first(piece + 1);
  int64_t row = job.pieces.first(piece);
  if (job.vectors > 1)
    for (; row + 3 <= end; row += 3) rows_times_vectors<T, 3>(job, row);
  for (; row < end; row++) rows_times_vectors<T, 1>(job, row);
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
