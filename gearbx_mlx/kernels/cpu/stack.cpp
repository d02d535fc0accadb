// Matrix times vectors over a stack of bit planes, an affine weight of MLX (one plane), or symmetric codes.
//
// For a group, sum_i (scale code_i + bias) x_i = scale * sum_i code_i x_i + bias * sum_i x_i, and only the first sum
// needs an operation for every weight. All rows and vectors go through the same operations in the same order.

#include "integer.h"
#include "planes.h"
#include "pool.h"
#include "prepare.h"
#include "split.h"

namespace gearbx {
namespace {

struct Job {
  const gearbx_stack* matrix;
  const Prepared* prepared;
  int vectors;
  float* y;
  Pieces pieces;
};

template <class Row>
void one_vector(const Job& job, int64_t row) {
  const gearbx_stack& m = *job.matrix;
  const int64_t groups = m.columns / m.group, blocks = m.group / BLOCK;
  const float* sums = job.prepared->sums.data();
  alignas(32) float scales[SEGMENT], offsets[SEGMENT];
  const Row planes(m, row);
  F8 total = zero8();
  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    scales_and_offsets(m, row, segment, count, scales, offsets);
    for (int g = 0; g < count; g++) {
      F8 even = zero8(), odd = zero8();
      for (int64_t b = (segment + g) * blocks; b < (segment + g + 1) * blocks; b++) {
        const float* x = job.prepared->x.data() + b * BLOCK;
        F8 codes[4];
        to_floats(planes.block(b), codes);
        even = multiply_add8(codes[0], load8(x), even);
        odd = multiply_add8(codes[1], load8(x + 8), odd);
        even = multiply_add8(codes[2], load8(x + 16), even);
        odd = multiply_add8(codes[3], load8(x + 24), odd);
      }
      total = multiply_add8(all8(scales[g]), add8(even, odd), total);
    }
    for (int g = 0; g < count; g += 8) total = multiply_add8(load8(offsets + g), load8(sums + segment + g), total);
  }
  job.y[row] = sum8(total);
}

// R rows at a time, one group at a time. The codes become floats once for all vectors, and a vector's activations are
// read once for all rows. For each row and vector, the sums are those of one_vector, in the same order.
template <class Row, int R>
void several_vectors(const Job& job, int64_t first) {
  const gearbx_stack& m = *job.matrix;
  const int64_t groups = m.columns / m.group;
  const int blocks = m.group / BLOCK;
  const float* sums = job.prepared->sums.data();
  alignas(32) float scales[R][SEGMENT], offsets[R][SEGMENT];
  F8 total[GEARBX_MAX_VECTORS][R], codes[R][4 * MOST_BLOCKS];
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++) total[v][r] = zero8();

  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    for (int r = 0; r < R; r++) scales_and_offsets(m, first + r, segment, count, scales[r], offsets[r]);
    for (int g = 0; g < count; g++) {
      for (int r = 0; r < R; r++) {
        const Row planes(m, first + r);
        for (int b = 0; b < blocks; b++) to_floats(planes.block((segment + g) * blocks + b), codes[r] + 4 * b);
      }
      const float* x = job.prepared->x.data() + (segment + g) * job.vectors * m.group;
      for (int v = 0; v < job.vectors; v++, x += m.group) {
        F8 even[R], odd[R];
        for (int r = 0; r < R; r++) even[r] = odd[r] = zero8();
        for (int b = 0; b < 4 * blocks; b += 2) {
          const F8 x_even = hold(load8(x + 8 * b)), x_odd = hold(load8(x + 8 * b + 8));
          for (int r = 0; r < R; r++) {
            even[r] = multiply_add8(codes[r][b], x_even, even[r]);
            odd[r] = multiply_add8(codes[r][b + 1], x_odd, odd[r]);
          }
        }
        for (int r = 0; r < R; r++)
          total[v][r] = multiply_add8(all8(scales[r][g]), add8(even[r], odd[r]), total[v][r]);
      }
    }
    for (int v = 0; v < job.vectors; v++)
      for (int g = 0; g < count; g += 8) {
        const F8 x = load8(sums + v * job.prepared->sums_stride + segment + g);
        for (int r = 0; r < R; r++) total[v][r] = multiply_add8(load8(offsets[r] + g), x, total[v][r]);
      }
  }
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++) job.y[v * m.rows + first + r] = sum8(total[v][r]);
}

template <class Row>
struct WeightOnly {
  static void piece(const void* context, int piece) {
    const Job& job = *static_cast<const Job*>(context);
    const int64_t end = job.pieces.first(piece + 1);
    int64_t row = job.pieces.first(piece);
    if (job.vectors == 1) {
      for (; row < end; row++) one_vector<Row>(job, row);
    } else {
      for (; row + 4 <= end; row += 4) several_vectors<Row, 4>(job, row);
      for (; row < end; row++) several_vectors<Row, 1>(job, row);
    }
  }
};

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_stack_matvec(const gearbx_stack* matrix, const float* x, int vectors, float* y) {
  using namespace gearbx;
  if (matrix->x_bits) return integer_products(&matrix, 1, x, vectors, &y);
  static thread_local Prepared prepared;
  prepare(*matrix, x, vectors, prepared);
  const Job job = {matrix, &prepared, vectors, y, Pieces(matrix->rows, row_bytes(*matrix), vectors)};
  share_out(job.pieces.count, find_work<WeightOnly>(*matrix), &job);
}

extern "C" int gearbx_threads(void) { return gearbx::thread_count(); }
