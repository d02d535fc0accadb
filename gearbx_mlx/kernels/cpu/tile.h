// Products of a few rows and a few vectors at a time, whose sums fit the registers. Every loaded weight is used for
// each vector, and every activation for each row. A row and a vector go through the same operations in every tile.

#pragma once

#include "activations.h"
#include "chunks.h"
#include "parts.h"

namespace gearbx {

template <class T>
inline void load(const T* p, F8& out) {
  out = load8(p);
}
#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
inline void load(const Split* p, F8& out) { out = load8(&p->value); }
#endif
inline F8 multiply_add(F8 a, F8 b, F8 c) { return multiply_add8(a, b, c); }
#ifdef GEARBX_AVX512
template <class T>
inline void load(const T* p, F16& out) {
  out = load16(p);
}
inline F16 multiply_add(F16 a, F16 b, F16 c) { return multiply_add16(a, b, c); }
#endif
#ifdef GEARBX_PAIRS
inline void load(const Bf16* p, Pairs& out) { out = load32(p); }
inline F16 multiply_add(Pairs a, Pairs b, F16 c) { return multiply_add_pairs(a, b, c); }
#endif

// Adds a product to a sum, which stays in its register: of sixteen registers, a tile leaves none to move it to.
template <class V>
GEARBX_INLINE void add_product(V a, V b, Lanes& sum) {
#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
  asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum = multiply_add(a, b, sum);
#endif
}

// Loads weights for load `i` of a step of activations of type X.
template <class X, class T>
GEARBX_INLINE void load_weights(const T* step, int i, typename Register<X>::type& out) {
#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
  if constexpr (std::is_same_v<X, Split>) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step));
    const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    out = _mm256_castsi256_ps(i ? odd : _mm256_slli_epi32(both, 16));
    return;
  }
#endif
  load(step + i * Register<X>::COUNT, out);
}

// Asks for what is read soon, from `next` to `end`. It goes through memory in order, since several rows at once are
// read more slowly than one after the other, and into the second cache, which can wait for more lines than the first.
struct Prefetch {
  const char *next = nullptr, *end = nullptr;

  Prefetch() = default;
  Prefetch(const void* from, const void* to)
      : next(static_cast<const char*>(from)), end(static_cast<const char*>(to)) {}

  // `count` times 16 numbers of type T.
  template <int count, class T>
  GEARBX_INLINE void ask() {
    if (next >= end) return;
    constexpr int BYTES = count * 16 * sizeof(T);
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += BYTES;
  }
};

// Consecutive rows of weights, and what is read after them.
template <class T>
struct Rows {
  const T* w;
  int64_t count, columns;
  Prefetch next;
};

// Whether one vector meets row after row. One register of eight sums would wait for each addition.
constexpr bool ROW_BY_ROW = PARTS * LANES == 16;

// The sum of all sums, of the products of the columns after the last whole step, if there are any: eight at a time,
// added to the first sums, and then one by one.
template <class X, class T>
float finish_row(const T* w, const float* x, int64_t columns, F8 even, F8 odd) {
  int64_t i = whole_steps<X>(columns);
  for (; i + 8 <= columns; i += 8) even = multiply_add8(load8(w + i), load8(x + i), even);
  float rest = 0.0f;
  for (; i < columns; i++) rest = multiply_add(to_float(w[i]), x[i], rest);
  return sum8(add8(even, odd)) + rest;
}

// `packed`: the whole steps of x.
template <class T, class X>
float multiply_row(const T* w, const X* packed, const float* x, int64_t columns, Prefetch& next) {
  Prefetch prefetch = next;  // in registers
  Lanes sums[PARTS] = {};
  for (int64_t i = 0; i < whole_steps<X>(columns); i += STEP<X>) {
    prefetch.ask<STEP<X> / 16, T>();
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
      typename Register<X>::type weights, one;
      load_weights<X>(w + i, p, weights);
      load(packed + i + p * Register<X>::COUNT, one);
      sums[p] = multiply_add(weights, one, sums[p]);
    }
  }
  next = prefetch;
  const EvenOdd both = join_parts(sums);
  return finish_row<X>(w, x, columns, both.even, both.odd);
}

// Adds the products of columns `from` to `to`, whole steps, of R rows with V vectors; `x` is packed. There are many
// sums, so that an addition need not wait for the one before.
template <int R, int V, class T, class X>
GEARBX_INLINE void add_columns(const T* w, int64_t columns, const X* x, int64_t from, int64_t to,
                               Prefetch& prefetch, Lanes (&sums)[R][V][PARTS]) {
  constexpr int64_t COUNT = Register<X>::COUNT;
  constexpr int LOADS = Register<X>::LOADS;
  Prefetch local = prefetch;  // in registers
  for (int p = 0; p < PARTS; p++) {
    const X* each = x + (p * whole_steps<X>(columns) + from) / PARTS * V;
    Lanes s[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) s[r][v] = sums[r][v][p];
    for (int64_t i = from; i < to; i += STEP<X>, each += LOADS * COUNT * V) {
      if (p == 0) local.ask<R * (STEP<X> / 16), T>();
#pragma GCC unroll 2
      for (int l = 0; l < LOADS; l++) {
        typename Register<X>::type rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          load_weights<X>(w + r * columns + i, p + l, rows[r]);
          rows[r] = hold(rows[r]);
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
          typename Register<X>::type one;
          load(each + (v * LOADS + l) * COUNT, one);
          one = hold(one);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) add_product(rows[r], one, s[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v][p] = s[r][v];
  }
  prefetch = local;
}

// The results of R rows for V vectors, `stride` apart; `x` is as it came.
template <class X, int R, int V, class T>
GEARBX_INLINE void finish_tile(const T* w, const float* x, int64_t columns, const Lanes (&sums)[R][V][PARTS], float* y,
                               int64_t stride) {
  if (columns % STEP<X>) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) {
        const EvenOdd both = join_parts(sums[r][v]);
        y[v * stride + r] = finish_row<X>(w + r * columns, x + v * columns, columns, both.even, both.odd);
      }
    return;
  }
  constexpr int COUNT = R * V, EIGHTS = (COUNT + 7) / 8;
  F8 halves[EIGHTS][8] = {};
  for (int i = 0; i < COUNT; i++) {
    const EvenOdd both = join_parts(sums[i % R][i / R]);
    halves[i / 8][i % 8] = add8(both.even, both.odd);
  }
  float results[8 * EIGHTS];
  for (int i = 0; i < EIGHTS; i++)
    store8(results + 8 * i, add8(sums8(halves[i]), zero8()));  // + 0: as finish_row, which never gives -0
  for (int v = 0; v < V; v++) std::memcpy(y + v * stride, results + v * R, sizeof(float) * R);
}

