// Matrix times vectors over dense weights in the type they are stored in, accumulated in float32.

#include <vector>

#include "matvec.h"
#include "pool.h"
#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

struct Job {
  const gearbx_dense* matrix;
  const float* x;
  const float* segments;  // the same, for each segment all vectors one after the other (in_segments)
  int vectors;
  float* y;
  Pieces pieces;
};

constexpr int AHEAD = 1024;  // weights that are asked for before they are needed
constexpr int SEGMENT = 256;  // columns that are widened at a time, a multiple of 32

// Vectors that are a power of two apart would fall into the same lines of the cache.
const float* in_segments(const float* x, int vectors, int64_t columns, std::vector<float>& out) {
  if (vectors == 1) return x;
  const int64_t whole = columns / SEGMENT * SEGMENT;
  out.resize(static_cast<size_t>(vectors * columns));
  for (int64_t from = 0; from < columns; from += SEGMENT) {
    const int64_t width = from < whole ? SEGMENT : columns - from;
    for (int v = 0; v < vectors; v++)
      std::memcpy(out.data() + from * vectors + v * width, x + v * columns + from, static_cast<size_t>(width) * 4);
  }
  return out.data();
}

// Columns beyond the last multiple of 32: eight at a time into the first of the four sums, and then one by one.
template <class T>
float add_tail(const T* w, const float* x, int64_t from, int64_t columns, F8 sums[4]) {
  int64_t i = from;
  for (; i + 8 <= columns; i += 8) sums[0] = multiply_add8(load8(w + i), load8(x + i), sums[0]);
  float rest = 0.0f;
  for (; i < columns; i++) rest = multiply_add(to_float(w[i]), x[i], rest);
  return sum8(add8(add8(sums[0], sums[1]), add8(sums[2], sums[3]))) + rest;
}

// Four sums, as many as hide the latency of an addition.
template <class T>
void one_vector(const Job& job, int64_t row) {
  const int64_t columns = job.matrix->columns, whole = columns / 32 * 32;
  const T* w = static_cast<const T*>(job.matrix->weights) + row * columns;
  F8 sums[4] = {zero8(), zero8(), zero8(), zero8()};
  for (int64_t i = 0; i < whole; i += 32) {
    __builtin_prefetch(w + i + AHEAD);
    for (int k = 0; k < 4; k++) sums[k] = multiply_add8(load8(w + i + 8 * k), load8(job.x + i + 8 * k), sums[k]);
  }
  job.y[row] = add_tail(w, job.x, whole, columns, sums);
}

// Of R rows and V vectors at a time, as many as registers hold the sums of: a value that is loaded is used V or R times.
template <int R, int V>
void add_tile(const F8 wide[][SEGMENT / 8], const float* x, int64_t stride, int count, F8 sums[][R][4]) {
  for (int k = 0; k < 4; k++) {
    F8 local[V][R];
    for (int v = 0; v < V; v++)
      for (int r = 0; r < R; r++) local[v][r] = sums[v][r][k];
    for (int i = k; i < count; i += 4) {
      F8 w[R];
      for (int r = 0; r < R; r++) w[r] = hold(wide[r][i]);
      for (int v = 0; v < V; v++) {
        const F8 part = hold(load8(x + v * stride + 8 * i));
        for (int r = 0; r < R; r++) local[v][r] = multiply_add8(w[r], part, local[v][r]);
      }
    }
    for (int v = 0; v < V; v++)
      for (int r = 0; r < R; r++) sums[v][r][k] = local[v][r];
  }
}

// R rows at a time, a segment at a time: weights are widened once for all vectors. For each row and vector the same
// sums as in one_vector, in the same order.
template <class T, int R>
void several_vectors(const Job& job, int64_t first) {
  const int64_t columns = job.matrix->columns, whole = columns / 32 * 32;
  const T* w = static_cast<const T*>(job.matrix->weights) + first * columns;
  F8 sums[GEARBX_MAX_VECTORS][R][4], wide[R][SEGMENT / 8];
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++)
      for (int k = 0; k < 4; k++) sums[v][r][k] = zero8();
  for (int64_t segment = 0; segment < whole; segment += SEGMENT) {
    const int count = static_cast<int>(whole - segment < SEGMENT ? whole - segment : SEGMENT) / 8;
    for (int r = 0; r < R; r++)
      for (int i = 0; i < count; i++) wide[r][i] = load8(w + r * columns + segment + 8 * i);
    const int64_t stride = columns - segment < SEGMENT ? columns - segment : SEGMENT;
    const float* x = job.segments + segment * job.vectors;
    int v = 0;
    for (; v + 4 <= job.vectors; v += 4) add_tile<R, 4>(wide, x + v * stride, stride, count, sums + v);
    for (; v + 2 <= job.vectors; v += 2) add_tile<R, 2>(wide, x + v * stride, stride, count, sums + v);
    for (; v < job.vectors; v++) add_tile<R, 1>(wide, x + v * stride, stride, count, sums + v);
  }
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++) {
      float& y = job.y[v * job.matrix->rows + first + r];
      y = add_tail(w + r * columns, job.x + v * columns, whole, columns, sums[v][r]);
    }
}

template <class T>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t end = job.pieces.first(piece + 1);
  int64_t row = job.pieces.first(piece);
  if (job.vectors == 1) {
    for (; row < end; row++) one_vector<T>(job, row);
  } else {
    for (; row + 3 <= end; row += 3) several_vectors<T, 3>(job, row);
    for (; row < end; row++) several_vectors<T, 1>(job, row);
  }
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_dense_matvec(const gearbx_dense* matrix, const float* x, int vectors, float* y) {
  using namespace gearbx;
  const int size = matrix->type == GEARBX_FLOAT32 ? 4 : 2;
  static thread_local std::vector<float> held;
  const float* segments = in_segments(x, vectors, matrix->columns, held);
  const Job job = {matrix, x, segments, vectors, y, Pieces(matrix->rows, matrix->columns * size, vectors)};
  const auto work = matrix->type == GEARBX_BFLOAT16  ? do_piece<Bf16>
                    : matrix->type == GEARBX_FLOAT16 ? do_piece<Fp16>
                                                     : do_piece<float>;
  share_out(job.pieces.count, work, &job);
}
