// Blocks of 32 codes (codes.h) in two registers of a 64-bit ARM, whose tables of bytes put every code's bits in place.

#pragma once

#include "simd.h"

namespace gearbx {

struct Bytes32 {
  uint8x16_t half[2];
};

// Where half of a block, 16 codes or 2 * W bytes, lies in a table of 16 bytes. A code is the byte in which it begins,
// shifted down, and the next byte, shifted up; beyond the table a byte is 0. `first` belongs to the first and second half.
template <int W>
struct Windows {
  static constexpr int LOADED = W == 1 ? 4 : W < 4 ? 8 : 16;  // bytes
  static constexpr int SECOND = 4 * W - LOADED;               // where those for the second half begin
  uint8_t first[2][16];
  int8_t down[2][16], up[2][16];

  constexpr Windows() : first(), down(), up() {
    for (int half = 0; half < 2; half++)
      for (int code = 0; code < 16; code++) {
        const int bit = (16 * half + code) * W;
        first[half][code] = static_cast<uint8_t>(bit / 8 - half * SECOND);
        down[half][code] = static_cast<int8_t>(-(bit % 8));
        up[half][code] = static_cast<int8_t>(8 - bit % 8);
      }
  }
};

// The first `count` bytes, and zeros.
template <int COUNT>
GEARBX_INLINE uint8x16_t load_bytes(const uint8_t* p) {
  if constexpr (COUNT == 16) return vld1q_u8(p);
  if constexpr (COUNT == 8) return vcombine_u8(vld1_u8(p), vdup_n_u8(0));
  static_assert(COUNT == 16 || COUNT == 8 || COUNT == 4);
  uint32_t word;
  std::memcpy(&word, p, 4);
  return vreinterpretq_u8_u32(vsetq_lane_u32(word, vdupq_n_u32(0), 0));
}

template <int W>
GEARBX_INLINE Bytes32 unpack(const uint8_t* p) {
  static constexpr Windows<W> windows;
  Bytes32 codes;
  const uint8x16_t packed[2] = {load_bytes<windows.LOADED>(p), load_bytes<windows.LOADED>(p + windows.SECOND)};
  for (int half = 0; half < 2; half++) {
    const uint8x16_t first = vld1q_u8(windows.first[half]);
    uint8x16_t bits = vshlq_u8(vqtbl1q_u8(packed[half], first), vld1q_s8(windows.down[half]));
    if constexpr (8 % W) {
      const uint8x16_t next = vqtbl1q_u8(packed[half], vaddq_u8(first, vdupq_n_u8(1)));
      bits = vorrq_u8(bits, vshlq_u8(next, vld1q_s8(windows.up[half])));
    }
    codes.half[half] = vandq_u8(bits, vdupq_n_u8((1u << W) - 1));
  }
  return codes;
}

template <>
GEARBX_INLINE Bytes32 unpack<8>(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16)}};
}

template <>
GEARBX_INLINE Bytes32 unpack<4>(const uint8_t* p) {
  const uint8x16_t pairs = vld1q_u8(p), low = vandq_u8(pairs, vdupq_n_u8(15)), high = vshrq_n_u8(pairs, 4);
  return {{vzip1q_u8(low, high), vzip2q_u8(low, high)}};
}

inline Bytes32 append_plane(Bytes32 above, Bytes32 below, int width) {
  const int8x16_t up = vdupq_n_s8(static_cast<int8_t>(width));
  for (int i = 0; i < 2; i++) above.half[i] = vorrq_u8(vshlq_u8(above.half[i], up), below.half[i]);
  return above;
}

inline Bytes32 flip_signs(Bytes32 codes) {
  for (uint8x16_t& half : codes.half) half = veorq_u8(half, vdupq_n_u8(0x80));
  return codes;
}

// Byte K of each dword, in its place, as a number; the last byte is shifted down.
template <int K>
GEARBX_INLINE F8 floats_at(Bytes32 codes) {
  const auto four = [](uint8x16_t half) {
    const uint32x4_t dwords = vreinterpretq_u32_u8(half);
    return vcvtq_f32_u32(K == 3 ? vshrq_n_u32(dwords, 24) : vandq_u32(dwords, vdupq_n_u32(0xffu << 8 * K)));
  };
  return {four(codes.half[0]), four(codes.half[1])};
}

inline void to_floats(Bytes32 codes, F8 out[4]) {
  out[0] = floats_at<0>(codes);
  out[1] = floats_at<1>(codes);
  out[2] = floats_at<2>(codes);
  out[3] = floats_at<3>(codes);
}

}  // namespace gearbx
