// The weights of one row, block by block, without its outliers: N registers of eight floats, in an order of their own.
//
// A block has COLUMNS columns, and column(n, l) is the one in lane l of register n. The activations are put in that
// order once per call. After the last column, any weight may follow; it meets activations of zero.

#pragma once

#include <type_traits>

#include "codebook.h"
#include "lookup.h"

namespace gearbx {

constexpr int GROUP = GEARBX_CODEBOOK_GROUP, LIBRARY = GEARBX_CODEBOOK_LIBRARY;

// One codebook per row. A block is W registers of eight words; its codes fill whole registers of bytes.
template <int B>
struct ByRow {
  static constexpr bool GROUPED = false;
  static constexpr int K = B == 5 ? 6 : 32 / B;  // codes in 32 bits
  static constexpr int W = B == 5 ? 2 : B == 6 ? 4 : 1;
  static constexpr int N = W * K, COLUMNS = 8 * N;
  static constexpr int SPAN = N >= 16 ? 2 : 4;  // blocks that are decoded at a time for several vectors

  static constexpr int place(int k) { return B == 5 ? k / 3 * 16 + k % 3 * 5 : k * B; }

  static constexpr int column(int n, int l) {
    if (B <= 3) return l * K + n;
    const int part = n / 4, byte = n % 4 * 8 + l, lane = byte / 4, j = byte % 4;
    if (B == 4) return 8 * lane + 2 * j + part;
    if (B == 5) return part < 2 ? part * 48 + 6 * lane + j / 2 * 3 + j % 2 : j % 2 * 48 + 6 * lane + j / 2 * 3 + 2;
    return part < 4 ? part * 40 + 5 * lane + j : j * 40 + 5 * lane + 4;
  }

  static int64_t blocks(const gearbx_codebook& m) { return (m.row_words + 8 * W - 1) / (8 * W); }

  const gearbx_codebook& m;
  const uint32_t* words;
  const uint16_t* halves;
  float below = 0.0f;  // the weight of the code in the places of outliers, which is the same in all of the row

  ByRow(const gearbx_codebook& matrix, int64_t row)
      : m(matrix), words(m.weights + row * m.row_words), halves(m.codebook + (row << B)), table(halves) {
    const uint32_t first = m.outlier_offsets[row];
    if (first < m.outlier_offsets[row + 1]) below = half_to_float(halves[code(m.outlier_columns[first])]);
  }

  unsigned code(int64_t column) const {
    return words[column / K] >> place(static_cast<int>(column % K)) & ((1u << B) - 1);
  }
  float weight_at(int64_t) const { return below; }
  void enter(int64_t) {}

#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)

  Words load(int64_t vector) const { return load_words(words + 8 * vector, m.row_words - 8 * vector); }

  void decode(int64_t block, F8 out[N]) const {
    const Words a = load(W * block);
    if constexpr (B <= 3) {
      for (int k = 0; k < K; k++) out[k] = table[shifted(a, -B * k)];
    } else if constexpr (B == 4) {
      table.pick(masked(a, 0, 0x0f0f0f0f), out);
      table.pick(masked(a, -4, 0x0f0f0f0f), out + 4);
    } else if constexpr (B == 5) {
      const Words b = load(W * block + 1);
      const auto two = [](Words v) { return masked(v, 0, 0x001f001f) | masked(v, 3, 0x1f001f00); };
      table.pick(two(a), out);
      table.pick(two(b), out + 4);
      table.pick(masked(a, -10, 0x001f001f) | masked(b, -2, 0x1f001f00), out + 8);
    } else {
      Words fifth = masked(a, -24, 0x3f);
      for (int p = 0; p < 4; p++) {
        const Words v = p ? load(W * block + p) : a;
        if (p) fifth = fifth | masked(v, 8 * p - 24, 0x3fu << 8 * p);
        table.pick((masked(v, 0, 0x3f) | masked(v, 2, 0x3f00)) | (masked(v, 4, 0x3f0000) | masked(v, 6, 0x3f000000)),
                   out + 4 * p);
      }
      table.pick(fifth, out + 16);
    }
  }

  std::conditional_t<(B <= 3), FloatTable<B < 3 ? 2 : 3>, HalfTable<B < 4 ? 4 : B>> table;

#else

  void decode(int64_t block, F8 out[N]) const {
    for (int n = 0; n < N; n++)
      for (int l = 0; l < 8; l++) {
        const int64_t at = block * COLUMNS + column(n, l);
        out[n][l] = at < m.columns ? half_to_float(halves[code(at)]) : 0.0f;
      }
  }

  struct None {
    explicit None(const uint16_t*) {}
  } table;

#endif
};

// A library of codebooks. A block is 32 codes; a group is four blocks.
template <int B>
struct ByGroup {
  static constexpr bool GROUPED = true;
  static constexpr int N = 4, COLUMNS = BLOCK;
  static constexpr int SPAN = GROUP / BLOCK;
  static constexpr int column(int n, int l) { return B == 4 ? 8 * n + l : 4 * l + n; }
  static int64_t blocks(const gearbx_codebook& m) { return m.row_words / B; }

  const gearbx_codebook& m;
  const uint8_t* bytes;
  const uint8_t* entries;
  const uint16_t *scales, *midpoints;

  ByGroup(const gearbx_codebook& matrix, int64_t row) : m(matrix), table(m.codebook) {
    const int64_t groups = (m.columns + GROUP - 1) / GROUP;
    bytes = reinterpret_cast<const uint8_t*>(m.weights + row * m.row_words);
    entries = m.entries + row * groups;
    scales = m.scales + row * groups;
    midpoints = m.midpoints + row * groups;
  }

  const uint16_t* entry(int64_t group) const { return m.codebook + ((entries[group] % LIBRARY) << B); }

  unsigned code(int64_t column) const {
    const int64_t bit = column * B;
    unsigned around = bytes[bit / 8];
    if (bit % 8 + B > 8) around |= static_cast<unsigned>(bytes[bit / 8 + 1]) << 8;
    return around >> bit % 8 & ((1u << B) - 1);
  }

  float weight_at(int64_t column) const {
    const int64_t group = column / GROUP;
    const float value = half_to_float(entry(group)[code(column)]);
    return multiply_add(half_to_float(scales[group]), value, half_to_float(midpoints[group]));
  }

#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)

  std::conditional_t<B == 4, HalfTable<4>, FloatTable<B < 4 ? B : 3>> table;

  void enter(int64_t group) { table = decltype(table)(entry(group)); }

  void decode(int64_t block, F8 out[N]) const {
    const Bytes32 codes = unpack<B>(bytes + block * 4 * B);
    if constexpr (B == 4)
      table.pick(codes, out);
    else
      for (int k = 0; k < 4; k++) out[k] = table[shifted(words_of(codes), -8 * k)];
  }

#else

  const uint16_t* table;

  void enter(int64_t group) { table = entry(group); }

  void decode(int64_t block, F8 out[N]) const {
    for (int n = 0; n < N; n++)
      for (int l = 0; l < 8; l++) out[n][l] = half_to_float(table[code(block * COLUMNS + column(n, l))]);
  }

#endif
};

}  // namespace gearbx
