// Keys or values as nested planes (formats/kv_planes.py): the vectors of some positions, from 4 or 8 bits to float32.

#pragma once

#include <algorithm>

#include "attention.h"
#include "lanes.h"

namespace gearbx {

constexpr int64_t CODES = 8;  // of 4 bits in a word

// LANES codes from number i on, which is a multiple of LANES, in the lowest bits; above them are further codes.
GEARBX_INLINE Ints words_at(const uint32_t* words, int64_t i) {
  Ints shifts;
  for (int lane = 0; lane < LANES; lane++) shifts[lane] = static_cast<uint32_t>(lane % CODES * 4);
#ifdef GEARBX_AVX512
  const __m512i two = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words + i / CODES)));
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const Ints spread = reinterpret_cast<Ints>(_mm512_permutexvar_epi32(which, two));
#else
  const Ints spread = Ints{} + (words[i / CODES] >> i % CODES * 4);  // eight lanes begin a word, four begin half of one
#endif
  return spread >> shifts;
}
GEARBX_INLINE Ints codes_at(const uint32_t* words, int64_t i) { return words_at(words, i) & (Ints{} + 15); }

// Small whole numbers as floats: behind 2^23 the lowest bits of a float count ones.
GEARBX_INLINE Floats whole(Ints codes) { return as_floats(codes | (Ints{} + 0x4b000000u)) - all(8388608.0f); }

// The numbers of one group, or of a part of it: step times code plus the least number.
struct Steps {
  float step, least;
  Steps(float scale, float offset, bool refined)
      : step(refined ? scale * 0.0625f : scale), least(refined ? offset - scale * 0.46875f : offset) {}
};

// The numbers of all sixteen codes of a coarse plane, by which one instruction turns codes into numbers.
#ifdef GEARBX_AVX512
GEARBX_INLINE Floats numbers_of(Floats step, Floats least) {
  const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return multiply_add(step, _mm512_cvtepi32_ps(codes), least);
}
GEARBX_INLINE Floats chosen(Floats numbers, Ints words) {  // reads the lowest four bits of each word alone
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words), numbers);
}
#endif

// Unpacks groups one after the other, of positions that follow each other, into numbers that do so too.
template <bool REFINED>
void unpack_groups(const gearbx_kv_planes& from, int64_t first, int64_t groups, float* to) {
  const int64_t size = from.group, before = first * size / CODES;
  const uint32_t *coarse = from.coarse + before, *fine = REFINED ? from.fine + before : nullptr;
  const float *scales = from.scales + first, *offsets = from.offsets + first;
  for (int64_t g = 0; g < groups; g++) {
    const Steps steps(scales[g], offsets[g], REFINED);
    const Floats step = all(steps.step), least = all(steps.least);
    int64_t i = g * size;
    const int64_t end = i + size;
#ifdef GEARBX_AVX512
    if constexpr (!REFINED) {
      const Floats numbers = numbers_of(step, least);
      for (; i + LANES <= end; i += LANES) store(to + i, chosen(numbers, words_at(coarse, i)));
    }
#endif
    for (; i + LANES <= end; i += LANES) {
      Ints codes = codes_at(coarse, i);
      if constexpr (REFINED) codes = codes << 4 | codes_at(fine, i);
      store(to + i, multiply_add(step, whole(codes), least));
    }
    for (; i < end; i++) {  // groups of fewer numbers than there are lanes
      uint32_t code = coarse[i / CODES] >> i % CODES * 4 & 15;
      if constexpr (REFINED) code = code << 4 | (fine[i / CODES] >> i % CODES * 4 & 15);
      to[i] = __builtin_fmaf(steps.step, static_cast<float>(code), steps.least);
    }
  }
}

inline void unpack_groups(const gearbx_kv_planes& from, int64_t first, int64_t groups, float* to) {
  from.fine ? unpack_groups<true>(from, first, groups, to) : unpack_groups<false>(from, first, groups, to);
}

// Unpacks `count` vectors of `width` numbers, of a key head's positions from `first` on, into rows of `wide` numbers
// with zeros at their ends. head: of batch and key head, counted through.
inline void unpack_vectors(const gearbx_kv_planes& from, int64_t head, int64_t first, int64_t count, int64_t width,
                           int64_t wide, float* to) {
  const int64_t groups = width / from.group, begin = (head * from.capacity + first) * groups;
  if (width == wide) return unpack_groups(from, begin, count * groups, to);
  for (int64_t i = 0; i < count; i++, to += wide) {
    unpack_groups(from, begin + i * groups, groups, to);
    std::fill_n(to + width, wide - width, 0.0f);
  }
}

}  // namespace gearbx
