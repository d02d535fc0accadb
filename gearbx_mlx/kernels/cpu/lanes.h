// Vectors of as many float32 as the processor adds at once: sixteen with AVX-512, four with NEON, otherwise eight
// (simd.h). For elementwise operations, whose results do not depend on the number of lanes.

#pragma once

#include "sixteen.h"

namespace gearbx {

#ifdef GEARBX_AVX512

typedef __m512 Floats;

template <class T>
inline Floats load(const T* p) {
  return load16(p);
}
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
// Sixteen numbers in as many vectors as they take, the upper eight added to the lower ones.
inline F8 in_eight(const Floats* sixteen) {
  const EvenOdd halves = in_halves(*sixteen);
  return add8(halves.even, halves.odd);
}
// a if z is at least `least` or NaN, otherwise 0.
inline Floats unless_less(Floats z, float least, Floats a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(z, all(least), _CMP_NLT_UQ), a);
}

#else

#ifdef GEARBX_NEON

typedef float Floats __attribute__((vector_size(16)));

inline Floats load(const float* p) { return vld1q_f32(p); }
inline Floats load(const Bf16* p) { return bf16_to_floats(vld1_u16(&p->bits)); }
inline Floats load(const Fp16* p) { return fp16_to_floats(vld1_u16(&p->bits)); }
inline void store(float* p, Floats a) { vst1q_f32(p, a); }
inline Floats all(float value) { return vdupq_n_f32(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats hold(Floats a) { return a; }
inline F8 in_eight(const Floats* sixteen) { return {sixteen[0] + sixteen[2], sixteen[1] + sixteen[3]}; }

#else

typedef F8 Floats;

template <class T>
inline Floats load(const T* p) {
  return load8(p);
}
inline void store(float* p, Floats a) { store8(p, a); }
inline Floats all(float value) { return all8(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return multiply_add8(a, b, c); }
inline F8 in_eight(const Floats* sixteen) { return add8(sixteen[0], sixteen[1]); }

#endif

#ifdef GEARBX_AVX2
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats unless_less(Floats z, float least, Floats a) {
  return _mm256_and_ps(_mm256_cmp_ps(z, all(least), _CMP_NLT_UQ), a);
}
#else
// The larger of each pair; b if either is NaN.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats unless_less(Floats z, float least, Floats a) { return z < all(least) ? Floats{} : a; }
#endif

#endif

inline Floats smaller(Floats a, Floats b) { return -larger(-a, -b); }

constexpr int LANES = sizeof(Floats) / 4;
typedef uint32_t Ints __attribute__((vector_size(sizeof(Floats))));

inline Floats as_floats(Ints a) {
  Floats b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}
inline Ints as_ints(Floats a) {
  Ints b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}

// The first `count` of p, below LANES; `rest` behind them.
inline Floats load_some(const float* p, int64_t count, float rest) {
  float numbers[LANES];
  store(numbers, all(rest));
  std::memcpy(numbers, p, sizeof(float) * static_cast<size_t>(count));
  return load(numbers);
}

inline void store_some(float* p, int64_t count, Floats a) {
  float numbers[LANES];
  store(numbers, a);
  std::memcpy(p, numbers, sizeof(float) * static_cast<size_t>(count));
}

inline double sum_of(Floats a) {
  float numbers[LANES];
  store(numbers, a);
  double sum = 0;
  for (const float number : numbers) sum += static_cast<double>(number);
  return sum;
}

// The largest number; NaN is ignored.
inline float largest(Floats a) {
  float numbers[LANES], found = -__builtin_inff();
  store(numbers, a);
  for (const float number : numbers) found = number > found ? number : found;
  return found;
}

// exp of several numbers at once. MLX calls the C library's, which takes 20 ns per number on x86.

constexpr float LEAST = -80.0f;  // exp of less is negligible next to 1

// exp(z) for z <= 0, and 0 where z is below LEAST: 2^n exp(r), n whole, |r| <= log(2) / 2, by its Taylor polynomial.
// exp(0) is exactly 1, and exp(NaN) is NaN.
inline Floats exponential(Floats z) {
  const Floats rounding = all(12582912.0f);  // 1.5 * 2^23: the sum with it is rounded to an integer, in the lowest bits
  const Floats sum = multiply_add(z, all(1.44269504f), rounding), n = sum - rounding;
  const Floats r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), z));
  Floats p = all(1.0f / 5040);
  constexpr float NEXT[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float next : NEXT) p = multiply_add(p, r, all(next));
  const Floats power = as_floats((as_ints(sum) << 23) + as_ints(all(1.0f)));
  return unless_less(z, LEAST, p * power);
}

}  // namespace gearbx
