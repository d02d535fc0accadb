// Keys or values as nested planes (formats/kv_planes.py): the vectors of some positions, from 4 or 8 bits to float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention.h"
#include "lanes.h"

namespace gearbx {

constexpr int64_t CODES = 8;  // of 4 bits in a word

// LANES codes from number i on, which is a multiple of LANES.
GEARBX_INLINE Ints codes_at(const uint32_t* words, int64_t i) {
  Ints shifts;
  for (int lane = 0; lane < LANES; lane++) shifts[lane] = static_cast<uint32_t>(lane % CODES * 4);
#ifdef GEARBX_AVX512
  const __m512i two = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words + i / CODES)));
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const Ints spread = reinterpret_cast<Ints>(_mm512_permutexvar_epi32(which, two));
#else
  const Ints spread = Ints{} + (words[i / CODES] >> i % CODES * 4);  // eight lanes begin a word, four begin half of one
#endif
  return (spread >> shifts) & (Ints{} + 15);
}

// Small whole numbers as floats: behind 2^23 the lowest bits of a float count ones.
GEARBX_INLINE Floats whole(Ints codes) { return as_floats(codes | (Ints{} + 0x4b000000u)) - all(8388608.0f); }

// The numbers of one group, or of a part of it: step times code plus the least number.
struct Steps {
  float step, least;
  Steps(float scale, float offset, bool refined)
      : step(refined ? scale * 0.0625f : scale), least(refined ? offset - scale * 0.46875f : offset) {}
};

template <bool REFINED>
void unpack_vector(const gearbx_kv_planes& from, int64_t position, int64_t width, float* to) {
  const int64_t words = width / CODES, groups = width / from.group;
  const uint32_t *coarse = from.coarse + position * words, *fine = REFINED ? from.fine + position * words : nullptr;
  const float *scales = from.scales + position * groups, *offsets = from.offsets + position * groups;
  for (int64_t g = 0; g < groups; g++) {
    const Steps steps(scales[g], offsets[g], REFINED);
    const Floats step = all(steps.step), least = all(steps.least);
    int64_t i = g * from.group;
    const int64_t end = i + from.group;
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

// Unpacks `count` vectors of `width` numbers, of a key head's positions from `first` on, into rows of `wide` numbers
// with zeros at their ends. head: of batch and key head, counted through.
inline void unpack_vectors(const gearbx_kv_planes& from, int64_t head, int64_t first, int64_t count, int64_t width,
                           int64_t wide, float* to) {
  for (int64_t i = 0; i < count; i++, to += wide) {
    const int64_t position = head * from.capacity + first + i;
    from.fine ? unpack_vector<true>(from, position, width, to) : unpack_vector<false>(from, position, width, to);
    std::fill_n(to + width, wide - width, 0.0f);
  }
}

// NaN if x is.
inline float larger_or_nan(float x, float least) { return x < least ? least : x; }

// The least and the greatest of some numbers; NaN both if one of them is.
inline std::pair<float, float> range_of(const float* x, int64_t count) {
  float low = x[0], high = x[0], nan = 0.0f;
  for (int64_t i = 0; i < count; i++) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
    if (std::isnan(x[i])) nan = x[i];
  }
  return {low + nan, high + nan};
}

// Packs `count` vectors of `width` numbers one after the other, with the arithmetic of formats/kv_planes.py. `fine` is
// NULL where there is one plane.
inline void pack_vectors(const float* from, int64_t count, int64_t width, int64_t group, uint32_t* coarse,
                         uint32_t* fine, float* scales, float* offsets) {
  const float most = fine ? 255.0f : 15.0f, refined = fine ? 16.0f : 1.0f;
  std::fill_n(coarse, count * width / CODES, 0u);
  if (fine) std::fill_n(fine, count * width / CODES, 0u);
  for (int64_t g = 0; g < count * width / group; g++) {
    const float* x = from + g * group;
    const auto [low, high] = range_of(x, group);
    scales[g] = larger_or_nan((high - low) / most * refined, 0x1p-100f);
    offsets[g] = low + scales[g] * (1.0f / refined) * (refined - 1.0f) / 2.0f;
    const Steps steps(scales[g], offsets[g], fine != nullptr);
    for (int64_t i = 0; i < group; i++) {
      const float place = std::nearbyintf((x[i] - steps.least) / steps.step), inside = place > 0.0f ? place : 0.0f;
      const auto code = static_cast<uint32_t>(std::min(inside, most));  // 0 for NaN
      const int64_t at = g * group + i, word = at / CODES, shift = at % CODES * 4;
      coarse[word] |= (fine ? code >> 4 : code) << shift;
      if (fine) fine[word] |= (code & 15) << shift;
    }
  }
}

}  // namespace gearbx
