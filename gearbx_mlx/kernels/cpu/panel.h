// A panel: some groups of LANES rows of a stack, in the form in which they are multiplied with any number of vectors.
// Codes are bytes, over all planes; a lane of a register has four codes of its row. Scales and offsets are floats.
//
// Codes of 2, 4 and 8 bits are masked in place: register k of a dword has the codes at bit k * W of its bytes, every (8
// / W)-th code, and activations have the same order (below). Codes of other widths, and of planes of different widths,
// are first unpacked row by row (codes.h) and keep their order.

#pragma once

#include <bit>
#include <cmath>
#include <type_traits>

#include "buffer.h"
#include "codes.h"
#include "matrix_tiles.h"
#include "matvec.h"
#include "pool.h"
#include "products_of_bytes.h"

namespace gearbx {

constexpr int MAX_GROUPS = 16, MAX_COLUMNS = 1024;  // per panel
constexpr int SPARE = 64;                             // columns; the last 16 bytes of a row may end behind the panel

// The groups of a panel: whole registers of scales, and few enough columns for the processor's first-level cache.
inline int groups_of_panel(const gearbx_stack& m) { return m.group == 32 ? 16 : 8; }

struct Panel {
  alignas(64) uint8_t codes[(MAX_COLUMNS + SPARE) * LANES];
  alignas(64) float scales[MAX_GROUPS * LANES], offsets[MAX_GROUPS * LANES];
};

// `count` rows in memory, at most LANES. Bytes after the end of a row are zeros.
struct Rows {
  const uint8_t* first;
  int64_t stride, bytes;
  int count;
};

// Copies 16 bytes of each row at the ends of rows.
__attribute__((noinline)) inline void copy_ends(const Rows& rows, int64_t at, uint8_t* copy) {
  const int64_t left = rows.bytes - at, size = left < 0 ? 0 : left < 16 ? left : 16;
  std::memset(copy, 0, 16 * LANES);
  for (int r = 0; r < rows.count; r++)
    std::memcpy(copy + 16 * r, rows.first + r * rows.stride + at, static_cast<size_t>(size));
}

// Dwords 0 to D - 1 of each row, from byte `at`.
template <int D>
GEARBX_INLINE void read_dwords(const Rows& rows, int64_t at, Ints* out) {
  if (D > 4 || (rows.count == LANES && at + 16 <= rows.bytes)) return transpose<D>(rows.first + at, rows.stride, out);
  alignas(64) uint8_t copy[16 * LANES];
  copy_ends(rows, at, copy);
  transpose<4>(copy, 16, out);
}

// The codes at bit K of each byte of a plane, moved to bit TO.
template <int W, int K, int TO>
GEARBX_INLINE Ints codes_at(Ints dwords) {
#ifdef GEARBX_NEON
  if constexpr (K > 0 && K + W == 8 && TO == 0) return shift_bytes<K>(dwords);  // no bits remain to mask
#endif
  return and_ints(shift_ints<TO - K>(dwords), ((1u << W) - 1) * 0x01010101u << TO);
}

template <int W, int P, int K, int D, int I = 0>
GEARBX_INLINE Ints joined(const Ints (*dwords)[D], int j) {
  const Ints codes = codes_at<W, K * W, (P - 1 - I) * W>(dwords[I][j]);
  if constexpr (I + 1 == P)
    return codes;
  else
    return or_ints(codes, joined<W, P, K, D, I + 1>(dwords, j));
}

// Writes the codes of D dwords of each row, in P planes of W bits, from byte `at`. FLIP: with the opposite sign.
template <int W, int P, bool FLIP, int D>
GEARBX_INLINE uint8_t* write_dwords(const Rows* planes, int64_t at, uint8_t* out) {
  const auto write = [&](Ints codes) __attribute__((always_inline)) {
    store_ints(out, FLIP ? flip_ints(codes, 0x80808080u) : codes);
    out += 4 * LANES;
  };
  Ints dwords[P][D];
  for (int p = 0; p < P; p++) read_dwords<D>(planes[p], at, dwords[p]);
  for (int j = 0; j < D; j++) {
    write(joined<W, P, 0, D>(dwords, j));
    if constexpr (W < 8) write(joined<W, P, 1, D>(dwords, j));
    if constexpr (W < 4) write(joined<W, P, 2, D>(dwords, j)), write(joined<W, P, 3, D>(dwords, j));
  }
  return out;
}

// Writes the codes from byte `at` to byte `end` of each row.
template <int W, int P, bool FLIP>
void write_codes(const Rows* planes, int64_t at, int64_t end, uint8_t* out) {
  if (planes->count == LANES)
    for (; at + 4 * DWORDS <= end && at + 4 * DWORDS <= planes->bytes; at += 4 * DWORDS)
      out = write_dwords<W, P, FLIP, DWORDS>(planes, at, out);
  for (; at < end; at += 16) out = write_dwords<W, P, FLIP, 4>(planes, at, out);
}

// Unpacks a block of a row's plane, or appends it to the codes of planes above it.
template <int W>
GEARBX_INLINE void unpack_block(const uint8_t* from, bool append, uint8_t* out) {
  Bytes32 codes = unpack<W>(from), above;
  if (append) {
    std::memcpy(&above, out, BLOCK);
    codes = append_plane(above, codes, W);
  }
  std::memcpy(out, &codes, BLOCK);
}

#if defined(GEARBX_AVX512_VNNI) && defined(__AVX512VBMI__)

// Eight codes are W bytes: they are joined, and each byte takes its bits from them.
template <int W>
struct Eights {
  alignas(64) uint8_t from[64], shifts[64];
  constexpr Eights() : from(), shifts() {
    for (int i = 0; i < 64; i++) {
      from[i] = static_cast<uint8_t>(i / 8 * W + (i % 8 < W ? i % 8 : 0));
      shifts[i] = static_cast<uint8_t>(i % 8 * W);
    }
  }
};

// Two blocks at once.
template <int W>
GEARBX_INLINE void unpack_two(const uint8_t* from, bool append, uint8_t* out) {
  static constexpr Eights<W> eights;
  const Ints packed = _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - 8 * W), from);
  const Ints together = _mm512_permutexvar_epi8(load_ints(eights.from), packed);
  Ints codes = _mm512_multishift_epi64_epi8(load_ints(eights.shifts), together);
  codes = and_ints(codes, ((1u << W) - 1) * 0x01010101u);
  store_ints(out, append ? or_ints(shift_ints<W>(load_ints(out)), codes) : codes);
}

