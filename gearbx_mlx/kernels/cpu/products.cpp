// Builds matmuls of any number of vectors, and of mixtures of experts, from matmuls of a few vectors.

#include "products.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "codebook.h"
#include "split.h"

namespace gearbx {
namespace {

void multiply(const gearbx_stack& m, const float* x, int n, float* y) {
  const gearbx_stack* one = &m;
  m.x_bits ? integer_products(&one, 1, x, n, &y) : gearbx_stack_matvec(&m, x, n, y);
}
void multiply(const gearbx_dense& m, const float* x, int n, float* y) { gearbx_dense_product(&m, x, n, y); }
void multiply(const gearbx_exact& m, const float* x, int n, float* y) { gearbx_exact_product(&m, x, n, y); }
void multiply(const gearbx_codebook& m, const float* x, int n, float* y) { gearbx_codebook_product(&m, x, n, y); }

// The number of vectors that the kernel of a matrix takes at once.
template <class Matrix>
constexpr int64_t most_vectors(const Matrix&) {
  return GEARBX_MAX_VECTORS;
}
constexpr int64_t most_vectors(const gearbx_dense&) { return MAX_AT_ONCE; }
constexpr int64_t most_vectors(const gearbx_exact&) { return MAX_AT_ONCE; }
constexpr int64_t most_vectors(const gearbx_stack& m) { return m.x_bits ? MAX_AT_ONCE : GEARBX_MAX_VECTORS; }

template <class Matrix>
Matrix expert(const Matrix& first, int64_t number) {
  Matrix m = first;
  SkipRows{number * m.rows}(m);
  return m;
}

gearbx_codebook expert(const gearbx_codebook& first, int64_t number) {
  gearbx_codebook m = first;
  const int64_t groups = number * m.rows * ((m.columns + GEARBX_CODEBOOK_GROUP - 1) / GEARBX_CODEBOOK_GROUP);
  m.weights += number * m.rows * m.row_words;
  m.codebook += (number * (m.entries ? GEARBX_CODEBOOK_LIBRARY : m.rows)) << m.bits;
  if (m.entries) {
    m.entries += groups;
    m.scales += groups;
    m.midpoints += groups;
  }
  m.outliers += number * m.most_outliers;
  m.outlier_columns += number * m.most_outliers;
  m.outlier_offsets += number * (m.rows + 1);
  return m;
}

template <class Matrix>
void product(const Matrix& m, const float* x, int64_t vectors, float* y) {
  const auto some = [&](int64_t first, int n) { multiply(m, x + first * inputs_of(m), n, y + first * m.rows); };
  in_chunks(vectors, some, most_vectors(m));
}

// A counting sort orders the pairs by expert. Each expert's vectors are gathered, multiplied, and their results
// scattered.
template <class Matrix>
void experts_product(const Matrix& first, const gearbx_pairs& pairs, const float* x, float* y) {
  const int64_t rows = first.rows, columns = first.columns;
  std::vector<int64_t> start(static_cast<size_t>(pairs.experts) + 1, 0), order(static_cast<size_t>(pairs.count));
  const auto chosen = [&](int64_t p) {
    const int32_t e = pairs.expert[p];
    return e < 0 || e >= pairs.experts ? -1 : e;
  };
  for (int64_t p = 0; p < pairs.count; p++) {
    if (chosen(p) >= 0)
      start[static_cast<size_t>(chosen(p)) + 1]++;
    else  // no such expert
      for (int64_t r = 0; r < rows; r++) y[p * rows + r] = NAN;
  }
  for (size_t e = 1; e < start.size(); e++) start[e] += start[e - 1];
  std::vector<int64_t> next(start);
  for (int64_t p = 0; p < pairs.count; p++)
    if (chosen(p) >= 0) order[static_cast<size_t>(next[static_cast<size_t>(chosen(p))]++)] = p;

  const int64_t most = most_vectors(first), held = most < pairs.count ? most : pairs.count;
  std::vector<float> some_x(static_cast<size_t>(held * columns)), some_y(static_cast<size_t>(held * rows));
  for (int e = 0; e < pairs.experts; e++) {
    const int64_t* mine = order.data() + start[static_cast<size_t>(e)];
    const Matrix m = expert(first, e);
    in_chunks(start[static_cast<size_t>(e) + 1] - start[static_cast<size_t>(e)], [&](int64_t from, int n) {
      for (int v = 0; v < n; v++)
        std::memcpy(some_x.data() + v * columns, x + pairs.vector[mine[from + v]] * columns,
                    static_cast<size_t>(columns) * 4);
      multiply(m, some_x.data(), n, some_y.data());
      for (int v = 0; v < n; v++)
        std::memcpy(y + mine[from + v] * rows, some_y.data() + v * rows, static_cast<size_t>(rows) * 4);
    }, most);
  }
}

}  // namespace
}  // namespace gearbx

extern "C" {
void gearbx_stack_product(const gearbx_stack* m, const float* x, int64_t vectors, float* y) {
  gearbx::product(*m, x, vectors, y);
}
void gearbx_stack_products(const gearbx_stack* const* matrices, int count, const float* x, int64_t vectors,
                           float* const* y) {
  bool all_rounded = count > 0;
  for (int i = 0; i < count; i++) all_rounded = all_rounded && matrices[i]->x_bits;
  if (all_rounded) return gearbx::integer_products(matrices, count, x, vectors, y);
  for (int i = 0; i < count; i++) gearbx_stack_product(matrices[i], x, vectors, y[i]);
}
void gearbx_stack_experts(const gearbx_stack* first, const gearbx_pairs* pairs, const float* x, float* y) {
  gearbx::experts_product(*first, *pairs, x, y);
}
void gearbx_dense_experts(const gearbx_dense* first, const gearbx_pairs* pairs, const float* x, float* y) {
  gearbx::experts_product(*first, *pairs, x, y);
}
void gearbx_codebook_experts(const gearbx_codebook* first, const gearbx_pairs* pairs, const float* x, float* y) {
  gearbx::experts_product(*first, *pairs, x, y);
}
void gearbx_exact_experts(const gearbx_exact* first, const gearbx_pairs* pairs, const float* x, float* y) {
  gearbx::experts_product(*first, *pairs, x, y);
}
}
