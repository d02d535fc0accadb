// Vectors of eight floats: AVX2 or NEON if the compiler targets it, otherwise vectors of GCC and Clang, for every
// processor.
//
// Every operation that rounds is explicit here, so that results do not depend on the compiler's treatment of the loops
// around it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(GEARBX_PORTABLE)
#define GEARBX_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(GEARBX_PORTABLE)
#define GEARBX_NEON 1
#include <arm_neon.h>

// Vectors of eight floats in two registers of a 64-bit ARM. They are a separate type, because GCC keeps its vectors of
// 32 bytes in memory there.
namespace gearbx {

struct F8 {
  float32x4_t low, high;
};

inline F8 operator+(F8 a, F8 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F8 operator-(F8 a, F8 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F8 operator*(F8 a, F8 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }

inline F8 zero8() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline F8 all8(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
inline F8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F8 add8(F8 a, F8 b) { return a + b; }
inline F8 multiply8(F8 a, F8 b) { return a * b; }
inline F8 multiply_add8(F8 a, F8 b, F8 c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float32x4_t bf16_to_floats(uint16x4_t halves) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
inline float32x4_t fp16_to_floats(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }

inline F8 bf16_to_floats(uint16x8_t halves) {
  return {bf16_to_floats(vget_low_u16(halves)), bf16_to_floats(vget_high_u16(halves))};
}
inline F8 fp16_to_floats(uint16x8_t halves) {
  return {fp16_to_floats(vget_low_u16(halves)), fp16_to_floats(vget_high_u16(halves))};
}
inline F8 load8_bf16(const uint16_t* p) { return bf16_to_floats(vld1q_u16(p)); }
inline F8 load8_fp16(const uint16_t* p) { return fp16_to_floats(vld1q_u16(p)); }

inline void store8(float* p, F8 a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}

// Loads are explicit instructions, so that compilers do not repeat them.
inline F8 hold(F8 a) { return a; }

// The sums of four vectors, in the order of sum8.
inline float32x4_t sums4(F8 a, F8 b, F8 c, F8 d) {
  const auto fours = [](F8 v) { return vreinterpretq_f64_f32(vaddq_f32(v.low, v.high)); };
  const auto twos = [&](F8 v, F8 w) {
    const float64x2_t one = fours(v), two = fours(w);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(one, two)), vreinterpretq_f32_f64(vzip2q_f64(one, two)));
  };
  return vpaddq_f32(twos(a, b), twos(c, d));
}

}  // namespace gearbx

#endif

// For functions that run for every few bytes: a call, or a value in memory, would take longer than the work.
#define GEARBX_INLINE inline __attribute__((always_inline))

namespace gearbx {

inline float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// IEEE binary16 without compiler support for it: normal, subnormal, infinite and NaN.
inline float fp16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

#ifdef GEARBX_AVX2

typedef __m256 F8;

inline F8 zero8() { return _mm256_setzero_ps(); }
inline F8 all8(float value) { return _mm256_set1_ps(value); }
inline F8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline F8 add8(F8 a, F8 b) { return _mm256_add_ps(a, b); }
inline F8 multiply8(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
inline F8 multiply_add8(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline F8 load8_bf16(const uint16_t* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

inline F8 load8_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void store8(float* p, F8 a) { _mm256_storeu_ps(p, a); }

// Keeps a loaded value in its register. Otherwise compilers load it again for each use.
inline F8 hold(F8 a) {
  asm("" : "+x"(a));
  return a;
}

#elif !defined(GEARBX_NEON)

typedef float F8 __attribute__((vector_size(32)));

inline F8 zero8() { return F8{}; }
inline F8 all8(float value) { return F8{} + value; }
inline F8 load8(const float* p) {
  F8 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline F8 add8(F8 a, F8 b) { return a + b; }
inline F8 multiply8(F8 a, F8 b) { return a * b; }
inline F8 multiply_add8(F8 a, F8 b, F8 c) { return a * b + c; }
inline float multiply_add(float a, float b, float c) { return a * b + c; }

inline F8 load8_bf16(const uint16_t* p) {
  F8 a;
  for (int i = 0; i < 8; i++) a[i] = bf16_to_float(p[i]);
  return a;
}

inline F8 load8_fp16(const uint16_t* p) {
  F8 a;
  for (int i = 0; i < 8; i++) a[i] = fp16_to_float(p[i]);
  return a;
}

inline void store8(float* p, F8 a) { std::memcpy(p, &a, sizeof a); }
inline F8 hold(F8 a) { return a; }

#endif

// The nearest bf16, or fp16, of a number; of two, the even one. fp16 may overflow.
inline float rounded_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return value;  // NaN
  return bf16_to_float(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}
inline float rounded_to_fp16(float value) {
  const float size = value < 0 ? -value : value;
  if (!(size < 65520.0f)) return size >= 65520.0f ? value * INFINITY : value;  // infinity or NaN
  const float rounding = size < 0x1p-14f ? 0x1p-1f : 0.0f;  // for subnormal numbers the step is 2^-24
  if (rounding != 0.0f) return value < 0 ? -((size + rounding) - rounding) : (size + rounding) - rounding;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The sum of all eight numbers, always in this order.
inline float sum8(F8 a) {
#ifdef GEARBX_AVX2
  const __m128 fours = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
#else
  float v[8];
  store8(v, a);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

// Stored types, with overloads that convert them.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
inline F8 load8(const Bf16* p) { return load8_bf16(&p->bits); }
inline F8 load8(const Fp16* p) { return load8_fp16(&p->bits); }
inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) { return bf16_to_float(value.bits); }
inline float to_float(Fp16 value) { return fp16_to_float(value.bits); }

}  // namespace gearbx
