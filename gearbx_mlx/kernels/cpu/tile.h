// Matmuls of a few rows and a few vectors at a time, whose sums fit the registers. Every loaded weight is used for
// each vector, and every activation for each row. A row and a vector go through the same operations in every tile.

#pragma once

#include <type_traits>

#include "buffer.h"
#include "matrix_tiles.h"
#include "matvec.h"
#include "pool.h"
#include "sixteen.h"
#include "split.h"

namespace gearbx {

// Shares the rows of several matrices among threads at once.

// Rows of a block for a few vectors, with sums in registers for `rows_at_once` rows.
#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
constexpr int TILE_ROWS = 6;
constexpr int rows_at_once(int vectors) { return vectors > 3 ? 2 : 3; }  // ten of sixteen registers are sums
#else
constexpr int TILE_ROWS = 3;
constexpr int rows_at_once(int) { return 3; }
#endif
constexpr int64_t MAX_ROWS = 96;  // per block

// The number of rows of `row_bytes` that are multiplied at a time. For a few vectors it is a tile, in the first-level
// cache. For more vectors it is as many as stay in the second one, since each block reads the activations. Every
// thread gets some blocks of whole tiles.
inline int64_t block_rows(int64_t rows, int64_t row_bytes, int64_t vectors, int64_t tile = TILE_ROWS) {
  constexpr int64_t CACHE = 384 << 10;
  if (vectors <= GEARBX_MAX_VECTORS) return tile;
  const int64_t fit = CACHE / (row_bytes + 1), share = rows / (4 * thread_count()), some = fit < share ? fit : share;
  return some < tile ? tile : some < MAX_ROWS ? some / tile * tile : MAX_ROWS;
}

// Rows of a matrix in pieces of whole tiles. A piece has at least a block. If there are enough bytes for every thread,
// it is so large that its first bytes, which are read without a prefetch, take little of its time.
struct TilePieces {
  int64_t rows, tile;
  Pieces tiles;

  TilePieces(int64_t rows, int64_t row_bytes, int64_t block, int vectors, int64_t tile = TILE_ROWS)
      : rows(rows),
        tile(tile),
        tiles((rows + tile - 1) / tile, tile * row_bytes, vectors, least(row_bytes, block)) {}

  int count() const { return tiles.count; }
  int64_t first(int piece) const {
    const int64_t row = tiles.first(piece) * tile;
    return row < rows ? row : rows;
  }

