// Integer products of 32 codes and 32 activations of eight bits: each processor's own instruction, or plain C++.
//
// x lies between -127 and 127. Instructions that take signed codes get those of eight bits less CENTER, which the sum
// of the activations makes up for.

#pragma once

#include "codes.h"

namespace gearbx {

#if defined(GEARBX_AVX2)

typedef __m256i I8;  // eight sums of 32 bits

inline I8 zero_sums() { return _mm256_setzero_si256(); }
inline F8 to_floats(I8 sums) { return _mm256_cvtepi32_ps(sums); }
inline I8 load_x(const int8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)

template <int BITS>
constexpr float CENTER = 0;

template <int BITS>
inline Bytes32 centered(Bytes32 codes) {
  return codes;
}

// Four products of an unsigned and a signed byte at a time, onto 32 bits.
template <int BITS>
inline I8 dot(const Bytes32* codes, const int8_t* x, int blocks) {
  I8 sums = zero_sums();
  for (int b = 0; b < blocks; b++)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    sums = _mm256_dpbusd_epi32(sums, codes[b], load_x(x + BLOCK * b));
#else
    sums = _mm256_dpbusd_avx_epi32(sums, codes[b], load_x(x + BLOCK * b));
#endif
  return sums;
}

#else

template <int BITS>
constexpr float CENTER = BITS == 8 ? 128 : 0;

template <int BITS>
inline Bytes32 centered(Bytes32 codes) {
  return BITS == 8 ? flip_signs(codes) : codes;
}

// Pairs of products, onto 16 bits: unsigned times signed, 127 * 127 * 2 at most, or 128 * 127 * 2 with the sign of a
// code put on its activation. Neither overflows; several blocks are added up before they are widened where that is safe.
template <int BITS>
inline __m256i pairs(Bytes32 codes, I8 x) {
  if constexpr (BITS == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
  return _mm256_maddubs_epi16(codes, x);
}

template <int BITS>
inline I8 dot(const Bytes32* codes, const int8_t* x, int blocks) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (BITS <= 4) {  // 4 * 15 * 127 * 2
    __m256i sums = pairs<BITS>(codes[0], load_x(x));
    for (int b = 1; b < blocks; b++) sums = _mm256_add_epi16(sums, pairs<BITS>(codes[b], load_x(x + BLOCK * b)));
    return _mm256_madd_epi16(sums, ones);
  }
  I8 sums = _mm256_madd_epi16(pairs<BITS>(codes[0], load_x(x)), ones);
  for (int b = 1; b < blocks; b++)
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs<BITS>(codes[b], load_x(x + BLOCK * b)), ones));
  return sums;
}

#endif

#else

typedef int32_t I8 __attribute__((vector_size(32)));

inline I8 zero_sums() { return I8{}; }
inline F8 to_floats(I8 sums) { return __builtin_convertvector(sums, F8); }

template <int BITS>
constexpr float CENTER = BITS == 8 ? 128 : 0;

template <int BITS>
inline Bytes32 centered(Bytes32 codes) {
  return BITS == 8 ? flip_signs(codes) : codes;
}

template <int BITS>
inline I8 dot(const Bytes32* codes, const int8_t* x, int blocks) {
#if defined(__ARM_FEATURE_DOTPROD)
  int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
  for (int b = 0; b < blocks; b++) {
    low = vdotq_s32(low, vreinterpretq_s8_u8(vld1q_u8(codes[b].byte)), vld1q_s8(x + BLOCK * b));
    high = vdotq_s32(high, vreinterpretq_s8_u8(vld1q_u8(codes[b].byte + 16)), vld1q_s8(x + BLOCK * b + 16));
  }
  I8 sums;
  vst1q_s32(reinterpret_cast<int32_t*>(&sums), low);
  vst1q_s32(reinterpret_cast<int32_t*>(&sums) + 4, high);
  return sums;
#else
  I8 sums = zero_sums();
  for (int b = 0; b < blocks; b++)
    for (int i = 0; i < BLOCK; i++) {
      const int code = BITS == 8 ? static_cast<int8_t>(codes[b].byte[i]) : codes[b].byte[i];
      sums[i / 4] += code * x[BLOCK * b + i];
    }
  return sums;
#endif
}

#endif

}  // namespace gearbx