#else

template <int W>
GEARBX_INLINE void unpack_two(const uint8_t* from, bool append, uint8_t* out) {
  unpack_block<W>(from, append, out);
  unpack_block<W>(from + 4 * W, append, out + BLOCK);
}

#endif

// Unpacks `blocks` blocks. The row has `left` bytes of them.
template <int W>
void unpack_blocks(const uint8_t* from, int64_t left, int blocks, bool append, uint8_t* out) {
  const int whole = left < blocks * 4 * W ? static_cast<int>(left < 0 ? 0 : left / (4 * W)) : blocks;
  int b = 0;
  for (; b + 2 <= whole; b += 2) {
    if (b % 16 == 0) __builtin_prefetch(from + b * 4 * W + 2048, 0, 2);
    unpack_two<W>(from + b * 4 * W, append, out + b * BLOCK);
  }
  for (; b < blocks; b++) {
    uint8_t rest[4 * W] = {};
    const int64_t size = left - b * 4 * W;
    if (size > 0) std::memcpy(rest, from + b * 4 * W, static_cast<size_t>(size < 4 * W ? size : 4 * W));
    unpack_block<W>(rest, append, out + b * BLOCK);
  }
}

inline void unpack_blocks(int width, const uint8_t* from, int64_t left, int blocks, bool append, uint8_t* out) {
  switch (width) {
    case 1: return unpack_blocks<1>(from, left, blocks, append, out);
    case 2: return unpack_blocks<2>(from, left, blocks, append, out);
    case 3: return unpack_blocks<3>(from, left, blocks, append, out);
    case 4: return unpack_blocks<4>(from, left, blocks, append, out);
    case 5: return unpack_blocks<5>(from, left, blocks, append, out);
    default: return unpack_blocks<6>(from, left, blocks, append, out);
  }
}

