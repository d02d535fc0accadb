// Products of a few rows and a few vectors at a time, whose sums fit the registers. Every loaded weight is used for
// each vector, and every activation for each row. A row and a vector go through the same operations in every tile.

#pragma once

#include "sixteen.h"

namespace gearbx {

constexpr int TILE_ROWS = 3;
#ifdef GEARBX_AVX512
constexpr int TILE_VECTORS = 8;
#else
constexpr int TILE_VECTORS = 2;
#endif

constexpr int AHEAD = 1024;  // distance of the prefetch, in weights

// Where a tile reads and writes: rows of weights and vectors of activations of `columns` numbers each, and results,
// `rows` numbers from vector to vector.
template <class T>
struct TileOf {
  const T* w;
  const float* x;
  int64_t columns;
  float* y;
  int64_t rows;
  bool from_memory;  // the weights, and not from a cache
};

// Adds the columns after the last multiple of 16: eight at a time to the first sum, and then one by one.
template <class T>
float add_tail(const T* w, const float* x, int64_t from, int64_t columns, EvenOdd sums) {
  int64_t i = from;
  for (; i + 8 <= columns; i += 8) sums.even = multiply_add8(load8(w + i), load8(x + i), sums.even);
  float rest = 0.0f;
  for (; i < columns; i++) rest = multiply_add(to_float(w[i]), x[i], rest);
  return sum8(add8(sums.even, sums.odd)) + rest;
}

// R rows times V vectors; Lanes holds sixteen sums, so that an addition need not wait for the one before.
template <class Lanes, int R, int V, class T>
void multiply_tile(const TileOf<T>& t) {
  const int64_t columns = t.columns, whole = columns / 16 * 16;
  Lanes sums[R][V] = {};
  for (int64_t i = 0; i < whole; i += 16) {
    Lanes rows[R];
    for (int r = 0; r < R; r++) {
      if (t.from_memory) __builtin_prefetch(t.w + r * columns + i + AHEAD);
      load(t.w + r * columns + i, rows[r]);
      rows[r] = hold(rows[r]);
    }
    for (int v = 0; v < V; v++) {
      Lanes x;
      load(t.x + v * columns + i, x);
      x = hold(x);
      for (int r = 0; r < R; r++) sums[r][v] = multiply_add16(rows[r], x, sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      t.y[v * t.rows + r] = add_tail(t.w + r * columns, t.x + v * columns, whole, columns, in_halves(sums[r][v]));
}

// The first V of `vectors`, as often as there are V; then the same with half of V.
template <int R, int V, class T>
void multiply_vectors(TileOf<T> t, int64_t vectors) {
  for (; vectors >= V; vectors -= V, t.x += V * t.columns, t.y += V * t.rows, t.from_memory = false)
    multiply_tile<F16, R, V>(t);
  if constexpr (V > 1) multiply_vectors<R, V / 2>(t, vectors);
}

// `count` rows times `vectors` vectors. The weights are read from memory for the first vectors, and from the cache for
// the others. For a single vector, memory is slower than vectors of eight, and these read it faster than wide ones.
template <class T>
void multiply_rows(TileOf<T> t, int64_t count, int64_t vectors) {
  const auto next = [&](int64_t rows) { t.w += rows * t.columns, t.y += rows, count -= rows; };
  if (vectors > 1)
    for (; count >= TILE_ROWS; next(TILE_ROWS)) multiply_vectors<TILE_ROWS, TILE_VECTORS>(t, vectors);
  for (; count > 0; next(1)) {
    if (vectors > 1)
      multiply_vectors<1, TILE_VECTORS>(t, vectors);
    else
      multiply_tile<EvenOdd, 1, 1>(t);
  }
}

}  // namespace gearbx
