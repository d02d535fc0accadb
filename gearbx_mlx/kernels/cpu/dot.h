// Integer products of codes with activations of eight bits, by the processor's own instruction or in plain C++.
//
// A register is 32 codes as bytes. Codes of widths that divide a byte are masked in place: register k is the codes at
// bit k * W of each byte, which are every (8 / W)-th, and the activations are put in that order once for all rows.
// Codes of other widths are unpacked (codes.h) and keep their order.
//
// An activation is a byte from -127 to 127, or two of them, of which the first is multiplied by BASE. Lane j of the
// sums is the sum of bytes 4 j to 4 j + 3 of a register.

#pragma once

#include "codes.h"

namespace gearbx {

constexpr int BASE = 254;

constexpr bool divides_a_byte(int width) { return width == 1 || width == 2 || width == 4; }

template <int W>
struct Unit {
  static constexpr int REGISTERS = divides_a_byte(W) ? 8 / W : 1;
  static constexpr int CODES = 32 * REGISTERS;
  static constexpr int BYTES = CODES * W / 8;
};

#if defined(GEARBX_AVX2)

typedef __m256i I8;  // eight sums of 32 bits

GEARBX_INLINE F8 to_floats(I8 sums) { return _mm256_cvtepi32_ps(sums); }
GEARBX_INLINE I8 load_x(const int8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

template <int W>
GEARBX_INLINE void load_codes(const uint8_t* p, Bytes32* out) {
  if constexpr (divides_a_byte(W)) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i mask = _mm256_set1_epi8((1 << W) - 1);
    for (int k = 0; k < Unit<W>::REGISTERS; k++) out[k] = _mm256_and_si256(_mm256_srli_epi16(bytes, k * W), mask);
  } else {
    out[0] = unpack<W>(p);
  }
}

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)

constexpr bool SIGNED_BYTES = false;

GEARBX_INLINE I8 add_products(I8 sums, Bytes32 codes, I8 x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sums, codes, x);
#else
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
#endif
}

template <int W, int PLACE>
GEARBX_INLINE I8 dot(const Bytes32* codes, const int8_t* x) {
  I8 sums = _mm256_setzero_si256();
  for (int k = 0; k < Unit<W>::REGISTERS; k++) sums = add_products(sums, codes[k], load_x(x + 32 * k));
  return PLACE == 1 ? sums : _mm256_mullo_epi32(sums, _mm256_set1_epi32(PLACE));
}

#else

constexpr bool SIGNED_BYTES = true;  // codes of eight bits are signed

// Sums of two products must fit 16 bits. Unsigned codes times signed activations: at most 63 * 127 * 2. Codes of 8 bits
// give their sign to the activation: at most 128 * 127 * 2. Sums over the registers of a unit: at most 15 * 127 * 2 *
// 2.
template <int W, int PLACE>
GEARBX_INLINE I8 dot(const Bytes32* codes, const int8_t* x) {
  __m256i sums;
  if constexpr (W == 8) {
    sums = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[0]), _mm256_sign_epi8(load_x(x), codes[0]));
  } else {
    sums = _mm256_maddubs_epi16(codes[0], load_x(x));
    for (int k = 1; k < Unit<W>::REGISTERS; k++)
      sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes[k], load_x(x + 32 * k)));
  }
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(PLACE));
}

#endif

GEARBX_INLINE I8 add_sums(I8 a, I8 b) { return _mm256_add_epi32(a, b); }

// Repeats each of 8 / R values in R lanes.
template <int R>
GEARBX_INLINE F8 spread(const float* values) {
  if constexpr (R == 8) return all8(values[0]);
  if constexpr (R == 4) return _mm256_set_m128(_mm_set1_ps(values[1]), _mm_set1_ps(values[0]));
  if constexpr (R == 2) {
    const __m256i index = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(values)), index);
  }
  return load8(values);
}

#else

typedef int32_t I8 __attribute__((vector_size(32)));

GEARBX_INLINE F8 to_floats(I8 sums) { return __builtin_convertvector(sums, F8); }

template <int W>
GEARBX_INLINE void load_codes(const uint8_t* p, Bytes32* out) {
  if constexpr (divides_a_byte(W)) {
    for (int k = 0; k < Unit<W>::REGISTERS; k++)
      for (int i = 0; i < 32; i++) out[k].byte[i] = static_cast<uint8_t>(p[i] >> (k * W) & ((1 << W) - 1));
  } else {
    out[0] = unpack<W>(p);
  }
}

constexpr bool SIGNED_BYTES = true;

GEARBX_INLINE I8 add_sums(I8 a, I8 b) { return a + b; }

template <int W, int PLACE>
GEARBX_INLINE I8 dot(const Bytes32* codes, const int8_t* x) {
#if defined(__ARM_FEATURE_DOTPROD)
  int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
  for (int k = 0; k < Unit<W>::REGISTERS; k++) {
    low = vdotq_s32(low, vreinterpretq_s8_u8(vld1q_u8(codes[k].byte)), vld1q_s8(x + 32 * k));
    high = vdotq_s32(high, vreinterpretq_s8_u8(vld1q_u8(codes[k].byte + 16)), vld1q_s8(x + 32 * k + 16));
  }
  I8 sums;
  vst1q_s32(reinterpret_cast<int32_t*>(&sums), low);
  vst1q_s32(reinterpret_cast<int32_t*>(&sums) + 4, high);
  return sums * PLACE;
#else
  I8 sums = {};
  for (int k = 0; k < Unit<W>::REGISTERS; k++)
    for (int i = 0; i < 32; i++) {
      const int code = W == 8 ? static_cast<int8_t>(codes[k].byte[i]) : codes[k].byte[i];
      sums[i / 4] += code * x[32 * k + i];
    }
  return sums * PLACE;
#endif
}

template <int R>
GEARBX_INLINE F8 spread(const float* values) {
  F8 out;
  for (int i = 0; i < 8; i++) out[i] = values[i / R];
  return out;
}

#endif

// The sums of a unit of codes times its activations; of activations of two bytes, all first bytes precede all second
// ones.
template <int W, int BYTES>
GEARBX_INLINE I8 products(const Bytes32* codes, const int8_t* x) {
  if constexpr (BYTES == 1) return dot<W, 1>(codes, x);
  return add_sums(dot<W, BASE>(codes, x), dot<W, 1>(codes, x + Unit<W>::CODES));
}

// The index, within a unit, of the activation for byte i of register k.
template <int W>
constexpr int input_at(int k, int i) {
  return divides_a_byte(W) ? 8 / W * i + k : i;
}

}  // namespace gearbx
