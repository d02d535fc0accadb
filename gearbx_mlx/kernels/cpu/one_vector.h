// One vector times the rows of a stack, row after row, as memory is read fastest. The results have the bits of a
// product of panels (integer.cpp): the sum over a group is an integer, and what follows are the same operations on
// floats.
//
// A register is 4 * LANES bytes of a row, in one or several groups. The registers of LANES groups are folded until each
// lane is the sum over one group.

#pragma once

#include "rounded.h"

namespace gearbx {

#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)

constexpr bool ROW_BY_ROW = true;
constexpr int MOST_OF_A_ROW = 8192, MOST_GROUPS_OF_A_ROW = MOST_OF_A_ROW / 32;  // columns and groups at a time
// How far on memory is asked for, in bytes, and every how many registers: for every line of the cache. For fewer, one
// core reads 8 bits somewhat faster, and several cores read more slowly.
constexpr int AHEAD = 3072, STEP = 64 / (4 * LANES);

// Where lanes come from, so that groups are in order after folding that began with R lanes of each group.
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
  static constexpr int IN_BYTE = 8 / W, CODES = 4 * LANES * IN_BYTE;        // of a register
  static constexpr int SPAN = G > CODES ? G / CODES : 1;                    // registers with one group alone
  static constexpr int R = G > CODES ? LANES : LANES * G / CODES;           // lanes of a group
  static constexpr int STORED = R == LANES ? R / 2 : R;                     // of which as many are written
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

  // The sums of `blocks` times LANES groups. Registers are read in a loop of their own: processors foresee what one
  // instruction reads one line after the other.
  static void write(const uint8_t* const* row, int blocks, uint32_t flip, const int8_t* x, int32_t* out) {
    static constexpr Order<R> order;
    alignas(64) int32_t sums[(MOST_OF_A_ROW / G + LANES) * STORED];
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

// LANES values; after `left`, where the array ends, zeros.
template <class T>
GEARBX_INLINE Floats load_some(const T* p, int64_t left) {
  if (left >= LANES) return load_values(p);
  T some[LANES] = {};
  if (left > 0) std::memcpy(some, p, static_cast<size_t>(left) * sizeof(T));
  return load_values(some);
}

// Makes floats of a row's sums over groups: their share of the result.
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

// The rows of one tile: at most LANES. Some columns at a time, those that room is made for here.
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
    const int64_t groups = m_.columns / m_.group, most = MOST_OF_A_ROW / m_.group;
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
  // Asks for the scales and biases some rows further on.
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
  alignas(64) int32_t sums_[LANES][MOST_GROUPS_OF_A_ROW + LANES];
  alignas(64) uint8_t codes_[MOST_OF_A_ROW + LANES * 128];
};

#else

constexpr bool ROW_BY_ROW = false;

#endif

}  // namespace gearbx
