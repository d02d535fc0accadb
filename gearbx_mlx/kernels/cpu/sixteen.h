// Sixteen float32 side by side, which is what products over dense rows add up: one register of AVX-512, or an even and
// an odd vector of eight. Both give the same bits.

#pragma once

#include "simd.h"

#if defined(GEARBX_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define GEARBX_AVX512 1
#endif

namespace gearbx {

struct EvenOdd {
  F8 even, odd;
};

template <class T>
inline EvenOdd load_even_odd(const T* p) {
  return {load8(p), load8(p + 8)};
}
inline EvenOdd multiply_add16(EvenOdd a, EvenOdd b, EvenOdd c) {
  return {multiply_add8(a.even, b.even, c.even), multiply_add8(a.odd, b.odd, c.odd)};
}
inline EvenOdd in_halves(EvenOdd a) { return a; }
inline EvenOdd hold(EvenOdd a) { return {hold(a.even), hold(a.odd)}; }

#ifdef GEARBX_AVX512

typedef __m512 F16;

inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline F16 load16(const Bf16* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline F16 load16(const Fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store16(float* p, F16 a) { _mm512_storeu_ps(p, a); }
inline F16 multiply_add16(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline EvenOdd in_halves(F16 a) { return {_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)}; }
inline F16 hold(F16 a) {
  asm("" : "+v"(a));
  return a;
}

#else

typedef EvenOdd F16;

template <class T>
inline F16 load16(const T* p) {
  return load_even_odd(p);
}
inline void store16(float* p, F16 a) {
  store8(p, a.even);
  store8(p + 8, a.odd);
}

#endif

// Loads in the form of the sums that they go to.
template <class T>
inline void load(const T* p, EvenOdd& out) {
  out = load_even_odd(p);
}
#ifdef GEARBX_AVX512
template <class T>
inline void load(const T* p, F16& out) {
  out = load16(p);
}
#endif

}  // namespace gearbx