// Conversion of a stack's codes to bytes.
struct Unpacking {
  int bits = 0;         // over all planes
  int in_byte = 1;      // codes per byte that are masked in place; 1 also for codes that are unpacked first
  bool in_place = true;
  bool flip;            // 8-bit codes are stored signed and matmuls take unsigned ones, or the reverse
  int32_t middle;       // added to every code

  Unpacking(const gearbx_stack& m, bool row_by_row) {
    const int width = m.widths[0];
    for (int p = 0; p < m.planes; p++) {
      bits += m.widths[p];
      if (m.widths[p] != width) in_place = false;
    }
    if ((width != 2 && width != 4 && width != 8) || (width == 2 && m.planes > 2)) in_place = false;
    if (m.panel_rows) in_place = true;  // in the order of the first plane
    if (in_place) in_byte = 8 / width;
    const bool symmetric = m.kind != GEARBX_AFFINE, take_signed = are_signed(bits, row_by_row ? 1 : m.x_bits / 8);
    flip = take_signed != (symmetric && bits == 8);
    middle = (take_signed ? 128 : 0) - (symmetric ? 1 << (width - 1) : 0);
  }
};

template <bool FLIP>
void write_codes(int width, int planes, const Rows* rows, int64_t from, int64_t end, uint8_t* out) {
  if (width == 8) return write_codes<8, 1, FLIP>(rows, from, end, out);
  if (width == 4) return (planes == 1 ? write_codes<4, 1, FLIP> : write_codes<4, 2, FLIP>)(rows, from, end, out);
  return (planes == 1 ? write_codes<2, 1, FLIP> : write_codes<2, 2, FLIP>)(rows, from, end, out);
}

// Some columns of a panel's rows, from `first` to `end`.
inline void write_codes(const gearbx_stack& m, const Unpacking& how, int64_t row, int count, int64_t first, int64_t end,
                        uint8_t* out) {
  Rows rows[GEARBX_MAX_PLANES];
  for (int p = 0; p < m.planes; p++) {
    const int64_t bytes = bytes_of_row(m, p);
    rows[p] = {static_cast<const uint8_t*>(m.weights[p]) + row * bytes, bytes, bytes, count};
  }
  const auto write = how.flip ? write_codes<true> : write_codes<false>;
  if (how.in_place) {
    const int width = m.widths[0];
    return write(width, m.planes, rows, first * width / 8, end * width / 8, out);
  }
  constexpr int STRIDE = MAX_COLUMNS + SPARE;  // rows a power of two apart would compete for cache lines
  alignas(64) uint8_t bytes[LANES * STRIDE];
  const int blocks = static_cast<int>((end - first) / BLOCK);
  for (int p = 0; p < m.planes; p++)
    for (int r = 0; r < LANES; r++) {
      const int64_t at = first / 8 * m.widths[p];
      const uint8_t* from = rows[p].first + (r < count ? r : 0) * rows[p].stride + at;
      unpack_blocks(m.widths[p], from, rows[p].bytes - at, blocks, p > 0, bytes + r * STRIDE);
    }
  const Rows unpacked = {bytes, STRIDE, STRIDE, LANES};
  write(8, 1, &unpacked, 0, end - first, out);
}

// Of 8 neighboring codes of W bits, the even ones (K = 0) or odd ones (K = 1), a byte each. The lane of a row has 32 /
// W codes; FROM selects the eighth.
template <int W, int FROM, int K>
GEARBX_INLINE Ints every_other(Ints dwords) {
  constexpr int AT = 8 * W * FROM;
  constexpr uint32_t MASK = ((1u << W) - 1) * 0x01010101u;
  if constexpr (W == 4) return codes_at<4, 4 * K, 0>(dwords);
#if defined(GEARBX_AVX512_VNNI) && defined(__AVX512VBMI__)
  constexpr uint64_t SHIFTS = (AT + W * K) * 0x01010101ull + 2 * W * 0x03020100ull;
  const Ints shifts = _mm512_set1_epi64(static_cast<int64_t>(SHIFTS | (SHIFTS + 0x20202020ull) << 32));
  return and_ints(_mm512_multishift_epi64_epi8(shifts, dwords), MASK);
#else
  Ints codes = and_ints(shift_ints<-AT>(dwords), static_cast<uint32_t>((1ull << 8 * W) - 1));  // pairs of them move apart
  codes = and_ints(or_ints(codes, shift_ints<16 - 4 * W>(codes)), ((1u << 4 * W) - 1) * 0x00010001u);
  codes = and_ints(or_ints(codes, shift_ints<8 - 2 * W>(codes)), ((1u << 2 * W) - 1) * 0x01010101u);
  return and_ints(shift_ints<-W * K>(codes), MASK);
#endif
}

