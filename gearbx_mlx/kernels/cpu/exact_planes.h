// Decodes rows of planes 4+4 with five low bits, 32 weights at a time. Vectors of GCC and Clang do the arithmetic on
// every processor; the bytes of weights near zero are dealt out one by one where there is no AVX-512.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

typedef uint32_t U8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));  // whose conversion to floats is one instruction
typedef uint8_t Octet __attribute__((vector_size(8)));
typedef float Eight __attribute__((vector_size(32)));

template <class To, class From>
GEARBX_INLINE To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

GEARBX_INLINE U8 widen8(const uint8_t* p) {
#ifdef GEARBX_AVX2
  return bits_as<U8>(_mm256_cvtepu8_epi32(load8_bytes(p)));  // which GCC makes eight conversions of
#else
  Octet bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, U8);
#endif
}

template <int GROUP>
struct Planes32 {
  ExactRow& row;
  explicit Planes32(ExactRow& r) : row(r) {}

  // The row's next bytes for the lanes whose bits are set.
  GEARBX_INLINE U8 deal(U8 lanes) {
    uint8_t copy[32];
    const uint8_t* next = next_high(row.high, copy);
#ifdef GEARBX_AVX512
    const __mmask8 set = _mm256_movepi32_mask(bits_as<__m256i>(lanes));
    row.high.at += __builtin_popcount(set);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next));
    return bits_as<U8>(_mm256_maskz_expand_epi32(set, _mm256_cvtepu8_epi32(bytes)));
#else
    alignas(32) uint32_t set[8], bytes[8];
    std::memcpy(set, &lanes, sizeof set);
    int taken = 0;
    for (int i = 0; i < 8; i++) {
      bytes[i] = next[taken];
      taken += set[i] & 1;
    }
    row.high.at += taken;
    U8 dealt;
    std::memcpy(&dealt, bytes, sizeof dealt);
    return dealt;
#endif
  }

  // Eight weights as bits of bf16 in the upper halves of words; `first` codes and `low` bits.
  GEARBX_INLINE U8 eight(const uint8_t* code, const uint8_t* low_bits, float step, float offset) {
    const U8 low = widen8(low_bits);
    const Eight v = __builtin_convertvector(bits_as<I8>(widen8(code)), Eight) * step + offset;
    const float size = step < 0 ? -step : step, bound = 8.8f * size;
    const U8 value = bits_as<U8>(v), magnitude = value & 0x7fffffff;
    const U8 first = ((value >> 16) - FAR_WINDOW) & 0xffff;
    const auto is_near = bits_as<U8>(~(bits_as<Eight>(magnitude) >= bound));
    const uint32_t top = bits_as<uint32_t>(size * 16.0f) >> 16;
    const U8 byte = deal(is_near), distance = (byte & 127) << 5 | ((top - low) & 31);
    const U8 below = (top - distance) & bits_as<U8>(distance < 0xf80);
    const U8 near = (byte >> 7) << 15 | below, far = first + ((low - first) & 31);
    const U8 weights = (near & is_near) | (far & ~is_near);
    return weights << 16;
  }

  GEARBX_INLINE U8 whole() {
    U8 weights;
    for (int i = 0; i < 8; i++) {
      const uint32_t low = row.high.next();
      weights[i] = (static_cast<uint32_t>(row.high.next()) << 8 | low) << 16;
    }
    return weights;
  }

  // Uses 32 weights from a column on, all of one group.
  template <class Use>
  GEARBX_INLINE void block(int64_t column, Use use) {
    const int64_t g = column / GROUP, block = column / BLOCK;
    const float scale = bf16_to_float(row.scales[g]), step = scale * 0x1p-4f;
    const float offset = bf16_to_float(row.biases[0][g]) + bf16_to_float(row.biases[1][g]) * 0x1p-4f;
    const Bytes32 codes = append_plane(unpack<4>(row.weights[0] + 16 * block), unpack<4>(row.weights[1] + 16 * block), 4);
    const Bytes32 lows = unpack<5>(row.low + 20 * block);
    alignas(32) uint8_t code[BLOCK], low[BLOCK];
    std::memcpy(code, &codes, BLOCK);
    std::memcpy(low, &lows, BLOCK);
    alignas(64) float weights[BLOCK];
    for (int i = 0; i < BLOCK; i += 8) {
      const U8 bits = scale == 0 ? whole() : eight(code + i, low + i, step, offset);
      std::memcpy(weights + i, &bits, sizeof bits);
    }
    use(column, load16(weights));
    use(column + 16, load16(weights + 16));
  }

  // Calls use(column, weights) for each 16 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each16(Use use) {
    for (int64_t column = 0; column < row.columns; column += BLOCK) block(column, use);
  }
};

}  // namespace gearbx
