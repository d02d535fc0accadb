// Decodes rows of planes 4+4 with five low bits with AVX-512, 64 weights at a time: values as floats of 16 columns,
// then weights as words of 32 columns. Groups of a rare kind are left to the code for 32 weights.

#pragma once

#include "exact_avx512.h"
#include "exact_planes.h"

namespace gearbx {

// Sixteen groups at a time: step and offset of their values, the bound of what is near zero, and what takes the place
// of the value there.
struct Planes16 {
  alignas(64) float steps[16], offsets[16], bounds[16], near[16];
  uint32_t rare;  // a bit for each group that the code for 64 weights does not decode

  GEARBX_INLINE void read(const uint16_t* s, const uint16_t* b0, const uint16_t* b1, int64_t left) {
    const __m512 sixteenth = _mm512_set1_ps(0x1p-4f), scale = widen16(s, left), size = _mm512_abs_ps(scale);
    const __m512 step = _mm512_mul_ps(scale, sixteenth);
    _mm512_store_ps(steps, step);
    _mm512_store_ps(offsets, _mm512_add_ps(widen16(b0, left), _mm512_mul_ps(widen16(b1, left), sixteenth)));
    _mm512_store_ps(bounds, _mm512_mul_ps(_mm512_abs_ps(step), _mm512_set1_ps(8.8f)));
    _mm512_store_ps(near, size);
    // Groups of scale 0 are stored whole; where the scale is huge, step times code may overflow before the sum.
    rare = ~static_cast<uint32_t>(_mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_GT_OQ) &
                                  _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p120f), _CMP_LT_OQ));
  }
};

template <int GROUP>
struct Planes64 {
  // Where the codes of 16 columns are, for dwords, and the low bits and bytes of `high` of 32 columns, for words.
  const Bytes64 code = bytes64([](int i) { return i / 4; });
  const Bytes64 pair = bytes64([](int i) { return i % 2 * 64 + i / 2; });
  const Bytes64 first = bytes64([](int i) { return (i % 8 * 4 + 60) % 64; });  // into the upper half of a byte
  const Bytes64 second = bytes64([](int i) { return i % 8 * 4; });
  const Bytes64 five = bytes64([](int i) { return i / 8 * 5 + (i % 8 < 5 ? i % 8 : 0); });
  const Bytes64 fifth = bytes64([](int i) { return (i % 8 * 5 + 61) % 64; });  // into the upper five bits of a byte
  const Bytes64 lower_half = constant(_mm512_set1_epi8(15)), magnitude = constant(_mm512_set1_epi32(0x7fffffff));
  const Bytes64 window = constant(_mm512_set1_epi32((31 - FAR_WINDOW) << 16));
  const Bytes64 halves = bytes64([](int i) { return i % 2 ? 0 : i + 1; });  // the upper ones of two times 16 dwords
  const Bytes64 sign = constant(_mm512_set1_epi16(static_cast<short>(0x8000)));
  const Bytes64 twelve = constant(_mm512_set1_epi16(0xfff)), last_five = constant(_mm512_set1_epi16(31));
  const Bytes64 zeros = constant(_mm512_set1_epi16(0xf80));  // the least distance of a zero
  ExactRow& row;

  explicit Planes64(ExactRow& r) : row(r) {}

  GEARBX_INLINE Bytes64 shifted(const uint8_t* codes, Bytes64 bits) const {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    return _mm512_multishift_epi64_epi8(bits, _mm512_cvtepu32_epi64(packed));
  }

  // The last neighbours (exact_planes.h) of 16 columns of a group, in the upper halves of dwords.
  GEARBX_INLINE Bytes64 last(const Planes16& groups, int64_t g, Bytes64 codes, Bytes64 places, __mmask16& far) const {
    const Bytes64 words = _mm512_maskz_permutexvar_epi8(0x1111111111111111, places, codes);
    const __m512 v = _mm512_fmadd_ps(_mm512_set1_ps(groups.steps[g]), _mm512_cvtepi32_ps(words),
                                     _mm512_set1_ps(groups.offsets[g]));
    const Bytes64 bits = _mm512_castps_si512(v), near = _mm512_castps_si512(_mm512_set1_ps(groups.near[g]));
    const __m512 size = _mm512_castsi512_ps(_mm512_and_si512(bits, magnitude));
    far = _mm512_cmp_ps_mask(size, _mm512_set1_ps(groups.bounds[g]), _CMP_GE_OQ);
    return _mm512_mask_add_epi32(near, far, bits, window);
  }

