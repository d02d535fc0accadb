// Decodes rows of planes 4+4 with five low bits, 32 weights at a time. Vectors of GCC and Clang do the arithmetic on
// every processor; the bytes of weights near zero are dealt out one by one where there is no AVX2.

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

// Bytes number i to i + 7.
GEARBX_INLINE U8 widen8(const Bytes32& all, int i) {
#ifdef GEARBX_AVX2
  const __m128i half = i < 16 ? _mm256_castsi256_si128(all) : _mm256_extracti128_si256(all, 1);
  return bits_as<U8>(_mm256_cvtepu8_epi32(i % 16 ? _mm_unpackhi_epi64(half, half) : half));
#else
  Octet bytes;
  std::memcpy(&bytes, all.byte + i, sizeof bytes);
  return __builtin_convertvector(bytes, U8);
#endif
}

// The bytes at `next` for the lanes whose bits are set, and 0 for the others; moves `next`.
GEARBX_INLINE U8 deal(const uint8_t*& next, U8 lanes) {
#ifdef GEARBX_AVX2
  const auto set = static_cast<unsigned>(_mm256_movemask_ps(bits_as<__m256>(lanes)));
  const __m128i bytes = _mm_shuffle_epi8(load8_bytes(next), load8_bytes(PLACES.of[set]));
  next += __builtin_popcount(set);
  return bits_as<U8>(_mm256_cvtepu8_epi32(bytes));
#else
  alignas(32) uint32_t set[8], bytes[8];
  std::memcpy(set, &lanes, sizeof set);
  const uint8_t* const first = next;
  for (int i = 0, taken = 0; i < 8; i++) {
    bytes[i] = first[taken] & set[i];
    taken += set[i] & 1;
    next = first + taken;
  }
  U8 dealt;
  std::memcpy(&dealt, bytes, sizeof dealt);
  return dealt;
#endif
}

template <int GROUP>
struct Planes32 {
  ExactRow& row;
  explicit Planes32(ExactRow& r) : row(r) {}

  // Eight weights as bits of bf16 in the upper halves of words, from codes and low bits.
  //
  // Far from zero a weight is the last number up to 31 neighbours after the first that ends in the low bits; near zero
  // it is the last up to T0 less 32 times the byte's seven bits. The byte is 0 far from zero.
  GEARBX_INLINE U8 eight(U8 code, U8 low, float step, float offset, const uint8_t*& next) {
    const Eight v = __builtin_convertvector(bits_as<I8>(code), Eight) * step + offset;
    const float size = step < 0 ? -step : step, bound = 8.8f * size;
    const U8 value = bits_as<U8>(v), magnitude = value & 0x7fffffff;
    const auto far = bits_as<U8>(bits_as<Eight>(magnitude) >= bound);
    const uint32_t top = bits_as<uint32_t>(size * 16.0f) >> 16;
    const U8 last = (((value >> 16) + (31 - FAR_WINDOW)) & far) | (top & ~far);
    const U8 byte = deal(next, ~far), distance = (byte & 127) << 5 | low;
    const U8 below = (((last - distance) & ~31u) | low) & bits_as<U8>(distance < 0xf80);
    return (below | (byte >> 7) << 15) << 16;
  }

  // Weights of a group of scale 0.
  GEARBX_INLINE void whole(float* weights) {
    for (int i = 0; i < BLOCK; i++) {
      const uint32_t low = row.high.next(), bits = (static_cast<uint32_t>(row.high.next()) << 8 | low) << 16;
      std::memcpy(weights + i, &bits, sizeof bits);
    }
  }

  // Uses 32 weights from a column on, all of one group.
  template <class Use>
  GEARBX_INLINE void block(int64_t column, Use use) {
    const int64_t g = column / GROUP, block = column / BLOCK;
    const float scale = bf16_to_float(row.scales[g]), step = scale * 0x1p-4f;
    const float offset = bf16_to_float(row.biases[0][g]) + bf16_to_float(row.biases[1][g]) * 0x1p-4f;
    alignas(64) float weights[BLOCK];
    if (scale == 0) {
      whole(weights);
    } else {
      const Bytes32 upper = unpack<4>(row.weights[0] + 16 * block), lower = unpack<4>(row.weights[1] + 16 * block);
      const Bytes32 codes = append_plane(upper, lower, 4), lows = unpack<5>(row.low + 20 * block);
      uint8_t copy[32];
      const uint8_t* const first = next_high(row.high, copy);
      const uint8_t* next = first;
#pragma GCC unroll 4
      for (int i = 0; i < BLOCK; i += 8) {
        const U8 bits = eight(widen8(codes, i), widen8(lows, i), step, offset, next);
        std::memcpy(weights + i, &bits, sizeof bits);
      }
      row.high.at += next - first;
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
