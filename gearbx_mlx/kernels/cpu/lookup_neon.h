// Lookup tables of fp16 entries (lookup.h) of a 64-bit ARM, whose instructions look up bytes among 16, 32 or 64.

#pragma once

#include "codes.h"

namespace gearbx {

// Eight dwords.
struct Words {
  uint32x4_t half[2];
};

inline Words operator|(Words a, Words b) {
  return {{vorrq_u32(a.half[0], b.half[0]), vorrq_u32(a.half[1], b.half[1])}};
}

inline Words words_of(Bytes32 codes) {
  return {{vreinterpretq_u32_u8(codes.half[0]), vreinterpretq_u32_u8(codes.half[1])}};
}
inline Bytes32 bytes_of(Words words) {
  return {{vreinterpretq_u8_u32(words.half[0]), vreinterpretq_u8_u32(words.half[1])}};
}

// Each dword shifted up, or down if `up` is negative.
inline Words shifted(Words words, int up) {
  const int32x4_t by = vdupq_n_s32(up);
  return {{vshlq_u32(words.half[0], by), vshlq_u32(words.half[1], by)}};
}
inline Words masked(Words words, int up, uint32_t mask) {
  const Words moved = up ? shifted(words, up) : words;
  return {{vandq_u32(moved.half[0], vdupq_n_u32(mask)), vandq_u32(moved.half[1], vdupq_n_u32(mask))}};
}

// Eight words; after the first `count`, zeros without reading memory.
inline Words load_words(const uint32_t* p, int64_t count) {
  if (count >= 8) return {{vld1q_u32(p), vld1q_u32(p + 4)}};
  uint32_t some[8] = {};
  if (count > 0) std::memcpy(some, p, static_cast<size_t>(count) * 4);
  return {{vld1q_u32(some), vld1q_u32(some + 4)}};
}

// Four or eight entries, looked up by the lowest bits of dwords: two bytes of each entry, one after the other.
template <int B>
struct FloatTable {
  static_assert(B == 2 || B == 3);
  uint8x16_t entries;

  explicit FloatTable(const uint16_t* halves) {
    const uint16x4_t first = vld1_u16(halves);
    entries = vreinterpretq_u8_u16(vcombine_u16(first, B == 3 ? vld1_u16(halves + 4) : first));
  }

  F8 operator[](Words dwords) const {
    const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(dwords.half[0]), vreinterpretq_u16_u32(dwords.half[1]));
    const uint16x8_t codes = vandq_u16(low, vdupq_n_u16((1u << B) - 1));
    const uint8x16_t bytes = vreinterpretq_u8_u16(vmlaq_n_u16(vdupq_n_u16(0x0100), codes, 0x0202));
    return fp16_to_floats(vreinterpretq_u16_u8(vqtbl1q_u8(entries, bytes)));
  }
};

// Sixteen entries or more as low bytes and high bytes.
template <int B>
struct HalfTable {
  static constexpr int PARTS = 1 << (B - 4);
  uint8x16_t low[PARTS], high[PARTS];

  explicit HalfTable(const uint16_t* halves) {
    for (int p = 0; p < PARTS; p++) {
      const uint8x16x2_t apart = vld2q_u8(reinterpret_cast<const uint8_t*>(halves + 16 * p));
      low[p] = apart.val[0];
      high[p] = apart.val[1];
    }
  }

  // Looks up 32 codes below 2^B; the floats have the order of the bytes.
  void pick(Bytes32 codes, F8 out[4]) const {
    for (int i = 0; i < 2; i++) {
      const uint8x16_t lows = among(low, codes.half[i]), highs = among(high, codes.half[i]);
      out[2 * i] = fp16_to_floats(vreinterpretq_u16_u8(vzip1q_u8(lows, highs)));
      out[2 * i + 1] = fp16_to_floats(vreinterpretq_u16_u8(vzip2q_u8(lows, highs)));
    }
  }
  void pick(Words codes, F8 out[4]) const { pick(bytes_of(codes), out); }

 private:
  static uint8x16_t among(const uint8x16_t* parts, uint8x16_t codes) {
    if constexpr (B == 4) return vqtbl1q_u8(parts[0], codes);
    if constexpr (B == 5) return vqtbl2q_u8({{parts[0], parts[1]}}, codes);
    if constexpr (B == 6) return vqtbl4q_u8({{parts[0], parts[1], parts[2], parts[3]}}, codes);
  }
};

}  // namespace gearbx
