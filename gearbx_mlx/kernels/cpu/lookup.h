// Lookup tables of fp16 entries in registers: 32 codes at a time as bytes, or 8 at a time as dwords, become floats.

#pragma once

#include "codes.h"

#ifdef GEARBX_NEON

// Lookup tables of fp16 entries (lookup.h) of a 64-bit ARM, whose instructions look up bytes among 16, 32 or 64.
namespace gearbx {

// Eight dwords.
struct Words {
  uint32x4_t half[2];
};

inline Words operator|(Words a, Words b) {
  return {{vorrq_u32(a.half[0], b.half[0]), vorrq_u32(a.half[1], b.half[1])}};
}

inline Words words_of(Bytes32 codes) {
  return {{vreinterpretq_u32_u8(codes.half[0]), vreinterpretq_u32_u8(codes.half[1])}};
}
inline Bytes32 bytes_of(Words words) {
  return {{vreinterpretq_u8_u32(words.half[0]), vreinterpretq_u8_u32(words.half[1])}};
}

// Each dword shifted up, or down if `up` is negative.
inline Words shifted(Words words, int up) {
  const int32x4_t by = vdupq_n_s32(up);
  return {{vshlq_u32(words.half[0], by), vshlq_u32(words.half[1], by)}};
}
inline Words masked(Words words, int up, uint32_t mask) {
  const Words moved = up ? shifted(words, up) : words;
  return {{vandq_u32(moved.half[0], vdupq_n_u32(mask)), vandq_u32(moved.half[1], vdupq_n_u32(mask))}};
}

// Eight words; after the first `count`, zeros without reading memory.
inline Words load_words(const uint32_t* p, int64_t count) {
  if (count >= 8) return {{vld1q_u32(p), vld1q_u32(p + 4)}};
  uint32_t some[8] = {};
  if (count > 0) std::memcpy(some, p, static_cast<size_t>(count) * 4);
  return {{vld1q_u32(some), vld1q_u32(some + 4)}};
}

// Four or eight entries, looked up by the lowest bits of dwords: first byte of each entry, then the second.
template <int B>
struct FloatTable {
  static_assert(B == 2 || B == 3);
  uint8x16_t entries;

  explicit FloatTable(const uint16_t* halves) {
    const uint16x4_t first = vld1_u16(halves);
    entries = vreinterpretq_u8_u16(vcombine_u16(first, B == 3 ? vld1_u16(halves + 4) : first));
  }

  F8 operator[](Words dwords) const {
    const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(dwords.half[0]), vreinterpretq_u16_u32(dwords.half[1]));
    const uint16x8_t codes = vandq_u16(low, vdupq_n_u16((1u << B) - 1));
    const uint8x16_t bytes = vreinterpretq_u8_u16(vmlaq_n_u16(vdupq_n_u16(0x0100), codes, 0x0202));
    return fp16_to_floats(vreinterpretq_u16_u8(vqtbl1q_u8(entries, bytes)));
  }
};

// Sixteen entries or more as low bytes and high bytes.
template <int B>
struct HalfTable {
  static constexpr int PARTS = 1 << (B - 4);
  uint8x16_t low[PARTS], high[PARTS];

  explicit HalfTable(const uint16_t* halves) {
    for (int p = 0; p < PARTS; p++) {
      const uint8x16x2_t apart = vld2q_u8(reinterpret_cast<const uint8_t*>(halves + 16 * p));
      low[p] = apart.val[0];
      high[p] = apart.val[1];
    }
  }

  // Looks up 32 codes below 2^B; the floats have the order of the bytes.
  void pick(Bytes32 codes, F8 out[4]) const {
    for (int i = 0; i < 2; i++) {
      const uint8x16_t lows = among(low, codes.half[i]), highs = among(high, codes.half[i]);
      out[2 * i] = fp16_to_floats(vreinterpretq_u16_u8(vzip1q_u8(lows, highs)));
      out[2 * i + 1] = fp16_to_floats(vreinterpretq_u16_u8(vzip2q_u8(lows, highs)));
    }
  }
  void pick(Words codes, F8 out[4]) const { pick(bytes_of(codes), out); }