// Writes values, a float for each row, of `count` groups and up to a multiple of eight; adds them if `onto`.
template <class T>
void write_values(const Rows& rows, int64_t first, int count, float factor, bool onto, float* out) {
  const auto write = [&](Floats values) __attribute__((always_inline)) {
    const Floats factors = all_floats(factor);
    store_floats(out, onto ? multiply_add_floats(values, factors, load_floats(out)) : multiply_floats(values, factors));
    out += LANES;
  };
  constexpr int AT_ONCE = 16 / sizeof(T);
  for (int g = 0; g < count; g += AT_ONCE) {
    Ints dwords[4];
    const int64_t at = (first + g) * static_cast<int64_t>(sizeof(T));
    const uint8_t* ahead = rows.first + LANES * (rows.stride + at);
    for (int i = 0; i < 16 * LANES; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    read_dwords<4>(rows, at, dwords);
    for (int j = 0; j < 4; j++)
      if constexpr (sizeof(T) == 4) {
        write(as_floats(dwords[j]));
      } else if constexpr (std::is_same_v<T, Bf16>) {
        write(as_floats(shift_ints<16>(dwords[j])));
        write(as_floats(and_ints(dwords[j], 0xffff0000u)));
      } else {
        write(low_halves(dwords[j]));
        write(low_halves(shift_ints<-16>(dwords[j])));
      }
  }
}

template <class T>
void write_scales(const gearbx_stack& m, int64_t row, int height, int64_t first, int count, Panel& out) {
  const int64_t groups = m.columns / m.group, size = static_cast<int64_t>(sizeof(T));
  const auto rows = [&](const void* values) {
    return Rows{static_cast<const uint8_t*>(values) + row * groups * size, groups * size, groups * size, height};
  };
  if (m.kind == GEARBX_SYMMETRIC_ROWS) {
    float scales[LANES] = {};
    for (int r = 0; r < height; r++) scales[r] = to_float(static_cast<const T*>(m.scales)[row + r]);
    for (int g = 0; g < count; g++) store_floats(out.scales + g * LANES, load_floats(scales));
    return;
  }
  float factor = 1.0f;
  for (int p = 0; m.kind == GEARBX_AFFINE && p < m.planes; p++) {
    if (p) factor /= static_cast<float>(1 << m.widths[p]);
    if (m.biases[p]) write_values<T>(rows(m.biases[p]), first, count, factor, p > 0, out.offsets);
  }
  if (m.middle != 0.0f) write_values<T>(rows(m.scales), first, count, m.middle, true, out.offsets);
  write_values<T>(rows(m.scales), first, count, factor, false, out.scales);
}

// The scales of the lowest plane and the sums of the biases of all planes, `count` of them from index `at`, for rows in
// panels. The operations are as in write_scales.
template <class T>
void stored_scales(const gearbx_stack& m, int64_t at, int count, float* scales, float* offsets) {
  float factor = 1.0f;
  for (int p = 0; p < m.planes; p++) {
    if (p) factor /= static_cast<float>(1 << m.widths[p]);
    if (!m.biases[p]) continue;
    const T* biases = static_cast<const T*>(m.biases[p]) + at;
    for (int i = 0; i < count; i += LANES) {
      const Floats bias = load_values(biases + i), all = all_floats(factor);
      store_floats(offsets + i, p ? multiply_add_floats(bias, all, load_floats(offsets + i)) : multiply_floats(bias, all));
    }
  }
  const T* stored = static_cast<const T*>(m.scales) + at;
  const Floats middle = all_floats(m.middle);
  for (int i = 0; m.middle != 0.0f && i < count; i += LANES)
    store_floats(offsets + i, multiply_add_floats(load_values(stored + i), middle, load_floats(offsets + i)));
  for (int i = 0; i < count; i += LANES)
    store_floats(scales + i, multiply_floats(load_values(stored + i), all_floats(factor)));
}

inline void stored_scales(const gearbx_stack& m, int64_t at, int count, float* scales, float* offsets) {
  if (m.scale_type == GEARBX_BFLOAT16) return stored_scales<Bf16>(m, at, count, scales, offsets);
  if (m.scale_type == GEARBX_FLOAT16) return stored_scales<Fp16>(m, at, count, scales, offsets);
  stored_scales<float>(m, at, count, scales, offsets);
}

// Writes `count` groups of `height` rows.
inline void write_panel(const gearbx_stack& m, const Unpacking& how, int64_t row, int height, int64_t first, int count,
                        Panel& out) {
  write_codes(m, how, row, height, first * m.group, (first + count) * m.group, out.codes);
  if (m.scale_type == GEARBX_BFLOAT16) return write_scales<Bf16>(m, row, height, first, count, out);
  if (m.scale_type == GEARBX_FLOAT16) return write_scales<Fp16>(m, row, height, first, count, out);
  write_scales<float>(m, row, height, first, count, out);
}

// Activations of 8 or 16 bits, in the order in which panels are multiplied with them.
//
// Activations have a scale for each vector and group of inputs. The largest activation of a group is 127 steps, or
// 32384 with two bytes, far finer than bfloat16. Two bytes are the nearest multiple of BASE and the remainder; or a
// 16-bit number for matmuls of words (products_of_bytes.h).

constexpr int BASE = 254;

// Columns, up to a whole register of groups.
inline int64_t whole_blocks(int64_t columns, int group) {
  const int64_t block = int64_t{LANES} * group;
  return (columns + block - 1) / block * block;
}

// Common properties of the activations of several matrices, so that these are prepared only once.
struct Rounding {
  int64_t inputs, columns;
  int group, bytes, in_byte;
  int32_t middle;
  bool row_by_row;  // for one vector; otherwise panels
  bool by_tiles;    // panels by matrix tiles
  bool words() const { return AS_WORDS && bytes == 2 && !row_by_row && !by_tiles; }
  int64_t vectors() const { return by_tiles ? 16 : TILE; }  // per tile
  bool operator==(const Rounding&) const = default;
};

// Tiles of at most Rounding::vectors() in sequence. In a tile, four columns have a block: of each vector the bytes of
// four activations, or all first bytes before all second ones, or four words. A group has its vectors. With matrix
// tiles, a group has its vectors: of each all first bytes, then of each all second ones.
struct Rounded {
  const int8_t* x;
  const int32_t* starts;  // the sum of quantized activations, times the number to add to every code
  const float* steps;
  const float* sums;  // of the quantized activations
};

// A group's activations in units of their scale (the largest becomes `most`), and their sum. If one is not finite,
// the scale is NaN, and so are all results of the vector. The loops have no branches, so that compilers vectorize them.
template <int G>
inline float round_group(const float* x, int32_t most, int32_t* out, int32_t* sum) {
  constexpr uint32_t INFINITE = 0x7f800000;
  uint32_t largest = 0;  // magnitudes as bits, in the order of the numbers, with NaN above infinity
  for (int i = 0; i < G; i++) {
    const uint32_t size = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  const float step = std::bit_cast<float>(largest) / static_cast<float>(most);
  const bool finite = largest < INFINITE, some = finite && step >= 0x1p-126f;
  const float inverse = some ? 1.0f / step : 0.0f;
  constexpr float ROUND = 0x1.8p23f;  // the sum with a number is rounded to an integer
  int32_t total = 0;
  for (int i = 0; i < G; i++) {
    out[i] = std::bit_cast<int32_t>((some ? x[i] : 0.0f) * inverse + ROUND) - std::bit_cast<int32_t>(ROUND);
    total += out[i];
  }
  *sum = total;
  return finite ? (some ? step : 0.0f) : NAN;
}

// Quantized activations as bytes: all first ones, and all second ones if there are two. Bytes of words are the lower
// and upper halves.
template <int G, int BYTES>
inline void to_bytes(const int32_t* whole, bool words, int8_t (*out)[G]) {
  if (words) {
    for (int i = 0; i < G; i++) out[0][i] = static_cast<int8_t>(whole[i]);
    for (int i = 0; i < G; i++) out[BYTES - 1][i] = static_cast<int8_t>(whole[i] >> 8);
  } else if constexpr (BYTES == 1) {
    for (int i = 0; i < G; i++) out[0][i] = static_cast<int8_t>(whole[i]);
  } else {
    constexpr float ROUND = 0x1.8p23f;
    for (int i = 0; i < G; i++) {
      const float quotient = static_cast<float>(whole[i]) * (1.0f / BASE) + ROUND;
      const int32_t first = std::bit_cast<int32_t>(quotient) - std::bit_cast<int32_t>(ROUND);
      out[0][i] = static_cast<int8_t>(first);
      out[1][i] = static_cast<int8_t>(whole[i] - BASE * first);
    }
  }
}

// The order of codes that are masked in place, in 16 columns: for each dword its registers, or, row by row, for each
// register its dwords. Words: in each register, even ones first.
inline const int8_t* order_of(const Rounding& r) {
  static constexpr int8_t BYTES[3][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                          {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15},
                                          {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}};
  static constexpr int8_t WORDS[3][16] = {{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15},
                                          {0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15},
                                          {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15}};
  static constexpr int8_t BY_ROW[16] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
  if (r.row_by_row && r.in_byte == 2) return BY_ROW;
  return r.words() ? WORDS[r.in_byte / 2] : BYTES[r.in_byte / 2];
}

inline void put_in_order(const int8_t* from, const int8_t* order, int8_t* out) {
#if defined(GEARBX_AVX2)
  const __m128i indices = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(bytes, indices));
#else
  for (int i = 0; i < 16; i++) out[i] = from[order[i]];
#endif
}

// Writes byte `b` of activations `at` to `at` + 15 of one vector, for matmuls row by row: for each register of weights,
// the bytes for codes at the lowest bit, then at the next. All first bytes of a register precede the second ones.
template <int BYTES>
inline void put_for_rows(const int8_t* ordered, int64_t at, int b, int in_byte, int8_t* out) {
  const int64_t codes = 4 * LANES * in_byte, unit = at / codes, inside = at % codes / in_byte;
  int8_t* to = out + (unit * BYTES + b) * codes + inside;
  const int size = 16 / in_byte;
  for (int k = 0; k < in_byte; k++) std::memcpy(to + k * 4 * LANES, ordered + k * size, static_cast<size_t>(size));
}

// Writes the words of 16 columns, given as lower and upper halves, for each dword of a tile of `n` vectors.
inline void put_words(const int8_t* lower, const int8_t* upper, int n, int8_t* out) {
  alignas(64) int8_t words[32];
#if defined(GEARBX_AVX2)
  const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i*>(lower));
  const __m128i high = _mm_load_si128(reinterpret_cast<const __m128i*>(upper));
  _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm_unpacklo_epi8(low, high));
  _mm_store_si128(reinterpret_cast<__m128i*>(words + 16), _mm_unpackhi_epi8(low, high));
