// The products of stack.cpp with activations of eight bits, so that codes need not become floats: of a group,
//
//   sum_i (scale code_i + bias) x_i  ~  step (scale sum_i code_i q_i + bias sum_i q_i),   x_i ~ step q_i
//
// Activations have a step per vector and group of inputs, 127 of which are the largest of them. Both sums are exact, and
// both of the rounded activations: codes are not centered, so that the error of a sum of exact ones would not cancel.

#include <cmath>
#include <vector>

#include "dot.h"
#include "planes.h"
#include "pool.h"
#include "split.h"

namespace gearbx {
namespace {

// The activations as bytes, per group all vectors one after the other; per vector and group their step, and the sum of what
// the bytes stand for, filled up with zeros to whole registers of groups.
struct Activations {
  std::vector<int8_t> q;
  std::vector<float> steps, sums, padded;
  int64_t stride;
};

// Activations that are not finite make a step of NaN: the vector's results are then NaN, all of them.
float quantize_group(const float* x, int group, int8_t* q) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < group; i++) {
    const float size = std::fabs(x[i]);
    largest = size > largest ? size : largest;
    finite &= size < INFINITY;
  }
  const float step = largest / 127.0f;
  const float inverse = finite && step >= 0x1p-126f ? 1.0f / step : 0.0f;
  for (int i = 0; i < group; i++) {
    const float whole = inverse > 0.0f ? std::nearbyint(x[i] * inverse) : 0.0f;
    q[i] = static_cast<int8_t>(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
  }
  return finite ? (inverse > 0.0f ? step : 0.0f) : NAN;
}

void quantize(const gearbx_stack& m, const float* x, int vectors, Activations& out) {
  const int64_t groups = m.columns / m.group;
  x = padded(m, x, vectors, out.padded);
  out.stride = (groups + 7) / 8 * 8;
  const size_t size = static_cast<size_t>(vectors * out.stride);
  out.q.resize(static_cast<size_t>(vectors * m.columns));
  out.steps.assign(size, 0.0f);
  out.sums.assign(size, 0.0f);
  for (int v = 0; v < vectors; v++)
    for (int64_t g = 0; g < groups; g++) {
      int8_t* q = out.q.data() + (g * vectors + v) * m.group;
      const size_t at = static_cast<size_t>(v * out.stride + g);
      const float step = quantize_group(x + v * m.columns + g * m.group, m.group, q);
      int total = 0;
      for (int i = 0; i < m.group; i++) total += q[i];
      out.steps[at] = step;
      out.sums[at] = step * static_cast<float>(total);
    }
}

struct Job {
  const gearbx_stack* matrix;
  const Activations* activations;
  int vectors;
  float* y;
  Pieces pieces;
};

// A row, for all vectors: its codes are unpacked once, and each vector goes through the same operations whatever the
// others are. N is the number of vectors where the compiler is to know it, else 0.
template <class Row, int N>
void one_row(const Job& job, int64_t row) {
  const gearbx_stack& m = *job.matrix;
  const Activations& a = *job.activations;
  const int vectors = N ? N : job.vectors, blocks = m.group / BLOCK;
  const int64_t groups = m.columns / m.group;
  constexpr int MOST = N ? N : GEARBX_MAX_VECTORS;
  alignas(32) float scales[SEGMENT], offsets[SEGMENT], factors[MOST][SEGMENT];
  const Row planes(m, row);
  F8 total[MOST];
  for (int v = 0; v < vectors; v++) total[v] = zero8();
  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    scales_and_offsets(m, row, segment, count, scales, offsets);
    for (int v = 0; v < vectors; v++)
      for (int g = 0; g < count; g += 8) {
        const int64_t at = v * a.stride + segment + g;
        const F8 scale = load8(scales + g);
        const F8 offset = multiply_add8(scale, all8(CENTER<Row::BITS>), load8(offsets + g));
        store8(factors[v] + g, multiply8(scale, load8(a.steps.data() + at)));
        total[v] = multiply_add8(offset, load8(a.sums.data() + at), total[v]);
      }
    for (int g = 0; g < count; g++) {
      Bytes32 codes[MOST_BLOCKS];
      const int64_t first = (segment + g) * blocks;
      for (int b = 0; b < blocks; b++) codes[b] = centered<Row::BITS>(planes.block(first + b));
      for (int v = 0; v < vectors; v++) {
        const I8 sums = dot<Row::BITS>(codes, a.q.data() + first * BLOCK * vectors + v * m.group, blocks);
        total[v] = multiply_add8(all8(factors[v][g]), to_floats(sums), total[v]);
      }
    }
  }
  for (int v = 0; v < vectors; v++) job.y[v * m.rows + row] = sum8(total[v]);
}

template <class Row>
struct Integer {
  static void piece(const void* context, int piece) {
    const Job& job = *static_cast<const Job*>(context);
    const int64_t end = job.pieces.first(piece + 1);
    for (int64_t row = job.pieces.first(piece); row < end; row++)
      job.vectors == 1 ? one_row<Row, 1>(job, row) : one_row<Row, 0>(job, row);
  }
};

}  // namespace

void integer_matvec(const gearbx_stack& matrix, const float* x, int vectors, float* y) {
  static thread_local Activations activations;
  quantize(matrix, x, vectors, activations);
  const Job job = {&matrix, &activations, vectors, y, Pieces(matrix.rows, row_bytes(matrix), 1)};
  share_out(job.pieces.count, find_work<Integer>(matrix), &job);
}

}  // namespace gearbx
