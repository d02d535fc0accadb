// Matmuls of stacks with activations of 8 or 16 bits, so that codes need not become floats. For a group,
//
//   sum_i (scale code_i + bias) x_i  ~  step (scale sum_i code_i q_i + bias sum_i q_i),   x_i ~ step q_i
//
// Both sums are exact, and both use the quantized activations: codes are not centered, so that rounding errors would
// not cancel if the second sum used the original activations. A result is the sum of its groups, in their order.
//
// LANES rows at a time become a panel (panel.h). It is multiplied with all vectors, so that weights are read from
// memory once. The rows of a panel are neighbors in memory, and the next panel is prefetched. One vector is multiplied
// row by row. Rows that are stored in panels (`panel_rows`) need no conversion, for any number of vectors. All variants
// are bit-identical: sums over a group are integers, and floats are added in one order.

#include "products.h"

#include <type_traits>
#include <utility>
#include <vector>

#include "panel.h"
#include "split.h"

namespace gearbx {

// One vector times the rows of a stack, row by row, as memory is read fastest. The results are bit-identical to those
// of panels: the sum over a group is an integer, followed by the same operations on floats.
//
// A register is 4 * LANES bytes of a row, in one or several groups. The registers of LANES groups are folded until each
// lane is the sum over one group.

#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)

constexpr bool ROW_BY_ROW = true;
constexpr int MAX_COLUMNS_AT_ONCE = 8192, MAX_GROUPS_AT_ONCE = MAX_COLUMNS_AT_ONCE / 32;  // columns and groups at a time
// Distance of the prefetch in bytes, and its period in registers: for every cache line. With a lower period, one core
// reads 8-bit codes somewhat faster, and several cores read them more slowly.
constexpr int AHEAD = 3072, STEP = 64 / (4 * LANES);

// Sources of lanes, so that groups are in order after folding from R lanes per group.
template <int R>
struct Order {
  alignas(64) int32_t from[LANES];
  constexpr Order() : from() {
    constexpr int Q = LANES / 4;
    for (int g = 0; g < LANES; g++)
      from[g] = R == 2 ? g % (LANES / 2) / 2 * 4 + g / (LANES / 2) * 2 + g % 2 : g % Q * 4 + g / Q;
  }
};

// The codes of P planes of W bits, times activations of X bytes.
template <int W, int P, int G, int X>
struct RowSums {
  static constexpr int IN_BYTE = 8 / W, CODES = 4 * LANES * IN_BYTE;        // per register
  static constexpr int SPAN = G > CODES ? G / CODES : 1;                    // registers with only one group
  static constexpr int R = G > CODES ? LANES : LANES * G / CODES;           // lanes per group
  static constexpr int STORED = R == LANES ? R / 2 : R;                     // lanes that are written
  static constexpr bool NARROW = W * P <= 4;

  template <int K>
  GEARBX_INLINE static void add(const Ints (*bytes)[1], uint32_t flip, const int8_t* x, Sums<NARROW>* sums) {
    Ints codes = joined<W, P, K, 1>(bytes, 0);
    if constexpr (W * P > 4) codes = flip_ints(codes, flip);
    for (int b = 0; b < X; b++) sums[b].add(codes, load_ints(x + b * CODES + K * 4 * LANES));
    if constexpr (K + 1 < IN_BYTE) add<K + 1>(bytes, flip, x, sums);
  }

  GEARBX_INLINE static Ints one(const uint8_t* const* planes, int i, uint32_t flip, const int8_t* x) {
    Ints totals[X];
    for (int b = 0; b < X; b++) totals[b] = zero_ints();
#pragma GCC unroll 8
    for (int span = 0; span < SPAN; span++) {
      const int s = i * SPAN + span;
      Ints bytes[P][1];
      for (int p = 0; p < P; p++) bytes[p][0] = load_ints(planes[p] + s * 4 * LANES);
      Sums<NARROW> sums[X];
      for (int b = 0; b < X; b++) sums[b].begin(totals[b]);
      add<0>(bytes, flip, x + s * CODES * X, sums);
      for (int b = 0; b < X; b++) totals[b] = sums[b].end(totals[b]);
    }
    return X == 1 ? totals[0] : add_ints(totals[X - 1], multiply_ints(totals[0], BASE));
  }

  // N sums of registers, folded into one.
  template <int N>
  GEARBX_INLINE static Ints folded(const int32_t* sums) {
    if constexpr (N == 1)
      return load_ints(sums);
    else
      return fold<2 * STORED / N>(folded<N / 2>(sums), folded<N / 2>(sums + N / 2 * LANES));
  }

