// Matrix times vectors over dense weights, read in their stored type. Sums are float32.

#include "products.h"
#include "tile.h"

namespace gearbx {
namespace {

constexpr int64_t AHEAD = 8 << 10;  // distance of the prefetch, in bytes

int64_t row_bytes(const gearbx_dense& m) { return m.columns * (m.type == GEARBX_FLOAT32 ? 4 : 2); }

template <class X>
constexpr int64_t TILE = std::is_same_v<X, Paired> ? 32 : TILE_ROWS;

template <class T, class X>
void multiply_piece(const gearbx_dense& m, const Activations<X>& x, int64_t row, int64_t end, float* y) {
  const T* w = static_cast<const T*>(m.weights);
  const int64_t height = block_rows(m.rows, row_bytes(m), x.vectors, TILE<X>);
  for (; row < end; row += height) {
    const int64_t count = end - row < height ? end - row : height;
    const T* rows = w + row * m.columns;
    const Prefetch next = {reinterpret_cast<const char*>(rows) + AHEAD, w + m.rows * m.columns};
    multiply_rows(Rows<T>{rows, count, m.columns, next}, x, y + row, m.rows);
  }
}

template <class X>
TilePieces pieces_of(const gearbx_dense& m, int vectors) {
  return TilePieces(m.rows, row_bytes(m), block_rows(m.rows, row_bytes(m), vectors, TILE<X>), vectors, TILE<X>);
}

template <class T, class X = float>
void multiply(const gearbx_dense* const* matrices, int count, const float* x, int64_t vectors, float* const* y) {
  multiply_matrices<X>(matrices, count, x, vectors, y, pieces_of<X>, multiply_piece<T, X>);
}

}  // namespace

template void multiply_rows(const Rows<float>&, const Activations<float>&, float*, int64_t);
template void multiply_rows(const Rows<Bf16>&, const Activations<ForBf16>&, float*, int64_t);
#ifdef GEARBX_PAIRS
template void multiply_rows(const Rows<Bf16>&, const Activations<Bf16>&, float*, int64_t);
#endif

}  // namespace gearbx

extern "C" void gearbx_dense_products(const gearbx_dense* const* matrices, int count, const float* x, int64_t vectors,
                                      float* const* y) {
  using namespace gearbx;
  multiply_neighbors(matrices, count, x, vectors, y, [](const gearbx_dense& m) {
#ifdef GEARBX_TILES
    if (m.type == GEARBX_BFLOAT16 && m.x_bits && tiles_allowed()) return multiply<Bf16, Paired>;
#endif
    if (m.type == GEARBX_BFLOAT16) return m.x_bits ? multiply<Bf16, RoundedForBf16> : multiply<Bf16, ForBf16>;
    return m.type == GEARBX_FLOAT16 ? multiply<Fp16> : multiply<float>;
  });
}

extern "C" int gearbx_rounds_to_bf16(void) {
  return gearbx::tiles_allowed() || !std::is_same_v<gearbx::RoundedForBf16, gearbx::ForBf16>;
}

extern "C" void gearbx_dense_product(const gearbx_dense* matrix, const float* x, int64_t vectors, float* y) {
  gearbx_dense_products(&matrix, 1, x, vectors, &y);
}
