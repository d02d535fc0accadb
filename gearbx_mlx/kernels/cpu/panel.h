// A panel: some groups of LANES rows of a stack, in the form in which they are multiplied with any number of vectors.
// Codes are bytes, those of all planes in one; a lane of a register has four codes of its row. Scales and offsets are
// floats.
//
// Codes of 2, 4 and 8 bits are masked where they are: register k of a dword has the codes at bit k * W of its bytes,
// which are every (8 / W)-th, and the activations are put in that order (rounded.h). Codes of other widths, and of
// planes of different widths, are unpacked row by row first (codes.h) and keep their order.

#pragma once

#include <type_traits>

#include "codes.h"
#include "matvec.h"
#include "products_of_bytes.h"

namespace gearbx {

constexpr int MOST_GROUPS = 16, MOST_COLUMNS = 1024;  // of a panel
constexpr int SPARE = 64;                             // columns: the last 16 bytes of a row may end behind the panel

// The groups of a panel: whole registers of scales, and few enough columns for the processor's first cache.
inline int groups_of_panel(const gearbx_stack& m) { return m.group == 32 ? 16 : 8; }

struct Panel {
  alignas(64) uint8_t codes[(MOST_COLUMNS + SPARE) * LANES];
  alignas(64) float scales[MOST_GROUPS * LANES], offsets[MOST_GROUPS * LANES];
};

// `count` rows in memory, at most LANES. Bytes after the end of a row are zeros.
struct Rows {
  const uint8_t* first;
  int64_t stride, bytes;
  int count;
};

// Copies 16 bytes of each row, where the rows end.
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
  if constexpr (K > 0 && K + W == 8 && TO == 0) return shift_bytes<K>(dwords);  // which leaves nothing to mask
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

// Writes the codes of D dwords of each row, in P planes of W bits, from byte `at`. FLIP: with the other sign.
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

// Eight codes are W bytes: they are put together, and each byte takes its bits from them.
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

// The same of `blocks`, of which the row has `left` bytes.
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

// How a stack's codes become bytes.
struct Unpacking {
  int bits = 0;         // of all planes
  int in_byte = 1;      // codes that are masked where they are; 1: also those that are unpacked first
  bool in_place = true;
  bool flip;            // codes of eight bits are stored signed and products take unsigned ones, or the reverse
  int32_t middle;       // to be added to every code

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
  constexpr int STRIDE = MOST_COLUMNS + SPARE;  // rows a power of two apart would compete for lines of the cache
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

// Of 8 neighbouring codes of W bits, those at even places (K = 0) or at odd ones (K = 1), a byte for each. The lane of a
// row has 32 / W codes: the eighth part FROM.
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

// The scales of the lowest plane and the sums of the biases of all planes, `count` of them from place `at`, where rows are
// stored side by side. The operations are those of write_scales.
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

}  // namespace gearbx
