// Sixteen float32, the sums of matmuls over rows of floats: one register of AVX-512, or an even and an odd vector of
// eight. Both are bit-identical. AVX2 uses eight sums for dense rows (tile.h).

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

// sum8 of each of eight vectors.
#ifdef GEARBX_AVX2
inline F8 sums8(const F8 (&a)[8]) {
  // Adds two halves of both vectors: a lane and the fourth after it, the second after it, and the next one.
  const auto fours = [](F8 x, F8 y) {
    return add8(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const auto twos = [](F8 x, F8 y) { return add8(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee)); };
  const auto ones = [](F8 x, F8 y) { return add8(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd)); };
  const F8 sums = ones(twos(fours(a[0], a[1]), fours(a[2], a[3])), twos(fours(a[4], a[5]), fours(a[6], a[7])));
  return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#elif defined(GEARBX_NEON)
inline F8 sums8(const F8 (&a)[8]) { return {sums4(a[0], a[1], a[2], a[3]), sums4(a[4], a[5], a[6], a[7])}; }
#else
inline F8 sums8(const F8 (&a)[8]) {
  F8 sums;
  for (int i = 0; i < 8; i++) sums[i] = sum8(a[i]);
  return sums;
}
#endif

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
inline F16 join(F8 even, F8 odd) { return _mm512_insertf32x8(_mm512_castps256_ps512(even), odd, 1); }
inline EvenOdd in_halves(F16 a) { return {_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)}; }
inline F16 hold(F16 a) {
  asm("" : "+v"(a));
  return a;
}

#ifdef __AVX512BF16__
// 32 bf16, whose products are added in pairs: each of sixteen sums gets the products of two neighbors.
#define GEARBX_PAIRS 1
typedef __m512i Pairs;

inline Pairs load32(const Bf16* p) { return _mm512_loadu_si512(p); }
inline F16 multiply_add_pairs(Pairs a, Pairs b, F16 c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline Pairs hold(Pairs a) {
  asm("" : "+v"(a));
  return a;
}
// The nearest bf16 of 32 numbers; zeros for subnormal ones.
inline Pairs round32(const float* p) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p)));
}
#endif

#else

typedef EvenOdd F16;

template <class T>
inline F16 load16(const T* p) {
  return load_even_odd(p);
}
inline F16 join(F8 even, F8 odd) { return {even, odd}; }
inline void store16(float* p, F16 a) {
  store8(p, a.even);
  store8(p + 8, a.odd);
}

#endif

}  // namespace gearbx
