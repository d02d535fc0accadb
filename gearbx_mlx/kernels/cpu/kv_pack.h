// Keys or values to nested planes, with the arithmetic of formats/kv_planes.py.

#pragma once

#include <cmath>
#include <cstring>
#include <utility>

#include "kv_planes.h"

namespace gearbx {

// Where the planes of vectors go, one vector after the other. `fine` is NULL where there is one plane.
struct PackedKV {
  uint32_t *coarse, *fine;
  float *scales, *offsets;
};

constexpr int64_t AT_ONCE = 32;  // codes, of one byte each before they become words

// NaN if x is.
inline float larger_or_nan(float x, float least) { return x < least ? least : x; }

// The least and the greatest of some numbers, at least 8 of them; NaN both if one of them is.
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

// The codes of some numbers, 0 for NaN. Behind 2^23 there are whole numbers alone: a sum rounds to them, halves to even.
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

// The lower halves of eight bytes, the first one in the lowest bits.
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