#else
  for (int i = 0; i < 32; i++) words[i] = i % 2 ? upper[i / 2] : lower[i / 2];
#endif
  for (int dword = 0; dword < 4; dword++) std::memcpy(out + dword * n * 8, words + 8 * dword, 8);
}

// A tile of `n` vectors. Its arrays start at the positions of its first vector.
template <int G, int BYTES>
void round_tile(const Rounding& r, const float* x, int n, int8_t* out, int32_t* starts, float* steps, float* sums) {
  constexpr int32_t MOST = BYTES == 1 ? 127 : 127 * BASE + BASE / 2 - 1;
  alignas(64) int32_t whole[G];
  alignas(64) int8_t bytes[BYTES][G], ordered[BYTES][16];
  alignas(64) float rest[G];
  const int8_t* order = order_of(r);
  for (int v = 0; v < n; v++)
    for (int64_t g = 0; g < r.columns / G; g++) {
      const float* from = x + v * r.inputs + g * G;
      const int64_t left = r.inputs - g * G;
      if (left < G) {  // padding columns
        std::memset(rest, 0, sizeof rest);
        if (left > 0) std::memcpy(rest, from, static_cast<size_t>(left) * 4);
        from = rest;
      }
      int32_t sum;
      const float step = round_group<G>(from, MOST, whole, &sum);
      const int64_t at = g * n + v;
      steps[at] = step;
      sums[at] = step * static_cast<float>(sum);
      starts[at] = sum * r.middle;
      to_bytes<G, BYTES>(whole, r.words(), bytes);
      for (int i = 0; i < G; i += 16) {
        for (int b = 0; b < BYTES; b++) put_in_order(bytes[b] + i, order, ordered[b]);
        int8_t* to = out + ((g * G + i) / 4 * n + v) * BYTES * 4;
        if (r.by_tiles) {
          for (int b = 0; b < BYTES; b++) std::memcpy(out + ((g * BYTES + b) * n + v) * G + i, ordered[b], 16);
          continue;
        }
        if (r.words()) {
          put_words(ordered[0], ordered[BYTES - 1], n, to);
          continue;
        }
        for (int b = 0; b < BYTES; b++)
          if (r.row_by_row)
            put_for_rows<BYTES>(ordered[b], g * G + i, b, r.in_byte, out);
          else
            for (int dword = 0; dword < 4; dword++) std::memcpy(to + (dword * n * BYTES + b) * 4, ordered[b] + 4 * dword, 4);
      }
    }
}

