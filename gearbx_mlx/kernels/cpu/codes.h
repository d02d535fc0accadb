// Unpacks a block of 32 codes to 32 floats, for every width of MLX's packing: a little-endian bit stream, 4 * width
// bytes per block.
//
// A block first becomes one byte per code. Planes are combined as bytes (codes have at most 8 bits) and only then
// become floats, so that a stack costs little more than one plane. Byte k of dword l is masked in place and not shifted
// down: lane l of register k is code 4 l + k times PLACE[k]. Activations have that order, and are divided by the same
// powers of two, once for all rows (stack.cpp). No byte beyond the block is read.

#pragma once

#include "simd.h"

#ifdef GEARBX_NEON

// Blocks of 32 codes (codes.h) in two registers of a 64-bit ARM, whose tables of bytes put every code's bits in place.
namespace gearbx {

struct Bytes32 {
  uint8x16_t half[2];
};

// The bytes of half a block, 16 codes or 2 * W bytes, in a table of 16 bytes. A code is its first byte, shifted down,
// and the next byte, shifted up; beyond the table a byte is 0. `first` is for the first and second half.
template <int W>
struct Windows {
  static constexpr int LOADED = W == 1 ? 4 : W < 4 ? 8 : 16;  // bytes
  static constexpr int SECOND = 4 * W - LOADED;               // start of the bytes for the second half
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

#endif

namespace gearbx {

constexpr int BLOCK = 32;
// The last byte of a dword is shifted down: in place, its highest bit would be a sign.
constexpr float PLACE[4] = {1.0f, 256.0f, 65536.0f, 1.0f};

#ifdef GEARBX_AVX2

typedef __m256i Bytes32;

inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i load8_bytes(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

// Unpacks widths that do not divide a byte. The two bytes around each code become a 16-bit value, a multiplication
// moves the code to its top, and a shift moves it down. Half a block is 2 * W bytes. One load of 16 or 8 bytes
// contains them; the load for the second half ends at the end of the block. The byte after the last code has no effect.
template <int W>
struct Windows {
  static constexpr int LOADED = 2 * W < 8 ? 8 : 16, SECOND = 4 * W - LOADED;
  alignas(32) uint8_t bytes[2][32];
  alignas(32) uint16_t factors[16];

  constexpr Windows() : bytes(), factors() {
    for (int half = 0; half < 2; half++)
      for (int code = 0; code < 16; code++) {
        const int bit = (16 * half + code) * W, first = bit / 8 - half * SECOND, at = 16 * half + 2 * (code % 8);
        bytes[code / 8][at] = static_cast<uint8_t>(first);
        bytes[code / 8][at + 1] = static_cast<uint8_t>(first + 1 < 16 ? first + 1 : 0x80);
        factors[8 * half + code % 8] = static_cast<uint16_t>(1u << (16 - W - bit % 8));
      }
  }
};

template <int W>
inline Bytes32 unpack(const uint8_t* p) {
  static constexpr Windows<W> windows;
  constexpr bool wide = Windows<W>::LOADED == 16;
  const uint8_t* second = p + Windows<W>::SECOND;
  const __m256i packed =
      wide ? _mm256_set_m128i(load16(second), load16(p)) : _mm256_set_m128i(load8_bytes(second), load8_bytes(p));
  const __m256i factors = _mm256_load_si256(reinterpret_cast<const __m256i*>(windows.factors));
  __m256i codes[2];  // of the first and third quarter, of the second and fourth
  for (int i = 0; i < 2; i++) {
    const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(windows.bytes[i]));
    codes[i] = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(packed, places), factors), 16 - W);
  }
  return _mm256_packus_epi16(codes[0], codes[1]);
}

template <>
inline Bytes32 unpack<8>(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

template <>
inline Bytes32 unpack<4>(const uint8_t* p) {
  const __m256i pairs = _mm256_cvtepu8_epi16(load16(p));
  return _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
}

template <>
inline Bytes32 unpack<2>(const uint8_t* p) {
  const __m256i fours = _mm256_cvtepu8_epi32(load8_bytes(p));
  const __m256i twos = _mm256_or_si256(fours, _mm256_slli_epi32(fours, 6));
  return _mm256_and_si256(_mm256_or_si256(twos, _mm256_slli_epi32(twos, 12)), _mm256_set1_epi8(3));
}

template <>
inline Bytes32 unpack<1>(const uint8_t* p) {
  int word;
  std::memcpy(&word, p, 4);
  const __m256i repeat = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                          2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), repeat), bit);
  return _mm256_min_epu8(bits, _mm256_set1_epi8(1));
}

// Appends the bits of a lower plane. Codes stay below 2^8, so that no bit moves from one byte into the next.
inline Bytes32 append_plane(Bytes32 above, Bytes32 below, int width) {
  return _mm256_or_si256(_mm256_sll_epi32(above, _mm_cvtsi32_si128(width)), below);
}

inline Bytes32 flip_signs(Bytes32 codes) { return _mm256_xor_si256(codes, _mm256_set1_epi8(-128)); }

inline void to_floats(Bytes32 codes, F8 out[4]) {
  out[0] = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(0xff)));
  out[1] = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(0xff00)));
  out[2] = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(0xff0000)));
  out[3] = _mm256_cvtepi32_ps(_mm256_srli_epi32(codes, 24));
}

#elif !defined(GEARBX_NEON)

struct Bytes32 {
  uint8_t byte[BLOCK];
};

template <int W>
inline Bytes32 unpack(const uint8_t* p) {
  Bytes32 codes;
  for (int i = 0; i < BLOCK; i++) {
    const int bit = i * W;
    unsigned around = p[bit / 8];
    if (bit % 8 + W > 8) around |= static_cast<unsigned>(p[bit / 8 + 1]) << 8;
    codes.byte[i] = static_cast<uint8_t>((around >> bit % 8) & ((1u << W) - 1));
  }
  return codes;
}

inline Bytes32 append_plane(Bytes32 above, Bytes32 below, int width) {
  for (int i = 0; i < BLOCK; i++) above.byte[i] = static_cast<uint8_t>(above.byte[i] << width | below.byte[i]);
  return above;
}

inline Bytes32 flip_signs(Bytes32 codes) {
  for (int i = 0; i < BLOCK; i++) codes.byte[i] = static_cast<uint8_t>(codes.byte[i] ^ 0x80);
  return codes;
}

inline void to_floats(Bytes32 codes, F8 out[4]) {
  for (int k = 0; k < 4; k++)
    for (int l = 0; l < 8; l++) out[k][l] = static_cast<float>(codes.byte[4 * l + k]) * PLACE[k];
}

#endif

inline Bytes32 unpack(int width, const uint8_t* p) {
  switch (width) {
    case 1: return unpack<1>(p);
    case 2: return unpack<2>(p);
    case 3: return unpack<3>(p);
    case 4: return unpack<4>(p);
    case 5: return unpack<5>(p);
    case 6: return unpack<6>(p);
    default: return unpack<8>(p);
  }
}

}  // namespace gearbx