  // The sums of `blocks` times LANES groups. Registers are read in a separate loop, because processors predict the
  // reads of one instruction along consecutive lines.
  static void write(const uint8_t* const* row, int blocks, uint32_t flip, const int8_t* x, int32_t* out) {
    static constexpr Order<R> order;
    alignas(64) int32_t sums[(MAX_COLUMNS_AT_ONCE / G + LANES) * STORED];
    const uint8_t* planes[P];
    for (int p = 0; p < P; p++) planes[p] = row[p];
    for (int i = 0; i < blocks * R; i++) {
      if (i * SPAN % STEP == 0)
        for (int p = 0; p < P; p++) __builtin_prefetch(planes[p] + i * SPAN * 4 * LANES + AHEAD, 0, 2);
      const Ints sum = one(planes, i, flip, x);
      R == LANES ? store_sum_of_halves(sums + i * LANES / 2, sum) : store_ints(sums + i * LANES, sum);
    }
    for (int i = 0; i < blocks; i++)
      store_ints(out + i * LANES, permute(folded<STORED>(sums + i * STORED * LANES), order.from));
  }
};

typedef void (*WriteSums)(const uint8_t* const*, int blocks, uint32_t flip, const int8_t* x, int32_t* out);

template <int W, int P>
WriteSums find_sums(int group, int bytes) {
  if (group == 32) return bytes == 1 ? RowSums<W, P, 32, 1>::write : RowSums<W, P, 32, 2>::write;
  if (group == 64) return bytes == 1 ? RowSums<W, P, 64, 1>::write : RowSums<W, P, 64, 2>::write;
  return bytes == 1 ? RowSums<W, P, 128, 1>::write : RowSums<W, P, 128, 2>::write;
}

// LANES values; zeros after `left`, at the end of the array.
template <class T>
GEARBX_INLINE Floats load_some(const T* p, int64_t left) {
  if (left >= LANES) return load_values(p);
  T some[LANES] = {};
  if (left > 0) std::memcpy(some, p, static_cast<size_t>(left) * sizeof(T));
  return load_values(some);
}

// Turns a row's sums over groups into floats: their shares of the result.
template <class T>
void scale_sums(const gearbx_stack& m, int64_t row, int64_t first, int count, const Rounded& x, void* sums) {
  const int64_t groups = m.columns / m.group, from = row * groups + first, end = m.rows * groups;
  const T* scales = static_cast<const T*>(m.scales);
  float factor = 1.0f;
  for (int p = 1; p < m.planes; p++) factor /= static_cast<float>(1 << m.widths[p]);
  for (int g = 0; g < count; g += LANES) {
    float* at = static_cast<float*>(sums) + g;
    const Ints whole = add_ints(load_ints(at), load_ints(x.starts + g));
    const Floats sum = multiply_floats(to_floats(whole), load_floats(x.steps + g));
    const auto values = [&](const void* p) { return load_some(static_cast<const T*>(p) + from + g, end - from - g); };
    if (m.kind == GEARBX_AFFINE) {
      float share = 1.0f;
      Floats offset = values(m.biases[0]);
      for (int p = 1; p < m.planes; p++) {
        share /= static_cast<float>(1 << m.widths[p]);
        if (m.biases[p]) offset = multiply_add_floats(values(m.biases[p]), all_floats(share), offset);
      }
      if (m.middle != 0.0f) offset = multiply_add_floats(values(scales), all_floats(m.middle), offset);
      const Floats scale = multiply_floats(values(scales), all_floats(factor));
      store_floats(at, multiply_add_floats(sum, scale, multiply_floats(offset, load_floats(x.sums + g))));
    } else {
      const bool by_row = m.kind == GEARBX_SYMMETRIC_ROWS;
      store_floats(at, multiply_floats(sum, by_row ? all_floats(to_float(scales[row])) : values(scales)));
    }
  }
}

// The rows of one tile, at most LANES, with as many columns at a time as there is memory for here.
class OneVector {
 public:
  OneVector(const gearbx_stack& m, const Unpacking& how, const Rounded& x) : m_(m), how_(how), x_(x) {
    const int width = m.widths[0], bytes = m.x_bits / 8;
    if (!how.in_place || width == 8)
      write_ = find_sums<8, 1>(m.group, bytes);
    else if (width == 4)
      write_ = m.planes == 1 ? find_sums<4, 1>(m.group, bytes) : find_sums<4, 2>(m.group, bytes);
    else
      write_ = m.planes == 1 ? find_sums<2, 1>(m.group, bytes) : find_sums<2, 2>(m.group, bytes);
    scale_ = m.scale_type == GEARBX_BFLOAT16  ? scale_sums<Bf16>
             : m.scale_type == GEARBX_FLOAT16 ? scale_sums<Fp16> : scale_sums<float>;
  }