struct RoundingJob {
  const Rounding& how;
  const float* x;
  int64_t vectors;
  int8_t* out;
  int32_t* starts;
  float *steps, *sums;

  static void piece(const void* context, int tile) {
    const RoundingJob& j = *static_cast<const RoundingJob*>(context);
    const Rounding& r = j.how;
    const int64_t most = r.vectors(), first = tile * most, left = j.vectors - first;
    const int64_t groups = first * (r.columns / r.group);
    const auto round = [&](auto work) {
      work(r, j.x + first * r.inputs, static_cast<int>(left < most ? left : most), j.out + first * r.columns * r.bytes,
           j.starts + groups, j.steps + groups, j.sums + groups);
    };
    if (r.group == 32) return round(r.bytes == 1 ? round_tile<32, 1> : round_tile<32, 2>);
    if (r.group == 64) return round(r.bytes == 1 ? round_tile<64, 1> : round_tile<64, 2>);
    round(r.bytes == 1 ? round_tile<128, 1> : round_tile<128, 2>);
  }
};

// Quantizes vectors, on all threads if there are many. The result is valid until this thread's next call.
inline Rounded round_all(const Rounding& how, const float* x, int64_t vectors) {
  static thread_local Buffer<int8_t> bytes;
  static thread_local Buffer<int32_t> starts;
  static thread_local Buffer<float> steps, sums;
  const int64_t columns = how.row_by_row ? whole_blocks(how.columns, how.group) : how.columns;
  const int64_t groups = vectors * (columns / how.group);
  const RoundingJob job = {how, x, vectors, bytes.room_for(vectors * columns * how.bytes), starts.room_for(groups),
                           steps.room_for(groups), sums.room_for(groups)};
  if (columns > how.columns) {  // registers that the columns do not fill
    for (int64_t g = how.columns / how.group; g < groups; g++) {
      job.starts[g] = 0;
      job.steps[g] = job.sums[g] = 0.0f;
    }
    const int64_t from = how.columns / (32 * LANES) * (32 * LANES), end = columns;
    std::memset(job.out + from * how.bytes, 0, static_cast<size_t>((end - from) * how.bytes));
  }
  share_out(static_cast<int>((vectors + how.vectors() - 1) / how.vectors()), RoundingJob::piece, &job);
  return {job.out, job.starts, job.steps, job.sums};
}

}  // namespace gearbx
