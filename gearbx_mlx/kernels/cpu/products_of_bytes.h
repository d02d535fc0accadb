// Sums of byte products of codes and activations: four of each row at a time, by the processor's instruction if it has
// one.
//
// Sums<NARROW> take at most RUN steps of four columns: begin, add, ..., add, end. NARROW codes have at most four bits
// and are unsigned; other codes are stored as in SIGNED_BYTES.
//
// With AS_WORDS, two-byte activations are not multiplied byte by byte: WordSums take whole words, and unsigned codes.

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

#elif defined(GEARBX_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)

constexpr bool SIGNED_BYTES = false;

template <bool NARROW>
struct Sums {
  Ints sums;
  GEARBX_INLINE void begin(Ints before) { sums = before; }
  GEARBX_INLINE Ints end(Ints) const { return sums; }
  GEARBX_INLINE void add(Ints codes, Ints x) {
    sums = vusdotq_s32(sums, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(x));
  }
  template <int LANE>
  GEARBX_INLINE void add_lane(Ints codes, int8x16_t x) {
    sums = vusdotq_laneq_s32(sums, vreinterpretq_u8_s32(codes), x, LANE);
  }
};

#else

constexpr bool SIGNED_BYTES = true;

#if defined(GEARBX_AVX2)

// Adds to a sum at once: compilers would add all products of a run in pairs, and lack registers for that.
GEARBX_INLINE void add_now(Ints& sum, Ints a) {
  sum = add_ints(sum, a);
  asm("" : "+x"(sum));
}

// Sums of narrow codes fit 16 bits over a whole run: 15 * 127 * 2 * RUN < 2^15. Other codes give their sign to the
// activation, and the sum of two products fits: 128 * 127 * 2.
template <bool NARROW>
struct Sums {
  Ints sums;
  GEARBX_INLINE void begin(Ints before) { sums = NARROW ? zero_ints() : before; }
  GEARBX_INLINE Ints end(Ints before) const { return NARROW ? add_ints(before, pairs(sums)) : sums; }
  GEARBX_INLINE void add(Ints codes, Ints x) {
    if constexpr (NARROW) {
      sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
      asm("" : "+x"(sums));
    } else
      add_now(sums, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))));
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
#if defined(GEARBX_NEON)
    const int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(x);
#if defined(__ARM_FEATURE_DOTPROD)
    sums = vdotq_s32(sums, a, b);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    sums = vpadalq_s16(sums, vpaddq_s16(low, high));  // two products fit 16 bits: 128 * 127 * 2
#endif
#else
    int8_t a[4 * LANES], b[4 * LANES];
    store_ints(a, codes);
    store_ints(b, x);
    for (int l = 0; l < LANES; l++)
      for (int i = 0; i < 4; i++) sums[l] += a[4 * l + i] * b[i];
#endif
  }
#if defined(GEARBX_NEON) && defined(__ARM_FEATURE_DOTPROD)
  template <int LANE>
  GEARBX_INLINE void add_lane(Ints codes, int8x16_t x) {
    sums = vdotq_laneq_s32(sums, vreinterpretq_s8_s32(codes), x, LANE);
  }
#endif
};

#endif
#endif

#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512_VNNI) && !defined(GEARBX_VNNI)

// A byte-by-byte product takes nine operations for four columns; this takes four, and two for any number of vectors.
constexpr bool AS_WORDS = true;

struct WordSums {
  Ints sums;
  GEARBX_INLINE void begin(Ints before) { sums = before; }
  GEARBX_INLINE Ints end(Ints) const { return sums; }
  // Even codes, then odd ones, each with two 16-bit activations.
  GEARBX_INLINE void add(Ints even, Ints odd, const int8_t* x) {
    add_now(sums, _mm256_madd_epi16(even, all_bytes(x)));
    add_now(sums, _mm256_madd_epi16(odd, all_bytes(x + 4)));
  }
};

// Adds the products of codes and four activations of each of COUNT vectors.
template <int COUNT>
GEARBX_INLINE void add_all(Ints codes, const int8_t* x, WordSums* sums) {
  const Ints even = and_ints(codes, 0x00ff00ff), odd = _mm256_srli_epi16(codes, 8);
  for (int v = 0; v < COUNT; v++) sums[v].add(even, odd, x + 8 * v);
}

#else

constexpr bool AS_WORDS = false;
struct WordSums;

#endif

// Whether panels store codes of `bits` bits signed for activations of X bytes.
constexpr bool are_signed(int bits, int x_bytes) { return SIGNED_BYTES && bits > 4 && !(AS_WORDS && x_bytes == 2); }

// Adds the products of codes and COUNT times four consecutive activations to as many sums.
template <int COUNT, bool NARROW>
GEARBX_INLINE void add_all(Ints codes, const int8_t* x, Sums<NARROW>* sums) {
  int i = 0;
#if defined(GEARBX_NEON) && defined(__ARM_FEATURE_DOTPROD)
  for (; i + 4 <= COUNT; i += 4) {  // an instruction takes four activations of a register
    const int8x16_t sixteen = vld1q_s8(x + 4 * i);
    sums[i].template add_lane<0>(codes, sixteen);
    sums[i + 1].template add_lane<1>(codes, sixteen);
    sums[i + 2].template add_lane<2>(codes, sixteen);
    sums[i + 3].template add_lane<3>(codes, sixteen);
  }
#endif
  for (; i < COUNT; i++) sums[i].add(codes, all_bytes(x + 4 * i));
}

}  // namespace gearbx