  // The weights of 32 columns, from their last neighbours, and low bits and bytes of `high`, which are 0 far from zero.
  GEARBX_INLINE Bytes64 weights(const Bytes64 (&last)[2], Bytes64 stored) const {
    const Bytes64 both = _mm512_permutex2var_epi16(last[0], halves, last[1]);
    const Bytes64 distance = _mm512_and_si512(_mm512_srli_epi16(stored, 3), twelve);
    const __mmask32 nonzero = _mm512_cmplt_epu16_mask(distance, zeros);
    const Bytes64 nearest = _mm512_sub_epi16(both, distance);
    const Bytes64 below = _mm512_ternarylogic_epi64(nearest, last_five, distance, 0xb8);  // ends in the low bits
    const Bytes64 signs = _mm512_and_si512(stored, sign);
    return _mm512_mask_add_epi16(signs, nonzero, signs, below);
  }

  // Uses 64 weights from a column on, of one group, or of group number g and the next.
  template <class Use>
  GEARBX_INLINE void block(const Planes16& groups, int64_t g, int64_t column, Use use) {
    const Bytes64 codes = _mm512_ternarylogic_epi64(shifted(row.weights[0] + column / 2, first), lower_half,
                                                    shifted(row.weights[1] + column / 2, second), 0xb8);
    const Bytes64 packed = _mm512_maskz_loadu_epi8((uint64_t{1} << 40) - 1, row.low + column / 8 * 5);
    const Bytes64 low = _mm512_multishift_epi64_epi8(fifth, _mm512_permutexvar_epi8(five, packed));
    Bytes64 neighbours[2][2];
    __mmask16 far[4];
    for (int i = 0; i < 4; i++) {
      const Bytes64 places = _mm512_add_epi8(code, _mm512_set1_epi8(static_cast<char>(16 * i)));
      neighbours[i / 2][i % 2] = last(groups, GROUP == 32 ? g + i / 2 : g, codes, places, far[i]);
    }
    const __mmask64 all = _mm512_kunpackd(_mm512_kunpackw(far[3], far[2]), _mm512_kunpackw(far[1], far[0]));
    const Bytes64 high = deal_high(row.high, _mm512_setzero_si512(), _knot_mask64(all));
    for (int i = 0; i < 2; i++) {
      const Bytes64 places = _mm512_add_epi8(pair, _mm512_set1_epi8(static_cast<char>(32 * i)));
      const Bytes64 both = weights(neighbours[i], _mm512_permutex2var_epi8(low, places, high));
      use(column + 32 * i, Weights32{both});
    }
  }

  // Calls use(column, weights) for each 32 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each32(Use use) {
    Planes16 some;
    constexpr int64_t SEGMENT = 16 * GROUP;
    Planes32<GROUP> others(row);
    for (int64_t segment = 0; segment < row.columns; segment += SEGMENT) {
      const int64_t at = segment / GROUP, left = row.columns / GROUP - at;
      some.read(row.scales + at, row.biases[0] + at, row.biases[1] + at, left);
      const int64_t end = segment + SEGMENT < row.columns ? segment + SEGMENT : row.columns;
      for (int64_t column = segment; column < end; column += 64) {
        const int64_t g = (column - segment) / GROUP;
        __builtin_prefetch(row.low + (column + AHEAD_OF_ROW) / 8 * 5);
        __builtin_prefetch(row.ahead[column / 64 % 2] + column / 128 * 64);
        const uint32_t rare = some.rare >> g & (GROUP == 32 ? 3 : 1);
        if (__builtin_expect(!rare && column + 64 <= end, 1)) {
          block(some, g, column, use);
        } else {
          for (int64_t i = column; i < column + 64 && i < end; i += BLOCK) others.block(i, use);
        }
      }
    }
  }
};

}  // namespace gearbx