  void multiply(int64_t row, int height, float* y) {
    const int64_t groups = m_.columns / m_.group, most = MAX_COLUMNS_AT_ONCE / m_.group;
    Floats total = all_floats(0.0f);
    for (int64_t first = 0; first < groups; first += most) {
      const int count = static_cast<int>(groups - first < most ? groups - first : most);
      const int8_t* bytes = x_.x + first * m_.group * (m_.x_bits / 8);
      const Rounded x = {bytes, x_.starts + first, x_.steps + first, x_.sums + first};
      for (int r = 0; r < height; r++) {
        prefetch_scales(row + r, first, count);
        sum_row(row + r, first, count, x.x, sums_[r]);
        scale_(m_, row + r, first, count, x, sums_[r]);
      }
      for (int g = 0; g < count; g += DWORDS) {
        Ints some[DWORDS];
        transpose<DWORDS>(reinterpret_cast<const uint8_t*>(sums_[0] + g), sizeof sums_[0], some);
        for (int i = 0; i < DWORDS && g + i < count; i++) total = add_floats(total, as_floats(some[i]));
      }
    }
    float results[LANES];
    store_floats(results, total);
    std::memcpy(y, results, static_cast<size_t>(height) * 4);
  }

 private:
  // Prefetches the scales and biases of later rows.
  void prefetch_scales(int64_t row, int64_t first, int count) const {
    if (m_.kind == GEARBX_SYMMETRIC_ROWS) return;
    const int64_t size = m_.scale_type == GEARBX_FLOAT32 ? 4 : 2, at = (row * (m_.columns / m_.group) + first) * size;
    const auto fetch = [&](const void* values) {
      const uint8_t* ahead = static_cast<const uint8_t*>(values) + at + 512;
      for (int64_t i = 0; i < count * size; i += 256) __builtin_prefetch(ahead + i);
    };
    fetch(m_.scales);
    for (int p = 0; p < m_.planes; p++)
      if (m_.biases[p]) fetch(m_.biases[p]);
  }

  // A row is read beyond its end, where activations are zeros, but not beyond the end of the matrix.
  void sum_row(int64_t row, int64_t first, int count, const int8_t* x, int32_t* out) {
    const int blocks = (count + LANES - 1) / LANES;
    const uint8_t* planes[GEARBX_MAX_PLANES];
    int whole = blocks;
    for (int p = 0; p < m_.planes; p++) {
      const int width = m_.widths[p];
      const int64_t bytes = bytes_of_row(m_, p), at = first * m_.group / 8 * width;
      planes[p] = static_cast<const uint8_t*>(m_.weights[p]) + row * bytes + at;
      const int64_t left = (m_.rows - row) * bytes - at, block = LANES * m_.group / 8 * width;
      if (!how_.in_place)
        unpack_blocks(width, planes[p], bytes - at, count * (m_.group / BLOCK), p > 0, codes_);
      else if (left / block < whole)
        whole = static_cast<int>(left / block);
    }
    const uint32_t flip = how_.flip ? 0x80808080u : 0;
    if (!how_.in_place) {
      const uint8_t* codes = codes_;
      return write_(&codes, blocks, flip, x, out);
    }
    write_(planes, whole, flip, x, out);
    for (int i = whole; i < blocks; i++) {
      uint8_t copy[GEARBX_MAX_PLANES / 2][LANES * 128];
      const uint8_t* copies[GEARBX_MAX_PLANES];
      for (int p = 0; p < m_.planes; p++) {
        const int width = m_.widths[p];
        const int64_t block = LANES * m_.group / 8 * width, size = planes_end(p) - (planes[p] + i * block);
        std::memset(copy[p], 0, sizeof copy[p]);
        if (size > 0) std::memcpy(copy[p], planes[p] + i * block, static_cast<size_t>(size < block ? size : block));
        copies[p] = copy[p];
      }
      write_(copies, 1, flip, x + i * LANES * m_.group * (m_.x_bits / 8), out + i * LANES);
    }
  }

