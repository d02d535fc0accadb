// Decodes rows 32 weights at a time, with tables of bytes: AVX2, NEON, or loops for every other processor.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

// What the codes of a group mean: the bytes of the first neighbour, and 255 where the code is in the zero cell.
struct alignas(32) Meanings {
  uint8_t low[16], high[16], zero[16];

#ifdef GEARBX_AVX2
  GEARBX_INLINE void find(float scale, float bias) {
    const __m256 s = _mm256_set1_ps(scale), sign = _mm256_set1_ps(-0.0f);
    const __m256 bound = _mm256_mul_ps(_mm256_andnot_ps(sign, s), _mm256_set1_ps(0.5f));
    __m256i first[2], cell[2];
    for (int i = 0; i < 2; i++) {
      const __m256 q = _mm256_add_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_ps(8.0f * static_cast<float>(i)));
      const __m256 v = _mm256_add_ps(_mm256_mul_ps(s, q), _mm256_set1_ps(bias));
      cell[i] = _mm256_castps_si256(_mm256_cmp_ps(_mm256_andnot_ps(sign, v), bound, _CMP_NGT_UQ));
      first[i] = _mm256_srli_epi32(_mm256_sub_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(WINDOW << 16)), 16);
    }
    // Packing works within lanes; the permutations put the quarters in order again.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first[0], first[1]), 0xd8);
    const __m256i lows = _mm256_and_si256(words, _mm256_set1_epi16(255)), highs = _mm256_srli_epi16(words, 8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(lows, highs), 0xd8);
    const __m256i cells = _mm256_permute4x64_epi64(_mm256_packs_epi32(cell[0], cell[1]), 0xd8);
    _mm256_store_si256(reinterpret_cast<__m256i*>(low), bytes);
    const __m128i zeros = _mm_packs_epi16(_mm256_castsi256_si128(cells), _mm256_extracti128_si256(cells, 1));
    _mm_store_si128(reinterpret_cast<__m128i*>(zero), zeros);
  }
#elif defined(GEARBX_NEON)
  GEARBX_INLINE void find(float scale, float bias) {
    constexpr float CODES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float32x4_t bound = vdupq_n_f32((scale < 0 ? -scale : scale) * 0.5f);
    uint16x4_t first[4], far[4];
    for (int i = 0; i < 4; i++) {
      const float32x4_t v = vaddq_f32(vmulq_n_f32(vld1q_f32(CODES + 4 * i), scale), vdupq_n_f32(bias));
      first[i] = vshrn_n_u32(vsubq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(WINDOW << 16)), 16);
      far[i] = vmovn_u32(vcgtq_f32(vabsq_f32(v), bound));
    }
    for (int i = 0; i < 2; i++) {
      const uint16x8_t words = vcombine_u16(first[2 * i], first[2 * i + 1]);
      vst1_u8(low + 8 * i, vmovn_u16(words));
      vst1_u8(high + 8 * i, vshrn_n_u16(words, 8));
      vst1_u8(zero + 8 * i, vmvn_u8(vmovn_u16(vcombine_u16(far[2 * i], far[2 * i + 1]))));
    }
  }
#else
  GEARBX_INLINE void find(float scale, float bias) {
    const float bound = (scale < 0 ? -scale : scale) * 0.5f;
    for (int q = 0; q < 16; q++) {
      const float v = scale * static_cast<float>(q) + bias;
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      const uint32_t first = (bits >> 16) - WINDOW;
      low[q] = static_cast<uint8_t>(first);
      high[q] = static_cast<uint8_t>(first >> 8);
      zero[q] = (v < 0 ? -v : v) > bound ? 0 : 255;
    }
  }
#endif
};

#if defined(GEARBX_AVX2)

// Deals out bytes to two sets of eight places; the second set's bytes follow those of the first.
GEARBX_INLINE __m128i deal(const uint8_t* bytes, uint32_t sets) {
  const auto one = [](const uint8_t* p, uint32_t set) {
    return _mm_shuffle_epi8(load8_bytes(p), load8_bytes(PLACES.of[set]));
  };
  const uint32_t first = sets & 255, second = sets >> 8 & 255;
  return _mm_unpacklo_epi64(one(bytes, first), one(bytes + __builtin_popcount(first), second));
}