 private:
  int64_t least(int64_t row_bytes, int64_t block) const {
    constexpr int64_t MAX_BYTES = 512 << 10;
    const int64_t share = rows / (4 * thread_count()), most = MAX_BYTES / (row_bytes + 1);
    const int64_t some = share < most ? share : most;
    return (some > block ? some : block) / tile;
  }
};

// Calls work(matrix number, first row, end of rows) for all pieces of all matrices, on several threads, and returns
// when all calls have. pieces_of(number) gives a matrix's TilePieces.
template <class PiecesOf, class Work>
void share_rows(int matrices, PiecesOf pieces_of, const Work& work) {
  constexpr int MOST = 60;  // matrices at once, of at most 1024 pieces each
  for (int done = 0; done < matrices; done += MOST) {
    const int count = matrices - done < MOST ? matrices - done : MOST;
    struct Job {
      const Work* work;
      PiecesOf* pieces_of;
      int done, ends[MOST];
    } job = {&work, &pieces_of, done, {}};
    for (int i = 0, end = 0; i < count; i++) job.ends[i] = end += pieces_of(done + i).count();
    share_out(
        job.ends[count - 1],
        [](const void* context, int piece) {
          const Job& job = *static_cast<const Job*>(context);
          int i = 0;
          while (piece >= job.ends[i]) i++;
          const auto pieces = (*job.pieces_of)(job.done + i);
          const int own = piece - (i ? job.ends[i - 1] : 0);
          (*job.work)(job.done + i, pieces.first(own), pieces.first(own + 1));
        },
        &job);
  }
}

// The sums of a row and a vector are PARTS registers. A tile has as many vectors as registers can hold sums of.
#ifdef GEARBX_AVX512
typedef F16 Lanes;
constexpr int PARTS = 1, TILE_VECTORS = 8;
inline EvenOdd join_parts(const F16* parts) { return in_halves(*parts); }
#elif defined(GEARBX_AVX2)
typedef F8 Lanes;
constexpr int PARTS = 1, TILE_VECTORS = 5;
inline EvenOdd join_parts(const F8* parts) { return {parts[0], zero8()}; }
#else
typedef F8 Lanes;
constexpr int PARTS = 2, TILE_VECTORS = 4;
inline EvenOdd join_parts(const F8* parts) { return {parts[0], parts[1]}; }
#endif
constexpr int LANES = sizeof(Lanes) / sizeof(float);

// A register of activations of type X, and its size; LOADS of them are added to a sum in one step. Weights are loaded
// into registers of the same kind.
template <class X>
struct Register {
  typedef Lanes type;
  static constexpr int64_t COUNT = LANES;
  static constexpr int LOADS = PARTS * LANES < 16 ? 2 : 1;  // a step is a whole number of prefetches
};

inline void pack(const float* from, float* to) {
  std::memcpy(to, from, Register<float>::LOADS * Register<float>::COUNT * sizeof(float));
}

#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
// Float32 activations for bf16 weights: of sixteen columns the even ones, then the odd ones. One operation makes floats
// of a register's even weights, and a second of its odd weights.
struct Split {
  float value;
};
typedef Split ForBf16;

inline void pack(const float* from, Split* to) {
  const F8 some = load8(from), others = load8(from + 8);
  const auto in_order = [](F8 a) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8)); };
  store8(&to->value, in_order(_mm256_shuffle_ps(some, others, 0x88)));
  store8(&to[8].value, in_order(_mm256_shuffle_ps(some, others, 0xdd)));
}
#else
typedef float ForBf16;
#endif

// Activations are float32. For bf16 weights they may be rounded to bf16, as MLX does in bf16 models, if the processor
// adds pairs of bf16 products.
#ifdef GEARBX_PAIRS
typedef Bf16 RoundedForBf16;
#else
typedef ForBf16 RoundedForBf16;
#endif

#ifdef GEARBX_PAIRS
template <>
struct Register<Bf16> {
  typedef Pairs type;
  static constexpr int64_t COUNT = 32;
  static constexpr int LOADS = 1;
};

inline void pack(const float* from, Bf16* to) { _mm512_storeu_si512(to, round32(from)); }
#endif

// Activations rounded to bf16 for matrix tiles: of 32 columns the first two of each vector, then the next two.
struct Paired {
  uint16_t bits;
};

// The nearest bf16 of 32 numbers; zeros for subnormal ones.
inline void round_step(const float* from, Paired* to) {
#ifdef GEARBX_PAIRS
  _mm512_storeu_si512(to, round32(from));
#else
  for (int i = 0; i < 32; i++) {
    const float near = std::fabs(from[i]) < 0x1p-126f ? 0.0f * from[i] : rounded_to_bf16(from[i]);
    std::memcpy(to + i, reinterpret_cast<const char*>(&near) + 2, 2);
  }
#endif
}

// Columns of a row per step, and vectors at a time.
template <class X>
inline constexpr int64_t STEP = PARTS * Register<X>::COUNT * Register<X>::LOADS;
template <>
inline constexpr int64_t STEP<Paired> = 32;
template <class X>
inline constexpr int64_t VECTORS = std::is_same_v<X, Paired> ? 16 : TILE_VECTORS;

template <class X>
int64_t whole_steps(int64_t columns) {
  return columns / STEP<X> * STEP<X>;
}

// Vectors (vectors, columns), in groups of at most VECTORS whose sizes differ by at most one.
//
// Packed, the vectors of a group are neighbors: the first register of the first step of each vector, then of the
// next step. After all of these come the other registers of each step. Rows a power of two apart would compete for the
// same cache lines. Columns after the last whole step are not packed.
template <class X>
struct Activations {
  const float* x;
  int64_t vectors, columns;
  const X* packed;

