// Common parts of all decoders of exact rows: addresses of a row's arrays, and bounded reads of its bytes of `high`.

#pragma once

#include "exact.h"
#include "tile.h"

namespace gearbx {

constexpr int WINDOW = 144;  // a weight is between 144 neighbors below its low gear's value and 111 above it

// The part of `high` that belongs to a row. Offsets may be wrong: if `at` exceeds the array, the array is not read.
struct HighBytes {
  const uint8_t* bytes;
  int64_t at, end, count;

  HighBytes(const gearbx_exact& m, int64_t row)
      : bytes(m.high), at(m.offsets[row]), end(m.offsets[row + 1]), count(m.count) {
    if (at <= end && end <= count) return;
    at = 1, end = count = 0;
  }
  bool sufficed() const { return at <= end; }
  uint8_t next() {
    const int64_t i = at++;
    return i < count ? bytes[i] : 0;
  }
};

// The next bytes of a row, 32 at least; uses `copy` at the end of the array.
inline const uint8_t* next_high(const HighBytes& high, uint8_t copy[32]) {
  if (high.at + 32 <= high.count) return high.bytes + high.at;
  const int64_t left = high.at < high.count ? high.count - high.at : 0;
  for (int i = 0; i < 32; i++) copy[i] = i < left ? high.bytes[high.at + i] : 0;
  return copy;
}

// For each set of eight positions: the index of the next byte for each position, or 128 for none.
struct Places {
  alignas(8) uint8_t of[256][8];
  constexpr Places() : of() {
    for (int set = 0; set < 256; set++)
      for (int i = 0, next = 0; i < 8; i++) of[set][i] = static_cast<uint8_t>(set >> i & 1 ? next++ : 128);
  }
};
inline constexpr Places PLACES;

// The size of a set: a load replaces several instructions that count bits.
struct Counts {
  uint8_t of[256];
  constexpr Counts() : of() {
    for (int set = 0; set < 256; set++) of[set] = static_cast<uint8_t>(__builtin_popcount(static_cast<unsigned>(set)));
  }
};
inline constexpr Counts COUNTS;

// 32 consecutive decoded weights of a row: bf16 with AVX-512 and AVX2, otherwise floats. multiply_add adds their
// products with activations to the sums of a row, as for dense bf16 (tile.h); join_sums brings these into one register.
#if defined(GEARBX_AVX512)
struct Weights32 {
  __m512i words;

  explicit Weights32(__m512i words) : words(words) {}
  Weights32(__m256i first, __m256i second) : words(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)) {}
  GEARBX_INLINE F16 half(int i) const {
    const __m256i own = i ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(own), 16));
  }
};
typedef Bf16 Decoded;
GEARBX_INLINE void store(Bf16* p, const Weights32& w) { _mm512_storeu_si512(p, w.words); }
#elif defined(GEARBX_AVX2)
struct Weights32 {
  __m256i words[2];

  Weights32(__m256i first, __m256i second) : words{first, second} {}
};
typedef Bf16 Decoded;
GEARBX_INLINE void store(Bf16* p, const Weights32& w) {
  for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * i), w.words[i]);
}
#else
struct Weights32 {
  F16 halves[2];

  Weights32(F16 first, F16 second) : halves{first, second} {}
  GEARBX_INLINE F16 half(int i) const { return halves[i]; }
};
#ifdef GEARBX_TILES
typedef Bf16 Decoded;
#else
typedef float Decoded;
#endif
inline void store(Bf16* p, const Weights32& w) {
  uint32_t bits[32];
  store16(reinterpret_cast<float*>(bits), w.half(0));
  store16(reinterpret_cast<float*>(bits) + 16, w.half(1));
  for (int i = 0; i < 32; i++) p[i].bits = static_cast<uint16_t>(bits[i] >> 16);
}
GEARBX_INLINE void store(float* p, const Weights32& w) {
  store16(p, w.half(0));
  store16(p + 16, w.half(1));
}
#endif

#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
typedef F8 SumsOfRow;
GEARBX_INLINE F8 multiply_add(const Weights32& w, const Split* x, F8 sums) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  for (int i = 0; i < 2; i++) {
    const F8 even = _mm256_castsi256_ps(_mm256_slli_epi32(w.words[i], 16));
    const F8 odd = _mm256_castsi256_ps(_mm256_and_si256(w.words[i], upper));
    sums = multiply_add8(even, load8(&x[16 * i].value), sums);
    sums = multiply_add8(odd, load8(&x[16 * i + 8].value), sums);
  }
  return sums;
}
#else
typedef F16 SumsOfRow;
GEARBX_INLINE F16 multiply_add(const Weights32& w, const float* x, F16 sums) {
  return multiply_add16(w.half(1), load16(x + 16), multiply_add16(w.half(0), load16(x), sums));
}
#endif
inline EvenOdd join_sums(F16 sums) { return in_halves(sums); }
inline EvenOdd join_sums(F8 sums) { return {sums, zero8()}; }
#ifdef GEARBX_PAIRS
GEARBX_INLINE F16 multiply_add(const Weights32& w, const Bf16* x, F16 sums) {
  return multiply_add_pairs(w.words, load32(x), sums);
}
#endif

constexpr int64_t AHEAD_OF_ROW = 1024;  // distance of the prefetch, in weights

// A matrix, or some rows of one, whose codes are row by row. `ahead`: memory to prefetch while the codes at the same
// distance from `codes` are decoded.
struct ByRow : gearbx_exact {
  int64_t groups;  // of a row
  const uint8_t* ahead;

  explicit ByRow(const gearbx_exact& m) : gearbx_exact(m), groups(columns / group), ahead(codes + AHEAD_OF_ROW / 2) {}
};

// One row of a matrix.
struct ExactRow {
  const uint8_t *codes, *ahead, *low;
  const uint16_t *scales, *biases;
  int64_t columns;
  HighBytes high;

  ExactRow(const ByRow& m, int64_t row)
      : codes(m.codes + row * (m.columns / 2)),
        ahead(m.ahead + row * (m.columns / 2)),
        low(m.low + row * m.columns),
        scales(m.scales + row * m.groups),
        biases(m.biases + row * m.groups),
        columns(m.columns),
        high(m, row) {}
};

}  // namespace gearbx