 private:
  static uint8x16_t among(const uint8x16_t* parts, uint8x16_t codes) {
    if constexpr (B == 4) return vqtbl1q_u8(parts[0], codes);
    if constexpr (B == 5) return vqtbl2q_u8({{parts[0], parts[1]}}, codes);
    if constexpr (B == 6) return vqtbl4q_u8({{parts[0], parts[1], parts[2], parts[3]}}, codes);
  }
};

}  // namespace gearbx

#endif

namespace gearbx {

inline float half_to_float(uint16_t half) {
#ifdef GEARBX_AVX2
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#elif defined(GEARBX_NEON)
  return vgetq_lane_f32(fp16_to_floats(vdup_n_u16(half)), 0);
#else
  return fp16_to_float(half);
#endif
}

#ifdef GEARBX_AVX2

typedef __m256i Words;

inline Words words_of(Bytes32 codes) { return codes; }

// Each dword shifted up, or down if `up` is negative.
inline Words shifted(Words words, int up) {
  return up >= 0 ? _mm256_slli_epi32(words, up) : _mm256_srli_epi32(words, -up);
}
inline Words masked(Words words, int up, unsigned mask) {
  return _mm256_and_si256(shifted(words, up), _mm256_set1_epi32(static_cast<int>(mask)));
}

// Four or eight entries as floats. A permutation looks up one of eight by the lowest three bits of a dword and ignores
// the others. Four entries are stored twice, so that the third bit is ignored too.
template <int B>
struct FloatTable {
  static_assert(B == 2 || B == 3);
  F8 entries;

  explicit FloatTable(const uint16_t* halves) {
    const __m128i few = B == 2 ? load8_bytes(reinterpret_cast<const uint8_t*>(halves))
                               : _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
    entries = _mm256_cvtph_ps(B == 2 ? _mm_unpacklo_epi64(few, few) : few);
  }

  F8 operator[](Words dwords) const { return _mm256_permutevar8x32_ps(entries, dwords); }
};

// Sixteen entries or more as low bytes and high bytes. A byte shuffle looks up one of sixteen, each additional bit of
// the code chooses between two halves, and low and high byte together are the fp16 entry.
template <int B>
struct HalfTable {
  static constexpr int PARTS = 1 << (B - 4);
  __m256i low[PARTS], high[PARTS];

  explicit HalfTable(const uint16_t* halves) {
    const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                           0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int p = 0; p < PARTS; p++) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + 16 * p));
      const __m256i split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(both, apart), 0xd8);  // all low, all high
      low[p] = _mm256_permute2x128_si256(split, split, 0x00);
      high[p] = _mm256_permute2x128_si256(split, split, 0x11);
    }
  }

  // Looks up 32 codes below 2^B; the floats have the order of the bytes.
  void pick(Bytes32 codes, F8 out[4]) const {
    const __m256i lows = among<B>(low, codes), highs = among<B>(high, codes);
    const __m256i first = _mm256_unpacklo_epi8(lows, highs), second = _mm256_unpackhi_epi8(lows, highs);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(first));
    out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(second));
    out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1));
    out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1));
  }

 private:
  template <int C>
  static __m256i among(const __m256i* parts, Bytes32 codes) {
    if constexpr (C == 4)
      return _mm256_shuffle_epi8(parts[0], codes);
    else  // the highest bit of each byte chooses
      return _mm256_blendv_epi8(among<C - 1>(parts, codes), among<C - 1>(parts + (1 << (C - 5)), codes),
                                _mm256_slli_epi16(codes, 8 - C));
  }
};

// Eight words; after the first `count`, zeros without reading memory.
inline Words load_words(const uint32_t* p, int64_t count) {
  if (count >= 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), present);
}

inline F8 gather8(const float* x, const uint16_t* columns) {
  const __m256i index = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
  return _mm256_i32gather_ps(x, index, 4);
}

#else

inline F8 gather8(const float* x, const uint16_t* columns) {
  float found[8];
  for (int l = 0; l < 8; l++) found[l] = x[columns[l]];
  return load8(found);
}

#endif

}  // namespace gearbx
