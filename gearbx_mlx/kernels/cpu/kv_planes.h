// Keys or values as nested planes (formats/kv_planes.py): the vectors of some positions, from 4 or 8 bits to float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention.h"
#include "lanes.h"

namespace gearbx {

constexpr int64_t CODES = 8;  // 4-bit codes in a word

// LANES codes from number i on, a multiple of LANES, in the lowest bits; the bits above are other codes.
GEARBX_INLINE Ints words_at(const uint32_t* words, int64_t i) {
  Ints shifts;
  for (int lane = 0; lane < LANES; lane++) shifts[lane] = static_cast<uint32_t>(lane % CODES * 4);
#ifdef GEARBX_AVX512
  const __m512i two = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words + i / CODES)));
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const Ints spread = reinterpret_cast<Ints>(_mm512_permutexvar_epi32(which, two));
#else
  const Ints spread = Ints{} + (words[i / CODES] >> i % CODES * 4);  // eight lanes are a word, four are half of one
#endif
  return spread >> shifts;
}
GEARBX_INLINE Ints codes_at(const uint32_t* words, int64_t i) { return words_at(words, i) & (Ints{} + 15); }

// Small integers as floats: behind 2^23, the lowest bits of a float count ones.
GEARBX_INLINE Floats whole(Ints codes) { return as_floats(codes | (Ints{} + 0x4b000000u)) - all(8388608.0f); }

// The numbers of one group, or a part of it: scale times code plus the lowest number.
struct Steps {
  float step, least;
  Steps(float scale, float offset, bool refined)
      : step(refined ? scale * 0.0625f : scale), least(refined ? offset - scale * 0.46875f : offset) {}
};

// The numbers of all sixteen codes of a coarse plane, for lookups by one instruction.
#ifdef GEARBX_AVX512
GEARBX_INLINE Floats numbers_of(Floats step, Floats least) {
  const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return multiply_add(step, _mm512_cvtepi32_ps(codes), least);
}
GEARBX_INLINE Floats chosen(Floats numbers, Ints words) {  // reads only the lowest four bits of each word
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words), numbers);
}
#endif

// Unpacks groups of consecutive positions into consecutive numbers.
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
    for (; i < end; i++) {  // groups of fewer numbers than LANES
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

// Keys or values to nested planes, with the arithmetic of formats/kv_planes.py.

// Memory for the planes of consecutive vectors. `fine` is NULL with one plane.
struct PackedKV {
  uint32_t *coarse, *fine;
  float *scales, *offsets;
};

constexpr int64_t AT_ONCE = 32;  // codes, a byte each before they are packed into words

// NaN if x is.
inline float larger_or_nan(float x, float least) { return x < least ? least : x; }

// The lowest and highest of at least 8 numbers; both NaN if any is NaN.
inline std::pair<float, float> range_of(const float* x, int64_t count) {
  Floats high = all(-INFINITY), low = high;  // low: of -x
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    high = larger(load(x + i), high);
    low = larger(-load(x + i), low);
  }
  if (i < count) {
    high = larger(load_some(x + i, count - i, -INFINITY), high);
    low = larger(-load_some(x + i, count - i, INFINITY), low);
  }
  int none = 0;
  for (i = 0; i < count; i++) none |= x[i] != x[i];
  const float nan = none ? NAN : 0.0f;
  return {-largest(low) + nan, largest(high) + nan};
}

// The codes of some numbers, 0 for NaN. Behind 2^23, all floats are integers: a sum rounds to them, halves to even.
GEARBX_INLINE Ints codes_of(Floats x, Floats step, Floats least, Floats most) {
  const Floats inside = larger((x - least) / step, all(0.0f)), capped = -larger(-inside, -most);
  return as_ints(capped + all(8388608.0f)) & (Ints{} + 255);
}

// At most AT_ONCE codes, a byte each.
inline void encode(const float* x, int64_t count, const Steps& steps, float most, uint8_t* codes) {
  const Floats step = all(steps.step), least = all(steps.least);
  uint32_t wide[AT_ONCE + LANES];
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats some = i + LANES <= count ? load(x + i) : load_some(x + i, count - i, 0.0f);
    const Ints made = codes_of(some, step, least, all(most));
    std::memcpy(wide + i, &made, sizeof made);
  }
  for (int64_t i = 0; i < count; i++) codes[i] = static_cast<uint8_t>(wide[i]);
}

// The lower halves of eight bytes, the first in the lowest bits.
inline uint32_t word_of(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0full;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffull;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffull;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// One vector of `width` numbers.
inline void pack_vector(const float* from, int64_t width, int64_t group, const PackedKV& to) {
  const float most = to.fine ? 255.0f : 15.0f, refined = to.fine ? 16.0f : 1.0f;
  uint8_t codes[AT_ONCE];
  for (int64_t g = 0; g < width / group; g++) {
    const auto [low, high] = range_of(from + g * group, group);
    to.scales[g] = larger_or_nan((high - low) / most * refined, 0x1p-100f);
    to.offsets[g] = low + to.scales[g] * (1.0f / refined) * (refined - 1.0f) / 2.0f;
    const Steps steps(to.scales[g], to.offsets[g], to.fine != nullptr);
    for (int64_t i = g * group, end = i + group; i < end; i += AT_ONCE) {
      const int64_t count = std::min(AT_ONCE, end - i);
      encode(from + i, count, steps, most, codes);
      for (int64_t k = 0; k < count; k += CODES) {
        uint64_t bytes;
        std::memcpy(&bytes, codes + k, sizeof bytes);
        to.coarse[(i + k) / CODES] = word_of(to.fine ? bytes >> 4 : bytes);
        if (to.fine) to.fine[(i + k) / CODES] = word_of(bytes);
      }
    }
  }
}

// Vectors (batch, heads, positions, width), `strides` numbers apart.
struct KVRows {
  const float* first;
  int64_t strides[3], heads, positions, count, width, group;

  const float* at(int64_t i) const {
    const int64_t head = i / positions;
    return first + head / heads * strides[0] + head % heads * strides[1] + i % positions * strides[2];
  }
};

inline void pack_vectors(const KVRows& rows, int64_t first, int64_t end, const PackedKV& to) {
  const int64_t words = rows.width / CODES, groups = rows.width / rows.group;
  for (int64_t i = first; i < end; i++)
    pack_vector(rows.at(i), rows.width, rows.group,
                {to.coarse + i * words, to.fine ? to.fine + i * words : nullptr, to.scales + i * groups,
                 to.offsets + i * groups});
}

}  // namespace gearbx
