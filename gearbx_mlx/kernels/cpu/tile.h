// Products of a few rows and a few vectors at a time, whose sums fit the registers. Every loaded weight is used for
// each vector, and every activation for each row. A row and a vector go through the same operations in every tile.

#pragma once

#include "sixteen.h"

namespace gearbx {

constexpr int TILE_ROWS = 3;
#ifdef GEARBX_AVX512
typedef F16 Wide;
constexpr int TILE_VECTORS = 8;
inline EvenOdd both(const F16 (&sums)[1]) { return in_halves(sums[0]); }
template <class T>
inline void load(const T* p, F16& out) {
  out = load16(p);
}
inline F16 multiply_add(F16 a, F16 b, F16 c) { return multiply_add16(a, b, c); }
#else
typedef F8 Wide;
constexpr int TILE_VECTORS = 2;
#endif
inline EvenOdd both(const F8 (&sums)[2]) { return {sums[0], sums[1]}; }
template <class T>
inline void load(const T* p, F8& out) {
  out = load8(p);
}
inline F8 multiply_add(F8 a, F8 b, F8 c) { return multiply_add8(a, b, c); }

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

// R rows times V vectors, in registers of eight or sixteen lanes. There are sixteen sums for each row and vector, so
// that an addition need not wait for the one before.
template <class Lanes, int R, int V, class T>
void multiply_tile(const TileOf<T>& t) {
  constexpr int WIDTH = sizeof(Lanes) / sizeof(float), PARTS = 16 / WIDTH;
  const int64_t columns = t.columns, whole = columns / 16 * 16;
  Lanes sums[R][V][PARTS] = {};
  for (int64_t i = 0; i < whole; i += 16) {
    for (int r = 0; t.from_memory && r < R; r++) __builtin_prefetch(t.w + r * columns + i + AHEAD);
    for (int p = 0; p < PARTS; p++) {
      const int64_t at = i + p * WIDTH;
      Lanes x[V];
      for (int v = 0; v < V; v++) {
        load(t.x + v * columns + at, x[v]);
        x[v] = hold(x[v]);
      }
      for (int r = 0; r < R; r++) {
        Lanes row;
        load(t.w + r * columns + at, row);
        row = hold(row);
        for (int v = 0; v < V; v++) sums[r][v][p] = multiply_add(row, x[v], sums[r][v][p]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      t.y[v * t.rows + r] = add_tail(t.w + r * columns, t.x + v * columns, whole, columns, both(sums[r][v]));
}

// The first V of `vectors`, as often as there are V; then the same with half of V.
template <int R, int V, class T>
void multiply_vectors(TileOf<T> t, int64_t vectors) {
  for (; vectors >= V; vectors -= V, t.x += V * t.columns, t.y += V * t.rows, t.from_memory = false)
    multiply_tile<Wide, R, V>(t);
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
      multiply_tile<F8, 1, 1>(t);
  }
}

}  // namespace gearbx
