// Sums of products of codes and activations as bytes: four of each row at a time, by the processor's own instruction
// where there is one.
//
// Sums<NARROW> are added to over at most RUN steps of four columns: begin, add, ..., add, end. NARROW codes have at
// most four bits and are unsigned; others are stored as SIGNED_BYTES says.

#pragma once

#include "row_lanes.h"

namespace gearbx {

constexpr int RUN = 8;  // steps: 32 columns, the smallest group

// Four activations in every lane.
inline Ints all_bytes(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return all_ints(bytes);
}

#if defined(GEARBX_AVX512_VNNI) || defined(GEARBX_VNNI)

constexpr bool SIGNED_BYTES = false;

template <bool NARROW>
struct Sums {
  Ints sums;
  GEARBX_INLINE void begin(Ints before) { sums = before; }
  GEARBX_INLINE Ints end(Ints) const { return sums; }
  GEARBX_INLINE void add(Ints codes, Ints x) {
#if defined(GEARBX_AVX512_VNNI)
    sums = _mm512_dpbusd_epi32(sums, codes, x);
#else
    sums = GEARBX_DPBUSD(sums, codes, x);
#endif
  }
};

#else

constexpr bool SIGNED_BYTES = true;

#if defined(GEARBX_AVX2)

// Of narrow codes, sums fit 16 bits over a whole run: 15 * 127 * 2 * RUN < 2^15. Others give their sign to the
// activation, and the sum of two products fits: 128 * 127 * 2.
template <bool NARROW>
struct Sums {
  Ints sums;
  GEARBX_INLINE void begin(Ints before) { sums = NARROW ? zero_ints() : before; }
  GEARBX_INLINE Ints end(Ints before) const { return NARROW ? add_ints(before, pairs(sums)) : sums; }
  GEARBX_INLINE void add(Ints codes, Ints x) {
    if constexpr (NARROW)
      sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
    else
      sums = add_ints(sums, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))));
  }
  GEARBX_INLINE static Ints pairs(Ints a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
};

#else

template <bool NARROW>
struct Sums {
  Ints sums;
  GEARBX_INLINE void begin(Ints before) { sums = before; }
  GEARBX_INLINE Ints end(Ints) const { return sums; }
  GEARBX_INLINE void add(Ints codes, Ints x) {
    int8_t a[4 * LANES], b[4 * LANES];
    store_ints(a, codes);
    store_ints(b, x);
#if defined(__ARM_NEON)
    int32x4_t halves[2];
    store_ints(halves, sums);
    for (int h = 0; h < 2; h++) {
      const int8x16_t c = vld1q_s8(a + 16 * h), d = vld1q_s8(b);
#if defined(__ARM_FEATURE_DOTPROD)
      halves[h] = vdotq_s32(halves[h], c, d);
#else
      const int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(d)), high = vmull_s8(vget_high_s8(c), vget_high_s8(d));
      halves[h] = vaddq_s32(halves[h], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
    }
    sums = load_ints(halves);
#else
    for (int l = 0; l < LANES; l++)
      for (int i = 0; i < 4; i++) sums[l] += a[4 * l + i] * b[i];
#endif
  }
};

#endif
#endif

}  // namespace gearbx
