// Decodes rows 32 weights at a time, with tables of bytes: NEON, or loops for every other processor.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

// The prediction of a group's codes: the bytes of the first neighbor, and 255 in the zero cell.
struct alignas(32) Meanings {
  uint8_t low[16], high[16], zero[16];

#ifdef GEARBX_NEON
  GEARBX_INLINE void find(float scale, float bias) {
    constexpr float CODES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float32x4_t bound = vdupq_n_f32((scale < 0 ? -scale : scale) * 0.5f);
    uint16x4_t first[4], far[4];
    for (int i = 0; i < 4; i++) {
      const float32x4_t v = vaddq_f32(vmulq_n_f32(vld1q_f32(CODES + 4 * i), scale), vdupq_n_f32(bias));
      first[i] = vshrn_n_u32(vsubq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(WINDOW << 16)), 16);
      far[i] = vmovn_u32(vcgtq_f32(vabsq_f32(v), bound));
    }
    for (int i = 0; i < 2; i++) {
      const uint16x8_t words = vcombine_u16(first[2 * i], first[2 * i + 1]);
      vst1_u8(low + 8 * i, vmovn_u16(words));
      vst1_u8(high + 8 * i, vshrn_n_u16(words, 8));
      vst1_u8(zero + 8 * i, vmvn_u8(vmovn_u16(vcombine_u16(far[2 * i], far[2 * i + 1]))));
    }
  }
#else
  GEARBX_INLINE void find(float scale, float bias) {
    const float bound = (scale < 0 ? -scale : scale) * 0.5f;
    for (int q = 0; q < 16; q++) {
      const float v = scale * static_cast<float>(q) + bias;
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      const uint32_t first = (bits >> 16) - WINDOW;
      low[q] = static_cast<uint8_t>(first);
      high[q] = static_cast<uint8_t>(first >> 8);
      zero[q] = (v < 0 ? -v : v) > bound ? 0 : 255;
    }
  }
#endif
};

#ifdef GEARBX_NEON

GEARBX_INLINE Weights32 decode(const Meanings& m, const Bytes32& codes, const uint8_t* stored, HighBytes& row) {
  const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8_t copy[32];
  F16 weights[2];
  for (int i = 0; i < 32; i += 16) {
    const uint8x16_t code = codes.half[i / 16], low = vld1q_u8(stored + i);
    const uint8x16_t wraps = vcltq_u8(low, vqtbl1q_u8(vld1q_u8(m.low), code));
    const uint8x16_t far = vsubq_u8(vqtbl1q_u8(vld1q_u8(m.high), code), wraps);
    const uint8x16_t zero = vqtbl1q_u8(vld1q_u8(m.zero), code);
    uint8x16_t sets = vandq_u8(zero, bit);
    for (int step = 0; step < 3; step++) sets = vpaddq_u8(sets, sets);  // neighbors, until each byte is a set
    const unsigned both = vgetq_lane_u16(vreinterpretq_u16_u8(sets), 0), first = both & 255, second = both >> 8;
    const uint8_t* next = next_high(row, copy);
    const int of_first = COUNTS.of[first];
    const uint8x16_t bytes = vcombine_u8(vld1_u8(next), vld1_u8(next + of_first));
    const uint8x8_t places = vadd_u8(vld1_u8(PLACES.of[second]), vdup_n_u8(8));
    const uint8x16_t near = vqtbl1q_u8(bytes, vcombine_u8(vld1_u8(PLACES.of[first]), places));
    row.at += of_first + COUNTS.of[second];
    const uint8x16_t high = vbslq_u8(zero, near, far);
    const uint16x8_t words[2] = {vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))};
    weights[i / 16] = join(bf16_to_floats(words[0]), bf16_to_floats(words[1]));
  }
  return {weights[0], weights[1]};
}

#else

GEARBX_INLINE Weights32 decode(const Meanings& m, const Bytes32& codes, const uint8_t* stored, HighBytes& row) {
  uint32_t bits[32];
  for (int i = 0; i < 32; i++) {
    const int code = codes.byte[i];
    const uint32_t low = stored[i], far = m.high[code] + (low < m.low[code]);
    bits[i] = (m.zero[code] ? row.next() : far) << 24 | low << 16;
  }
  float weights[32];
  std::memcpy(weights, bits, sizeof bits);
  return {load16(weights), load16(weights + 16)};
}

#endif

template <int GROUP>
struct Decoder {
  ExactRow& row;
  explicit Decoder(ExactRow& r) : row(r) {}

  // Calls use(column, weights) for each 32 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each32(Use use) {
    Meanings m;
    for (int64_t group = 0; group < row.columns / GROUP; group++) {
      m.find(bf16_to_float(row.scales[group]), bf16_to_float(row.biases[group]));
      for (int64_t column = group * GROUP; column < (group + 1) * GROUP; column += BLOCK) {
        __builtin_prefetch(row.low + column + AHEAD_OF_ROW);
        use(column, decode(m, unpack<4>(row.codes + column / 2), row.low + column, row.high));
      }
    }
  }
};

}  // namespace gearbx