  const uint8_t* planes_end(int p) const {
    return static_cast<const uint8_t*>(m_.weights[p]) + m_.rows * bytes_of_row(m_, p);
  }

  const gearbx_stack& m_;
  const Unpacking& how_;
  const Rounded& x_;
  WriteSums write_;
  void (*scale_)(const gearbx_stack&, int64_t, int64_t, int, const Rounded&, void*);
  alignas(64) int32_t sums_[LANES][MAX_GROUPS_AT_ONCE + LANES];
  alignas(64) uint8_t codes_[MAX_COLUMNS_AT_ONCE + LANES * 128];
};

#else

constexpr bool ROW_BY_ROW = false;

#endif

namespace {

struct Matrix {
  const gearbx_stack* stack;
  float* y;
  Unpacking how;
  Pieces pieces;
};

struct Job {
  const Matrix* matrices;
  int count;
  Rounded x;
  int64_t vectors;
  const Rounding& rounding;
};

// The codes of the next LANES rows, as many as a panel has. They are prefetched, in one stream per plane, while the
// panel is multiplied, because writing a panel takes too little time to wait for the next one.
class Ahead {
 public:
  Ahead() = default;

  Ahead(const gearbx_stack& m, int64_t row, int64_t column) : planes_(m.planes) {
    for (int p = 0; p < planes_; p++) {
      const int64_t bytes = bytes_of_row(m, p);
      size_[p] = RUN * LANES / 2 * m.widths[p];
      next_[p] = static_cast<const char*>(m.weights[p]) + row * bytes + LANES * (bytes + column / 8 * m.widths[p]);
    }
  }

  // The share of a run.
  GEARBX_INLINE void fetch() {
    for (int p = 0; p < planes_; p++, next_[p - 1] += size_[p - 1])
      for (int at = 0; at < size_[p]; at += 64) __builtin_prefetch(next_[p] + at, 0, 2);
  }

 private:
  int planes_ = 0, size_[GEARBX_MAX_PLANES];
  const char* next_[GEARBX_MAX_PLANES];
};

// Codes of a panel written for this matmul (panel.h).
struct Written {
  static constexpr int AT_ONCE = 1;
  const uint8_t* codes;
  Ahead ahead;

  GEARBX_INLINE void fetch() { ahead.fetch(); }
  GEARBX_INLINE void next(Ints* out) {
    *out = load_ints(codes);
    codes += 4 * LANES;
  }
  GEARBX_INLINE const uint8_t* next_group(int group, uint8_t*) {
    for (int run = 0; run < group; run += 4 * RUN) fetch();
    codes += group * LANES;
    return codes - group * LANES;
  }
};

// Codes of rows in panels: a plane of FIRST bits, and a second of SECOND bits below it, or none.
template <int FIRST, int SECOND, bool FLIP>
struct Stored {
  static constexpr int LEAST = SECOND ? SECOND : FIRST, AT_ONCE = 8 / LEAST;  // registers per dword of the plane
  static constexpr int64_t DISTANCE = 2048;  // of the prefetch, in bytes
  const uint8_t *first, *second;

  GEARBX_INLINE void fetch() {
    for (int at = 0; at < RUN / 2 * FIRST * LANES; at += 64) __builtin_prefetch(first + DISTANCE + at, 0, 2);
    for (int at = 0; at < RUN / 2 * SECOND * LANES; at += 64) __builtin_prefetch(second + DISTANCE + at, 0, 2);
  }
  GEARBX_INLINE void next(Ints* out) {
    put<0>(out);
    first += 4 * LANES * (FIRST / LEAST);
    second += 4 * LANES * (SECOND / LEAST);
  }
  // The next codes of a group, a byte each; uses `room` unless they are stored as bytes.
  GEARBX_INLINE const uint8_t* next_group(int group, uint8_t* room) {
    if constexpr (FIRST == 8 && !FLIP) {
      for (int run = 0; run < group; run += 4 * RUN, first += 4 * RUN * LANES) fetch();
      return first - group * LANES;
    }
    for (int at = 0; at < group * LANES; at += 4 * LANES * AT_ONCE) {
      if (at % (4 * LANES * RUN) == 0) fetch();
      Ints some[AT_ONCE];
      next(some);
      for (int i = 0; i < AT_ONCE; i++) store_ints(room + at + 4 * LANES * i, some[i]);
    }
    return room;
  }

