// Tables of floats, looked up by the lowest bits of eight words side by side.

#pragma once

#include "codes.h"

namespace gearbx {

constexpr int LANES = 8;

inline float half_to_float(uint16_t half) {
#ifdef GEARBX_AVX2
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
  return fp16_to_float(half);
#endif
}

#ifdef GEARBX_AVX2

typedef __m256i Words8;

inline Words8 load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// The first `count` words; zeros for the others, which are not read.
inline Words8 load_words(const uint32_t* p, int count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
}

inline Words8 as_words(Bytes32 bytes) { return bytes; }
inline Words8 shift_down(Words8 words, int count) { return _mm256_srli_epi32(words, count); }

// Of 2^B entries: a permutation picks among eight by three bits, and each further bit chooses between two halves.
// Higher bits of an index do not matter; of four entries there are two copies, so that the third bit does not either.
template <int B>
struct Table {
  static constexpr int PARTS = B > 3 ? 1 << (B - 3) : 1;
  F8 parts[PARTS];

  explicit Table(const float* entries) {
    for (int p = 0; p < PARTS; p++)
      parts[p] = B == 2 ? _mm256_broadcast_ps(reinterpret_cast<const __m128*>(entries)) : load8(entries + 8 * p);
  }

  F8 operator[](Words8 index) const { return among<B>(parts, index); }

 private:
  template <int C>
  static F8 among(const F8* parts, Words8 index) {
    if constexpr (C <= 3) {
      return _mm256_permutevar8x32_ps(parts[0], index);
#ifdef __AVX512VL__
    } else if constexpr (C == 4) {
      return _mm256_permutex2var_ps(parts[0], index, parts[1]);
#endif
    } else {
      const F8 choice = _mm256_castsi256_ps(_mm256_slli_epi32(index, 32 - C));
      return _mm256_blendv_ps(among<C - 1>(parts, index), among<C - 1>(parts + (1 << (C - 4)), index), choice);
    }
  }
};

inline F8 gather8(const float* x, const uint16_t* columns) {
  const __m256i index = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
  return _mm256_i32gather_ps(x, index, 4);
}

#else

struct Words8 {
  uint32_t lane[LANES];
};

inline Words8 load_words(const uint32_t* p, int count = LANES) {
  Words8 words = {};
  std::memcpy(&words, p, static_cast<size_t>(count) * 4);
  return words;
}

inline Words8 as_words(Bytes32 bytes) {
  Words8 words;
  for (int l = 0; l < LANES; l++) {
    const uint8_t* b = bytes.byte + 4 * l;
    words.lane[l] = b[0] | b[1] << 8 | b[2] << 16 | static_cast<uint32_t>(b[3]) << 24;
  }
  return words;
}

inline Words8 shift_down(Words8 words, int count) {
  for (uint32_t& lane : words.lane) lane >>= count;
  return words;
}

template <int B>
struct Table {
  float entries[1 << B];

  explicit Table(const float* from) { std::memcpy(entries, from, sizeof entries); }

  F8 operator[](Words8 index) const {
    F8 found;
    for (int l = 0; l < LANES; l++) found[l] = entries[index.lane[l] & ((1u << B) - 1)];
    return found;
  }
};

inline F8 gather8(const float* x, const uint16_t* columns) {
  F8 found;
  for (int l = 0; l < LANES; l++) found[l] = x[columns[l]];
  return found;
}

#endif

// 2^B fp16 values to floats; four at least.
template <int B>
inline void widen_entries(const uint16_t* halves, float* out) {
  if constexpr (B == 2)
    for (int i = 0; i < 4; i++) out[i] = half_to_float(halves[i]);
  else
    for (int i = 0; i < 1 << B; i += 8) store8(out + i, load8_fp16(halves + i));
}

}  // namespace gearbx