  // Packs vectors into memory of the calling thread; its next call overwrites them. A single unrounded vector is not
  // copied.
  Activations(const float* from, int64_t count, int64_t width) : x(from), vectors(count), columns(width) {
    if constexpr (std::is_same_v<X, float>) packed = x;
    if (vectors == 1 && std::is_same_v<X, float>) return;
    static thread_local Buffer<X> memory;
    packed = room_ = memory.room_for(vectors * whole_steps<X>(columns));
    share_out(static_cast<int>(groups()), pack_group, this);
  }

  int64_t groups() const { return (vectors + VECTORS<X> - 1) / VECTORS<X>; }
  int64_t first(int64_t group) const { return group * vectors / groups(); }
  const X* packed_group(int64_t group) const { return packed + first(group) * whole_steps<X>(columns); }

 private:
  X* room_ = nullptr;

  static void pack_group(const void* context, int group) {
    const auto& a = *static_cast<const Activations*>(context);
    const int64_t first = a.first(group), count = a.first(group + 1) - first;
    X* to = a.room_ + first * whole_steps<X>(a.columns);
    if constexpr (std::is_same_v<X, Paired>) {
      for (int64_t i = 0; i < whole_steps<X>(a.columns); i += STEP<X>, to += STEP<X> * count)
        for (int64_t v = 0; v < count; v++) {
          X step[STEP<X>];
          round_step(a.x + (first + v) * a.columns + i, step);
          for (int k = 0; k < STEP<X> / 2; k++) std::memcpy(to + 2 * (k * count + v), step + 2 * k, 4);
        }
    } else {
      pack_registers(a, first, count, to);
    }
  }

  static void pack_registers(const Activations& a, int64_t first, int64_t count, X* to) {
    constexpr int64_t COUNT = Register<X>::COUNT * Register<X>::LOADS;
    for (int p = 0; p < PARTS; p++)
      for (int64_t i = p * COUNT; i < whole_steps<X>(a.columns); i += STEP<X>)
        for (int64_t v = first; v < first + count; v++, to += COUNT) pack(a.x + v * a.columns + i, to);
  }
};

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

// Adds a product to a sum in its register: of sixteen registers, a tile leaves none for a copy.
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

// Prefetches from `next` to `end`. It reads memory in order, since several rows at once are read more slowly than one
// by one, and into the second-level cache, which can wait for more lines than the first.
struct Prefetch {
  const char *next = nullptr, *end = nullptr;

  Prefetch() = default;
  Prefetch(const void* from, const void* to)
      : next(static_cast<const char*>(from)), end(static_cast<const char*>(to)) {}

  // Part `i` of `count` of the next bytes.
  Prefetch share(int64_t i, int64_t count, int64_t bytes) const {
    const char* last = next + (i + 1) * bytes / count;
    return {next + i * bytes / count, last < end ? last : end};
  }

  // `count` times 16 numbers of type T.
  template <int count, class T>
  GEARBX_INLINE void ask() {
    static_assert(count > 0);
    if (next >= end) return;
    constexpr int BYTES = count * 16 * sizeof(T);
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += BYTES;
  }
};

// Consecutive rows of weights, and the memory that is read after them.
template <class T>
struct Rows {
  const T* w;
  int64_t count, columns;
  Prefetch next;
};

// Whether one vector is multiplied row by row. One register of eight sums would wait for each addition.
constexpr bool ROW_BY_ROW = PARTS * LANES == 16;

// The sum of all sums, and of the products of the columns after the last whole step: eight at a time, added to the
// first sums, and then one by one.
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

// Adds the products of columns `from` to `to`, whole steps, of R rows with V vectors; `x` is packed. With many sums, an
// addition need not wait for the previous one.
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
      for (int v = 0; v < V; v++) s[r][v] = from ? sums[r][v][p] : Lanes{};
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

// The results of R rows for V vectors, `stride` apart; `x` is not packed.
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
    store8(results + 8 * i, add8(sums8(halves[i]), zero8()));  // + 0: as finish_row, which never returns -0
  for (int v = 0; v < V; v++) std::memcpy(y + v * stride, results + v * R, sizeof(float) * R);
}