 private:
  template <int R>
  GEARBX_INLINE void put(Ints* out) const {
    constexpr int IN_DWORD = 8 / FIRST;  // registers
    Ints codes = codes_at<FIRST, R % IN_DWORD * FIRST, SECOND>(load_ints(first + R / IN_DWORD * 4 * LANES));
    if constexpr (SECOND > 0) codes = or_ints(codes, every_other<SECOND, R / 2, R % 2>(load_ints(second)));
    out[R] = FLIP ? flip_ints(codes, 0x80808080u) : codes;
    if constexpr (R + 1 < AT_ONCE) put<R + 1>(out);
  }
};

// Scales and offsets of some groups of a panel, a float for each row.
struct Factors {
  const float *scales, *offsets;
  bool affine;
};

// A vector's total, plus the share of one group with this sum.
GEARBX_INLINE Floats add_group(Floats total, Ints sum, float step, float x_sum, Floats scale, Floats offset, bool affine) {
  const Floats floats = multiply_floats(to_floats(sum), all_floats(step));
  return add_floats(total, affine ? multiply_add_floats(floats, scale, multiply_floats(offset, all_floats(x_sum)))
                                  : multiply_floats(floats, scale));
}

// Adds the products of N vectors and `groups` groups to the totals. Activations have X bytes.
template <int N, int X, bool NARROW, class Codes>
void multiply(Codes codes, const Factors& by, int groups, int group, Rounded x, float* totals) {
  constexpr bool WORDS = AS_WORDS && X == 2;
  constexpr int PARTS = WORDS ? 1 : X;  // sums per vector: of its bytes, or of its words
  Floats total[N];
  for (int v = 0; v < N; v++) total[v] = load_floats(totals + v * LANES);
  for (int g = 0; g < groups; g++, x.starts += N, x.steps += N, x.sums += N) {
    Ints sums[N][PARTS];
    for (int v = 0; v < N; v++) {
      for (int b = 0; b < PARTS; b++) sums[v][b] = zero_ints();
      sums[v][PARTS - 1] = all_ints(x.starts[v]);
    }
    for (int run = 0; run < group; run += 4 * RUN) {
      codes.fetch();
      std::conditional_t<WORDS, WordSums, Sums<NARROW>> some[N * PARTS];
      for (int v = 0; v < N; v++)
        for (int b = 0; b < PARTS; b++) some[v * PARTS + b].begin(sums[v][b]);
      for (int step = 0; step < RUN; step += Codes::AT_ONCE) {
        Ints next[Codes::AT_ONCE];
        codes.next(next);
        for (int i = 0; i < Codes::AT_ONCE; i++, x.x += N * X * 4) add_all<N * PARTS>(next[i], x.x, some);
      }
      for (int v = 0; v < N; v++)
        for (int b = 0; b < PARTS; b++) sums[v][b] = some[v * PARTS + b].end(sums[v][b]);
    }
    const Floats scale = load_floats(by.scales + g * LANES), offset = load_floats(by.offsets + g * LANES);
    for (int v = 0; v < N; v++) {
      if constexpr (PARTS == 2) sums[v][1] = add_ints(sums[v][1], multiply_ints(sums[v][0], BASE));
      total[v] = add_group(total[v], sums[v][PARTS - 1], x.steps[v], x.sums[v], scale, offset, by.affine);
    }
  }
  for (int v = 0; v < N; v++) store_floats(totals + v * LANES, total[v]);
}

#ifdef GEARBX_TILES

// `n` vectors by matrix tiles: A has a row of bytes for each vector, B a column of codes for each row of the panel, in
// the panel's layout. Sums are integers, so that the results are bit-identical to those without tiles.
template <int X, class Code, class Codes>
void multiply_by_tiles(Codes codes, const Factors& by, int groups, int group, int n, Rounded x, float* totals) {
  constexpr int ROW = 4 * LANES;  // bytes of B and C
  const int span = group < TILE_BYTES ? group : TILE_BYTES;
  TileShapes shapes;
  for (int b = 0; b < X; b++) {
    shapes.set(b, n, ROW);
    shapes.set(2 + b, n, span);
  }
  shapes.set(4, span / 4, ROW);
  shape_tiles(shapes);
  alignas(64) uint8_t room[128 * LANES];
  alignas(64) int32_t sums[X][TILE_HEIGHT * LANES];
  for (int g = 0; g < groups; g++, x.starts += n, x.steps += n, x.sums += n, x.x += n * X * group) {
    const uint8_t* of_group = codes.next_group(group, room);
    zero_tile<0>();
    if constexpr (X == 2) zero_tile<1>();
    for (int at = 0; at < group; at += span) {
      load_tile<4>(of_group + at * LANES, ROW);
      load_tile<2>(x.x + at, group);
      add_byte_products<0, 2, 4, Code>();
      if constexpr (X == 2) {
        load_tile<3>(x.x + n * group + at, group);
        add_byte_products<1, 3, 4, Code>();
      }
    }
    store_tile<0>(sums[0], ROW);
    if constexpr (X == 2) store_tile<1>(sums[1], ROW);
    const Floats scale = load_floats(by.scales + g * LANES), offset = load_floats(by.offsets + g * LANES);
    for (int v = 0; v < n; v++) {
      Ints sum = add_ints(load_ints(sums[X - 1] + v * LANES), all_ints(x.starts[v]));
      if constexpr (X == 2) sum = add_ints(sum, multiply_ints(load_ints(sums[0] + v * LANES), BASE));
      float* total = totals + v * LANES;
      store_floats(total, add_group(load_floats(total), sum, x.steps[v], x.sums[v], scale, offset, by.affine));
    }
  }
}

#endif

template <class Codes>
using Multiply = void (*)(Codes, const Factors&, int groups, int group, Rounded, float* totals);

template <class Codes, int X, bool NARROW, size_t... N>
Multiply<Codes> find_multiply(int vectors, std::index_sequence<N...>) {
  static constexpr Multiply<Codes> forms[] = {multiply<N + 1, X, NARROW, Codes>...};
  return forms[vectors - 1];
}

template <class Codes, int X, bool NARROW>
Multiply<Codes> find_multiply(int vectors) {
  return find_multiply<Codes, X, NARROW && !(AS_WORDS && X == 2)>(vectors, std::make_index_sequence<TILE>());
}

// The products of a tile of `n` vectors by codes of BITS.
template <int X, int BITS, class Codes>
void multiply_tile(const Job& job, Codes codes, const Factors& by, int groups, int group, int n, const Rounded& x,
                   float* totals) {
#ifdef GEARBX_TILES
  typedef std::conditional_t<are_signed(BITS, X), int8_t, uint8_t> Code;
  if (job.rounding.by_tiles) return multiply_by_tiles<X, Code>(codes, by, groups, group, n, x, totals);
#endif
  find_multiply<Codes, X, BITS <= 4>(n)(codes, by, groups, group, x, totals);
}

// `count` groups of all vectors, from group `first` on, by `multiply` for a tile of them.
template <class Multiply>
void multiply_tiles(const Job& job, const gearbx_stack& m, int64_t first, const Multiply& multiply) {
  const int64_t groups = m.columns / m.group, most = job.rounding.vectors();
  for (int64_t v = 0; v < job.vectors; v += most) {
    const int n = static_cast<int>(job.vectors - v < most ? job.vectors - v : most);
    const int64_t at = v * groups + first * n;  // of the tile's first vector and group
    multiply(v, n, Rounded{job.x.x + at * m.group * (m.x_bits / 8), job.x.starts + at, job.x.steps + at, job.x.sums + at});
  }
}

// All vectors times `height` rows, as many as LANES or fewer, by the groups of a panel.
template <class Some>
void multiply_rows(const Job& job, const Matrix& matrix, int64_t row, int height, float* totals, const Some& some) {
  const gearbx_stack& m = *matrix.stack;
  const int64_t groups = m.columns / m.group;
  const int most = groups_of_panel(m);
  std::memset(totals, 0, static_cast<size_t>(job.vectors * LANES) * 4);
  for (int64_t first = 0; first < groups; first += most)
    some(first, static_cast<int>(groups - first < most ? groups - first : most));
  for (int64_t v = 0; v < job.vectors; v++)
    std::memcpy(matrix.y + v * m.rows + row, totals + v * LANES, static_cast<size_t>(height) * 4);
}

// Rows by rows, times activations of X bytes: some groups become a panel first.
template <int X, int BITS>
void multiply_written(const Job& job, const Matrix& matrix, int64_t row, int height, float* totals) {
  const gearbx_stack& m = *matrix.stack;
  Panel panel;
  const Factors by = {panel.scales, panel.offsets, m.kind == GEARBX_AFFINE};
  multiply_rows(job, matrix, row, height, totals, [&](int64_t first, int count) {
    write_panel(m, matrix.how, row, height, first, count, panel);
    multiply_tiles(job, m, first, [&](int64_t v, int n, const Rounded& x) {
      const Written codes = {panel.codes, v ? Ahead() : Ahead(m, row, first * m.group)};
      multiply_tile<X, BITS>(job, codes, by, count, m.group, n, x, totals + v * LANES);
    });
  });
}

// Rows in panels, times activations of X bytes.
template <int X, int FIRST, int SECOND = 0>
void multiply_stored(const Job& job, const Matrix& matrix, int64_t row, float* totals) {
  const gearbx_stack& m = *matrix.stack;
  alignas(64) float scales[MAX_GROUPS * LANES], offsets[MAX_GROUPS * LANES];
  const Factors by = {scales, offsets, true};
  typedef Stored<FIRST, SECOND, are_signed(FIRST + SECOND, X)> Codes;
  multiply_rows(job, matrix, row, LANES, totals, [&](int64_t first, int count) {
    stored_scales(m, row * (m.columns / m.group) + first * LANES, count * LANES, scales, offsets);
    multiply_tiles(job, m, first, [&](int64_t v, int n, const Rounded& x) {
      const auto plane = [&](int p) {
        return static_cast<const uint8_t*>(m.weights[p]) + (row * m.columns + first * m.group * LANES) / 8 * m.widths[p];
      };
      const Codes codes = {plane(0), plane(SECOND ? 1 : 0)};
      multiply_tile<X, FIRST + SECOND>(job, codes, by, count, m.group, n, x, totals + v * LANES);
    });
  });
}

template <int X>
void multiply_panel(const Job& job, const Matrix& matrix, int64_t row, int height, float* totals) {
  const gearbx_stack& m = *matrix.stack;
  if (!m.panel_rows) {
    const bool narrow = SIGNED_BYTES && matrix.how.bits <= 4;
    return (narrow ? multiply_written<X, SIGNED_BYTES ? 4 : 8> : multiply_written<X, 8>)(job, matrix, row, height, totals);
  }
  if (m.widths[0] == 8) return multiply_stored<X, 8>(job, matrix, row, totals);
  if (m.planes == 1) return multiply_stored<X, 4>(job, matrix, row, totals);
  (m.widths[1] == 4 ? multiply_stored<X, 4, 4> : m.widths[1] == 2 ? multiply_stored<X, 4, 2> : multiply_stored<X, 4, 1>)(
      job, matrix, row, totals);
}

void do_piece(const void* context, int piece) {
  static thread_local Buffer<float> totals;
  const Job& job = *static_cast<const Job*>(context);
  const Matrix* matrix = job.matrices;
  for (; piece >= matrix->pieces.count; matrix++) piece -= matrix->pieces.count;
  const int64_t end = matrix->pieces.first(piece + 1);
#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)
  if (job.rounding.row_by_row) {
    OneVector work(*matrix->stack, matrix->how, job.x);
    for (int64_t row = matrix->pieces.first(piece); row < end; row += LANES)
      work.multiply(row, static_cast<int>(end - row < LANES ? end - row : LANES), matrix->y + row);
    return;
  }
#endif
  const auto multiply = matrix->stack->x_bits == 8 ? multiply_panel<1> : multiply_panel<2>;
  float* room = totals.room_for(job.vectors * LANES);
  for (int64_t row = matrix->pieces.first(piece); row < end; row += LANES)
    multiply(job, *matrix, row, static_cast<int>(end - row < LANES ? end - row : LANES), room);
#ifdef GEARBX_TILES
  release_tiles();
#endif
}

// Whether rows are read one by one: for one vector, unless they are in panels, or so short that most sums over LANES
// groups would be empty.
bool reads_row_by_row(const gearbx_stack& m, int64_t vectors) {
  return ROW_BY_ROW && !m.panel_rows && vectors == 1 && 2 * m.columns > int64_t{LANES} * m.group;
}

Rounding rounding_of(const gearbx_stack& m, int64_t vectors) {
  const bool row_by_row = reads_row_by_row(m, vectors);
  const Unpacking how(m, row_by_row);
  const int bytes = m.x_bits / 8;
  // For fewer vectors, the processor's byte products are as fast as memory is read.
  const bool by_tiles = vectors * bytes >= 4 && tiles_allowed();
  return {inputs_of(m), m.columns, m.group, bytes, how.in_byte, how.middle, row_by_row, by_tiles};
}

void multiply_some(const gearbx_stack* const* stacks, int count, const float* x, int64_t vectors, float* const* y) {
  static thread_local std::vector<Matrix> matrices;
  for (int done = 0; done < count;) {
    const Rounding rounding = rounding_of(*stacks[done], vectors);
    matrices.clear();
    int pieces = 0;
    for (; done < count && rounding_of(*stacks[done], vectors) == rounding; done++) {
      const gearbx_stack& m = *stacks[done];
      matrices.push_back({&m, y[done], Unpacking(m, rounding.row_by_row), Pieces(m.rows, row_bytes(m), vectors, LANES)});
      pieces += matrices.back().pieces.count;
    }
    const Job job = {matrices.data(), static_cast<int>(matrices.size()), round_all(rounding, x, vectors), vectors,
                     rounding};
    share_out(pieces, do_piece, &job);
  }
}

}  // namespace

void integer_products(const gearbx_stack* const* stacks, int count, const float* x, int64_t vectors, float* const* y) {
  static thread_local std::vector<float*> results;
  const auto some = [&](int64_t first, int n) {
    results.clear();
    for (int i = 0; i < count; i++) results.push_back(y[i] + first * stacks[i]->rows);
    multiply_some(stacks, count, x + first * inputs_of(*stacks[0]), n, results.data());
  };
  in_chunks(vectors, some, MAX_AT_ONCE);
}

}  // namespace gearbx