// R rows times V vectors. Where sums are in several parts, these take turns over columns that stay in the first cache.
template <int R, int V, class T, class X>
void multiply_tile(const T* w, int64_t columns, const X* packed, const float* x, Prefetch& prefetch, float* y,
                   int64_t stride) {
  const int64_t whole = whole_steps<X>(columns), chunk = PARTS == 1 ? whole : 512;
  Lanes sums[R][V][PARTS] = {};
  for (int64_t from = 0; from < whole; from += chunk)
    add_columns<R, V>(w, columns, packed, from, from + chunk < whole ? from + chunk : whole, prefetch, sums);
  finish_tile<X>(w, x, columns, sums, y, stride);
}

// Rows times V vectors, whose results are `stride` apart.
template <int V, class T, class X>
void multiply_group(const Rows<T>& rows, Prefetch prefetch, const X* packed, const float* x, float* y, int64_t stride) {
  const int64_t columns = rows.columns;
  int64_t r = 0;
  for (; r + ROWS_AT_ONCE <= rows.count; r += ROWS_AT_ONCE)
    multiply_tile<ROWS_AT_ONCE, V>(rows.w + r * columns, columns, packed, x, prefetch, y + r, stride);
  for (; r < rows.count; r++)
    multiply_tile<1, V>(rows.w + r * columns, columns, packed, x, prefetch, y + r, stride);
}

// The function for a number of vectors.
template <class T, class X, int V = TILE_VECTORS>
auto group_kernel(int64_t vectors) {
  if constexpr (V > (ROW_BY_ROW ? 2 : 1))
    if (vectors < V) return group_kernel<T, X, V - 1>(vectors);
  return multiply_group<V, T, X>;
}

// Rows times all vectors, whose results are `stride` apart. What follows the rows is on its way while the first group
// of vectors is multiplied; then it is the activations of the next group.
template <class T, class X>
void multiply_rows(const Rows<T>& rows, const Activations<X>& a, float* y, int64_t stride) {
  if (ROW_BY_ROW && a.vectors == 1) {
    Prefetch next = rows.next;
    for (int64_t r = 0; r < rows.count; r++)
      y[r] = multiply_row(rows.w + r * rows.columns, a.packed, a.x, rows.columns, next);
    return;
  }
  const int64_t groups = a.groups();
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = a.first(g), end = a.first(g + 1);
    const Prefetch next = {a.packed_group(g + 1), a.packed_group(g + 2 < groups ? g + 2 : groups)};
    group_kernel<T, X>(end - first)(rows, g ? next : rows.next, a.packed_group(g), a.x + first * rows.columns,
                                 y + first * stride, stride);
  }
}

// Dense and decoded rows share these, which dense.cpp compiles.
extern template void multiply_rows(const Rows<float>&, const Activations<float>&, float*, int64_t);
extern template void multiply_rows(const Rows<Bf16>&, const Activations<ForBf16>&, float*, int64_t);
#ifdef GEARBX_PAIRS
extern template void multiply_rows(const Rows<Bf16>&, const Activations<Bf16>&, float*, int64_t);
#endif

// The products of matrices of equal columns with activations of type X, in chunks of vectors: activations are prepared
// once for all matrices, whose rows the threads share. pieces_of(matrix, vectors) gives a matrix's TilePieces, and
// work(matrix, activations, row, end, y) multiplies some of its rows.
template <class X, class Matrix, class PiecesOf, class Work>
void multiply_matrices(const Matrix* const* matrices, int count, const float* x, int64_t vectors, float* const* y,
                       const PiecesOf& pieces_of, const Work& work) {
  const int64_t columns = matrices[0]->columns;
  const auto some = [&](int64_t first, int n) {
    const Activations<X> activations(x + first * columns, n, columns);
    share_rows(
        count, [&](int i) { return pieces_of(*matrices[i], n); },
        [&](int i, int64_t row, int64_t end) {
          work(*matrices[i], activations, row, end, y[i] + first * matrices[i]->rows);
        });
  };
  in_chunks(vectors, some, MOST_AT_ONCE);
}

// The products of any matrices of equal columns, each with its neighbours for which choose(matrix) is the same function.
template <class Matrix, class Choose>
void multiply_neighbours(const Matrix* const* matrices, int count, const float* x, int64_t vectors, float* const* y,
                         const Choose& choose) {
  for (int i = 0, end; i < count; i = end) {
    const auto multiply = choose(*matrices[i]);
    for (end = i + 1; end < count && choose(*matrices[end]) == multiply;) end++;
    multiply(matrices + i, end - i, x, vectors, y + i);
  }
}

}  // namespace gearbx
