// Matrix times vectors over dense weights, which are read in the type that they are stored in. Sums are float32.

#include "matvec.h"
#include "pool.h"
#include "split.h"
#include "tile.h"

namespace gearbx {
namespace {

struct Job {
  const gearbx_dense* matrix;
  const float* x;
  int vectors;
  float* y;
  Pieces pieces;
};

template <class T>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const gearbx_dense& m = *job.matrix;
  const int64_t row = job.pieces.first(piece), count = job.pieces.first(piece + 1) - row;
  const T* w = static_cast<const T*>(m.weights) + row * m.columns;
  multiply_rows<T>({w, job.x, m.columns, job.y + row, m.rows, true}, count, job.vectors);
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
