// Matrix times vectors over dense weights, which are read in the type that they are stored in. Sums are float32.

#include "products.h"
#include "tile.h"

namespace gearbx {
namespace {

int64_t row_bytes(const gearbx_dense& m) { return m.columns * (m.type == GEARBX_FLOAT32 ? 4 : 2); }

template <class T>
void multiply_piece(const gearbx_dense& m, const Activations& x, int64_t row, int64_t end, float* y) {
  const T* w = static_cast<const T*>(m.weights);
  const int64_t height = block_rows(m.rows, row_bytes(m), x.vectors);
  for (; row < end; row += height) {
    const int64_t count = end - row < height ? end - row : height;
    multiply_rows<T>({w + row * m.columns, count, m.columns, w + m.rows * m.columns}, x, y + row, m.rows);
  }
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_dense_products(const gearbx_dense* const* matrices, int count, const float* x, int64_t vectors,
                                      float* const* y) {
  using namespace gearbx;
  const Activations activations(x, vectors, matrices[0]->columns);
  const auto pieces_of = [&](int i) {
    const gearbx_dense& m = *matrices[i];
    return TilePieces(m.rows, row_bytes(m), block_rows(m.rows, row_bytes(m), vectors), vectors);
  };
  share_rows(count, pieces_of, [&](int i, int64_t row, int64_t end) {
    const auto multiply = matrices[i]->type == GEARBX_BFLOAT16  ? multiply_piece<Bf16>
                          : matrices[i]->type == GEARBX_FLOAT16 ? multiply_piece<Fp16>
                                                                : multiply_piece<float>;
    multiply(*matrices[i], activations, row, end, y[i]);
  });
}

extern "C" void gearbx_dense_product(const gearbx_dense* matrix, const float* x, int64_t vectors, float* y) {
  gearbx_dense_products(&matrix, 1, x, vectors, &y);
}

extern "C" void gearbx_dense_matvec(const gearbx_dense* matrix, const float* x, int vectors, float* y) {
  gearbx_dense_products(&matrix, 1, x, vectors, &y);
}
