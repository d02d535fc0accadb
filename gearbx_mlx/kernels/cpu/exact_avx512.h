// Decodes rows with AVX-512, 64 weights at a time: a lookup is one instruction, and `vpexpandb` distributes the bytes
// of the zero cell.

#pragma once

#include "exact_row.h"

namespace gearbx {

typedef __m512i Bytes64;

template <class Place>
inline Bytes64 bytes64(Place place) {
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < 64; i++) bytes[i] = static_cast<uint8_t>(place(i));
  return _mm512_load_si512(bytes);
}

// Keeps a constant in a register or memory. Otherwise GCC makes it again for each use.
GEARBX_INLINE Bytes64 constant(Bytes64 value) {
  asm("" : "+v"(value));
  return value;
}

// Sixteen bf16 as floats, or the remaining ones, and zeros.
GEARBX_INLINE __m512 widen16(const uint16_t* p, int64_t left) {
  const __mmask16 some = left < 16 ? static_cast<__mmask16>((1u << left) - 1) : static_cast<__mmask16>(-1);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16));
}

// A row's next bytes of `high`, one per bit of `places`, distributed to their positions among `bytes`.
GEARBX_INLINE Bytes64 deal_high(HighBytes& high, Bytes64 bytes, __mmask64 places) {
  Bytes64 next;
  if (__builtin_expect(high.at + 64 <= high.count, 1)) {
    next = _mm512_loadu_si512(high.bytes + high.at);
  } else {
    const int64_t left = high.at < high.count ? high.count - high.at : 0;
    next = _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, high.bytes + high.count - left);
  }
  asm("" : "+v"(next));  // from a register: `vpexpandb` from memory is slower
  high.at += __builtin_popcountll(places);
  return _mm512_mask_expand_epi8(bytes, places, next);
}

// The prediction of two groups' codes, as bytes. The first group's low byte of the first neighbor is at 0 to 15, its
// high byte at 16; the second group's are at 32 and 48. `zero`: a bit per code, for each eight weights of a block.
struct Meanings {
  Bytes64 bytes, zero[2];
};

// Sixteen groups at a time: their scales and biases as floats, and the bound of the zero cell.
struct Groups16 {
  alignas(64) float scales[16], biases[16], bounds[16];

  GEARBX_INLINE void read(const uint16_t* s, const uint16_t* b, int64_t left) {
    const __m512 scale = widen16(s, left);
    _mm512_store_ps(scales, scale);
    _mm512_store_ps(biases, widen16(b, left));
    _mm512_store_ps(bounds, _mm512_mul_ps(_mm512_abs_ps(scale), _mm512_set1_ps(0.5f)));
  }
};

template <int GROUP>
struct Decoder {
  const Bytes64 parts = bytes64([](int i) { return i / 32 * 64 + i % 16 * 4 + 2 + i / 16 % 2; });
  const Bytes64 bits = bytes64([](int i) { return i % 8 * 4; });
  // The low and high bytes of 32 columns.
  const Bytes64 pair = bytes64([](int i) { return i % 2 * 64 + i / 2; });
  const Bytes64 none = constant(_mm512_set1_epi8(-1));
  const Bytes64 code = _mm512_set1_epi8(15);
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  ExactRow& row;

  explicit Decoder(ExactRow& r) : row(r) {}

  GEARBX_INLINE Meanings meanings(const Groups16& groups, int64_t first) const {
    Meanings m;
    Bytes64 words[2];
    for (int i = 0; i < 2; i++) {
      const __m512 v = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(groups.scales[first + i]), codes),
                                     _mm512_set1_ps(groups.biases[first + i]));
      m.zero[i] = _mm512_broadcastmw_epi32(
          _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(groups.bounds[first + i]), _CMP_NGT_UQ));
      words[i] = _mm512_sub_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(WINDOW << 16));
    }
    m.bytes = _mm512_permutex2var_epi8(words[0], parts, words[1]);
    if (GROUP == 32) m.zero[0] = _mm512_mask_mov_epi64(m.zero[0], 0xf0, m.zero[1]);
    return m;
  }

  // Uses COUNT weights, 64 or 32, from a column on, with the prediction of group number WHICH, or of both groups.
  template <int COUNT, int WHICH, class Use>
  GEARBX_INLINE void block(const Meanings& m, int64_t column, Use use) {
    constexpr __mmask64 all = COUNT == 64 ? ~uint64_t{0} : 0xffffffff;
    constexpr auto packed = static_cast<__mmask32>((uint64_t{1} << COUNT / 2) - 1);
    const __m256i raw = _mm256_maskz_loadu_epi8(packed, row.codes + column / 2);
    const Bytes64 each = _mm512_multishift_epi64_epi8(bits, _mm512_cvtepu32_epi64(raw));
    const Bytes64 group = GROUP == 32 ? _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(32), 1)
                                      : _mm512_set1_epi8(32 * WHICH);
    const Bytes64 of_low = _mm512_ternarylogic_epi64(each, code, group, 0xea);  // each & code | group
    const Bytes64 of_high = _mm512_ternarylogic_epi64(each, code, _mm512_or_si512(group, _mm512_set1_epi8(16)), 0xea);
    const Bytes64 first_low = _mm512_permutexvar_epi8(of_low, m.bytes);
    const Bytes64 first_high = _mm512_permutexvar_epi8(of_high, m.bytes);
    const Bytes64 low = _mm512_maskz_loadu_epi8(all, row.low + column);
    const __mmask64 wraps = _mm512_cmplt_epu8_mask(low, first_low);
    const Bytes64 high = _mm512_mask_sub_epi8(first_high, wraps, first_high, none);
    const __mmask64 zero = _mm512_bitshuffle_epi64_mask(m.zero[WHICH], of_low) & all;

    const Bytes64 dealt_high = deal_high(row.high, high, zero);
    for (int i = 0; i < COUNT; i += 32) {
      const Bytes64 places = _mm512_add_epi8(pair, _mm512_set1_epi8(static_cast<char>(i)));
      const Bytes64 both = _mm512_permutex2var_epi8(low, places, dealt_high);
      use(column + i, Weights32{both});
    }
  }

  template <int WHICH, class Use>
  GEARBX_INLINE void group(const Meanings& m, int64_t column, Use use) {
    for (int64_t i = column; i < column + GROUP && i < row.columns; i += 64) {
      __builtin_prefetch(row.low + i + AHEAD_OF_ROW);
      if (i % 128 == 0) __builtin_prefetch(row.ahead + i / 2);
      block<64, WHICH>(m, i, use);
    }
  }

  // Calls use(column, weights) for each 32 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each32(Use use) {
    const int64_t columns = row.columns, groups = columns / GROUP;
    Groups16 some;
    for (int64_t segment = 0; segment < groups; segment += 16) {
      some.read(row.scales + segment, row.biases + segment, groups - segment);
      const int64_t end = groups - segment < 16 ? groups - segment : 16;
      for (int64_t g = 0; g < end; g += 2) {
        const Meanings m = meanings(some, g);
        const int64_t column = (segment + g) * GROUP;
        if constexpr (GROUP == 32) {
          if (column + 64 <= columns)
            group<0>(m, column, use);
          else
            block<32, 0>(m, column, use);
        } else {
          group<0>(m, column, use);
          group<1>(m, column + GROUP, use);
        }
      }
    }
  }
};

}  // namespace gearbx