extern "C" int gearbx_panel_rows(void) { return gearbx::LANES; }

extern "C" void gearbx_rows_of_dwords(const uint32_t* panel, int64_t dwords, uint32_t* rows) {
  using namespace gearbx;
  int64_t i = 0;
  for (; i + LANES <= dwords; i += LANES)
    for (int row = 0; row < LANES; row += DWORDS) {
      Ints some[DWORDS];  // of each row, LANES dwords
      transpose<DWORDS>(reinterpret_cast<const uint8_t*>(panel + i * LANES + row), 4 * LANES, some);
      for (int r = 0; r < DWORDS; r++) store_ints(rows + (row + r) * dwords + i, some[r]);
    }
  for (; i < dwords; i++)
    for (int r = 0; r < LANES; r++) rows[r * dwords + i] = panel[i * LANES + r];
}

extern "C" void gearbx_rows_of_words(const uint16_t* panel, int64_t words, uint16_t* rows) {
  using namespace gearbx;
  int64_t i = 0;
#ifdef GEARBX_AVX512_VNNI
  for (; i < words; i += 16) {
    alignas(64) uint32_t wide[16 * 16];
    Ints some[16];
    const int left = static_cast<int>(words - i < 16 ? words - i : 16);
    for (int k = 0; k < left; k++)
      store_ints(wide + 16 * k, _mm512_cvtepu16_epi32(_mm256_loadu_si256(
                                    reinterpret_cast<const __m256i*>(panel + (i + k) * 16))));
    transpose<16>(reinterpret_cast<const uint8_t*>(wide), 64, some);
    for (int r = 0; r < 16; r++)
      _mm512_mask_cvtepi32_storeu_epi16(rows + r * words + i, static_cast<__mmask16>((1u << left) - 1), some[r]);
  }
#elif defined(GEARBX_AVX2)
  for (; i + 8 <= words; i += 8) {
    __m128i a[8], b[8];
    for (int k = 0; k < 8; k++) a[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + (i + k) * 8));
    // Interleaving pairs of registers three times transposes eight by eight words.
    for (int k = 0; k < 4; k++) {
      b[k] = _mm_unpacklo_epi16(a[k], a[k + 4]);
      b[k + 4] = _mm_unpackhi_epi16(a[k], a[k + 4]);
    }
    for (int k = 0; k < 2; k++)
      for (int half = 0; half < 8; half += 4) {
        a[half + k] = _mm_unpacklo_epi16(b[half + k], b[half + k + 2]);
        a[half + k + 2] = _mm_unpackhi_epi16(b[half + k], b[half + k + 2]);
      }
    for (int k = 0; k < 8; k += 2) {
      b[k] = _mm_unpacklo_epi16(a[k], a[k + 1]);
      b[k + 1] = _mm_unpackhi_epi16(a[k], a[k + 1]);
    }
    for (int r = 0; r < 8; r++) _mm_storeu_si128(reinterpret_cast<__m128i*>(rows + r * words + i), b[r]);
  }
#endif
  for (; i < words; i++)
    for (int r = 0; r < LANES; r++) rows[r * words + i] = panel[i * LANES + r];
}