GEARBX_INLINE Weights32 decode(const Meanings& m, Bytes32 codes, const uint8_t* stored, HighBytes& row) {
  const auto look_up = [codes](const uint8_t* table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table)), codes);
  };
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stored)), first = look_up(m.low);
  const __m256i stays = _mm256_cmpeq_epi8(_mm256_max_epu8(low, first), low), zero = look_up(m.zero);
  const __m256i far = _mm256_add_epi8(_mm256_add_epi8(look_up(m.high), _mm256_set1_epi8(1)), stays);
  const auto sets = static_cast<uint32_t>(_mm256_movemask_epi8(zero));
  uint8_t copy[32];
  const uint8_t* next = next_high(row, copy);
  const __m128i dealt = deal(next, sets);
  const __m256i near = _mm256_set_m128i(deal(next + __builtin_popcount(sets & 0xffff), sets >> 16), dealt);
  row.at += __builtin_popcount(sets);
  const __m256i high = _mm256_blendv_epi8(far, near, zero);

  // Four columns at a time go to the lane in which the interleaving below needs them.
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), none = _mm256_setzero_si256();
  const __m256i lows = _mm256_permutevar8x32_epi32(low, order), highs = _mm256_permutevar8x32_epi32(high, order);
  const __m256i words[2] = {_mm256_unpacklo_epi8(lows, highs), _mm256_unpackhi_epi8(lows, highs)};
  const auto floats = [none](__m256i words) {
    return join(_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, words)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, words)));
  };
  return {floats(words[0]), floats(words[1])};
}

#elif defined(GEARBX_NEON)

GEARBX_INLINE Weights32 decode(const Meanings& m, const Bytes32& codes, const uint8_t* stored, HighBytes& row) {
  const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8_t copy[32];
  F16 weights[2];
  for (int i = 0; i < 32; i += 16) {
    const uint8x16_t code = codes.half[i / 16], low = vld1q_u8(stored + i);
    const uint8x16_t wraps = vcltq_u8(low, vqtbl1q_u8(vld1q_u8(m.low), code));
    const uint8x16_t far = vsubq_u8(vqtbl1q_u8(vld1q_u8(m.high), code), wraps);
    const uint8x16_t zero = vqtbl1q_u8(vld1q_u8(m.zero), code);
    uint8x16_t sets = vandq_u8(zero, bit);
    for (int step = 0; step < 3; step++) sets = vpaddq_u8(sets, sets);  // neighbours, until each byte is a set
    const unsigned both = vgetq_lane_u16(vreinterpretq_u16_u8(sets), 0), first = both & 255, second = both >> 8;
    const uint8_t* next = next_high(row, copy);
    const int of_first = COUNTS.of[first];
    const uint8x16_t bytes = vcombine_u8(vld1_u8(next), vld1_u8(next + of_first));
    const uint8x8_t places = vadd_u8(vld1_u8(PLACES.of[second]), vdup_n_u8(8));
    const uint8x16_t near = vqtbl1q_u8(bytes, vcombine_u8(vld1_u8(PLACES.of[first]), places));
    row.at += of_first + COUNTS.of[second];
    const uint8x16_t high = vbslq_u8(zero, near, far);
    const uint16x8_t words[2] = {vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))};
    weights[i / 16] = join(bf16_to_floats(words[0]), bf16_to_floats(words[1]));
  }
  return {weights[0], weights[1]};
}

#else

GEARBX_INLINE Weights32 decode(const Meanings& m, const Bytes32& codes, const uint8_t* stored, HighBytes& row) {
  uint32_t bits[32];
  for (int i = 0; i < 32; i++) {
    const int code = codes.byte[i];
    const uint32_t low = stored[i], far = m.high[code] + (low < m.low[code]);
    bits[i] = (m.zero[code] ? row.next() : far) << 24 | low << 16;
  }
  float weights[32];
  std::memcpy(weights, bits, sizeof bits);
  return {load16(weights), load16(weights + 16)};
}

#endif

template <int GROUP>
struct Decoder {
  ExactRow& row;
  explicit Decoder(ExactRow& r) : row(r) {}

  // Calls use(column, weights) for each 32 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each32(Use use) {
    Meanings m;
    for (int64_t group = 0; group < row.columns / GROUP; group++) {
      m.find(bf16_to_float(row.scales[group]), bf16_to_float(row.biases[group]));
      for (int64_t column = group * GROUP; column < (group + 1) * GROUP; column += BLOCK) {
        __builtin_prefetch(row.low + column + AHEAD_OF_ROW);
        use(column, decode(m, unpack<4>(row.codes + column / 2), row.low + column, row.high));
      }
    }
  }
};

}  // namespace gearbx