// R rows times V vectors. Sums in several parts alternate over columns that stay in the first-level cache.
template <int R, int V, class T, class X>
void multiply_tile(const T* w, int64_t columns, const X* packed, const float* x, Prefetch& prefetch, float* y,
                   int64_t stride) {
  const int64_t whole = whole_steps<X>(columns), chunk = PARTS == 1 ? whole : 512;
  Lanes sums[R][V][PARTS];
  int64_t from = 0;
  do {
    const int64_t to = from + chunk < whole ? from + chunk : whole;
    add_columns<R, V>(w, columns, packed, from, to, prefetch, sums);
    from = to;
  } while (from < whole);
  finish_tile<X>(w, x, columns, sums, y, stride);
}

// Rows times V vectors, whose results are `stride` apart.
template <int V, class T, class X>
void multiply_group(const Rows<T>& rows, Prefetch prefetch, const X* packed, const float* x, float* y, int64_t stride) {
  const int64_t columns = rows.columns;
  constexpr int R = rows_at_once(V);
  int64_t r = 0;
  for (; r + R <= rows.count; r += R)
    multiply_tile<R, V>(rows.w + r * columns, columns, packed, x, prefetch, y + r, stride);
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

// Rows times all vectors, whose results are `stride` apart. With few vectors, each group prefetches its share of the
// data after the rows, so that memory is read all the time. With many, the first group does, then the next activations.
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
    Prefetch next = rows.next;
    if (a.vectors <= GEARBX_MAX_VECTORS)
      next = next.share(g, groups, rows.count * rows.columns * static_cast<int64_t>(sizeof(T)));
    else if (g)
      next = {a.packed_group(g + 1), a.packed_group(g + 2 < groups ? g + 2 : groups)};
    group_kernel<T, X>(end - first)(rows, next, a.packed_group(g), a.x + first * rows.columns, y + first * stride,
                                    stride);
  }
}

#ifdef GEARBX_TILES
// By matrix tiles; columns after the last whole step as in other matmuls.
inline void multiply_rows(const Rows<Bf16>& rows, const Activations<Paired>& a, float* y, int64_t stride) {
  const int64_t columns = rows.columns, groups = a.groups();
  const auto size = [&](int64_t g) { return g < groups ? a.first(g + 1) - a.first(g) : 0; };
  const auto group = [&](int64_t g) { return g < groups ? &a.packed_group(g)->bits : nullptr; };
  for (int64_t g = 0; g < groups; g += 2)
    multiply_bf16_tiles({&rows.w->bits, rows.count, columns, columns / STEP<Paired>, {group(g), group(g + 1)},
                         {size(g), size(g + 1)}, y + a.first(g) * stride, stride});
  if (columns % STEP<Paired> == 0) return;
  for (int64_t v = 0; v < a.vectors; v++)
    for (int64_t r = 0; r < rows.count; r++)
      y[v * stride + r] += finish_row<Paired>(rows.w + r * columns, a.x + v * columns, columns, zero8(), zero8());
}
#endif

// Dense and decoded rows share these; dense.cpp compiles them.
extern template void multiply_rows(const Rows<float>&, const Activations<float>&, float*, int64_t);
extern template void multiply_rows(const Rows<Bf16>&, const Activations<ForBf16>&, float*, int64_t);
#ifdef GEARBX_PAIRS
extern template void multiply_rows(const Rows<Bf16>&, const Activations<Bf16>&, float*, int64_t);
#endif

// The matmuls of matrices of equal columns with activations of type X, in chunks of vectors: activations are prepared
// once for all matrices, whose rows the threads share. pieces_of(matrix, vectors) returns a matrix's TilePieces, and
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
#ifdef GEARBX_TILES
          release_tiles();
#endif
        });
  };
  in_chunks(vectors, some, MAX_AT_ONCE);
}

// The matmuls of any matrices of equal columns, each with its neighbors that have the same function choose(matrix).
template <class Matrix, class Choose>
void multiply_neighbors(const Matrix* const* matrices, int count, const float* x, int64_t vectors, float* const* y,
                         const Choose& choose) {
  for (int i = 0, end; i < count; i = end) {
    const auto multiply = choose(*matrices[i]);
    for (end = i + 1; end < count && choose(*matrices[end]) == multiply;) end++;
    multiply(matrices + i, end - i, x, vectors, y + i);
  }
}

}  // namespace gearbx
