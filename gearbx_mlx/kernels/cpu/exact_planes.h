// Decodes rows of planes 4+4 with five low bits, 32 weights at a time. Vectors of GCC and Clang do the arithmetic on
// every processor; the bytes of weights near zero are dealt out one by one where there is neither AVX2 nor NEON.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

#ifdef GEARBX_NEON
constexpr int WIDTH = 4;  // weights of a vector
#else
constexpr int WIDTH = 8;
#endif
typedef uint32_t Uints __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Sints __attribute__((vector_size(4 * WIDTH)));  // whose conversion to floats is one instruction
typedef uint8_t Octets __attribute__((vector_size(WIDTH)));
typedef float Numbers __attribute__((vector_size(4 * WIDTH)));

template <class To, class From>
GEARBX_INLINE To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Bytes from number i on.
GEARBX_INLINE Uints widen(const Bytes32& all, int i) {
#ifdef GEARBX_AVX2
  const __m128i half = i < 16 ? _mm256_castsi256_si128(all) : _mm256_extracti128_si256(all, 1);
  return bits_as<Uints>(_mm256_cvtepu8_epi32(i % 16 ? _mm_unpackhi_epi64(half, half) : half));
#elif defined(GEARBX_NEON)
  const uint8x16_t half = all.half[i / 16];
  const uint16x8_t words = i % 16 < 8 ? vmovl_u8(vget_low_u8(half)) : vmovl_high_u8(half);
  return bits_as<Uints>(i % 8 < 4 ? vmovl_u16(vget_low_u16(words)) : vmovl_high_u16(words));
#else
  Octets bytes;
  std::memcpy(&bytes, all.byte + i, sizeof bytes);
  return __builtin_convertvector(bytes, Uints);
#endif
}

// The bytes at `next` for the lanes whose bits are set, and 0 for the others; moves `next`.
GEARBX_INLINE Uints deal(const uint8_t*& next, Uints lanes) {
#ifdef GEARBX_AVX2
  const auto set = static_cast<unsigned>(_mm256_movemask_ps(bits_as<__m256>(lanes)));
  const __m128i bytes = _mm_shuffle_epi8(load8_bytes(next), load8_bytes(PLACES.of[set]));
  next += __builtin_popcount(set);
  return bits_as<Uints>(_mm256_cvtepu8_epi32(bytes));
#elif defined(GEARBX_NEON)
  const uint32x4_t bit = {1, 2, 4, 8};
  const uint32_t set = vaddvq_u32(vandq_u32(bits_as<uint32x4_t>(lanes), bit));
  uint32_t four;
  std::memcpy(&four, next, sizeof four);
  const uint8x8_t bytes = vtbl1_u8(vreinterpret_u8_u32(vdup_n_u32(four)), vld1_u8(PLACES.of[set]));
  next += COUNTS.of[set];
  return bits_as<Uints>(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
#else
  alignas(32) uint32_t set[8], bytes[8];
  std::memcpy(set, &lanes, sizeof set);
  const uint8_t* const first = next;
  for (int i = 0, taken = 0; i < 8; i++) {
    bytes[i] = first[taken] & set[i];
    taken += set[i] & 1;
    next = first + taken;
  }
  Uints dealt;
  std::memcpy(&dealt, bytes, sizeof dealt);
  return dealt;
#endif
}

template <int GROUP>
struct Planes32 {
  ExactRow& row;
  explicit Planes32(ExactRow& r) : row(r) {}

  // Weights as bits of bf16 in the upper halves of words, from codes and low bits.
  //
  // Far from zero a weight is the last number up to 31 neighbours after the first that ends in the low bits; near zero
  // it is the last up to T0 less 32 times the byte's seven bits. The byte is 0 far from zero.
  GEARBX_INLINE Uints some(Uints code, Uints low, float step, float offset, const uint8_t*& next) {
    const Numbers v = __builtin_convertvector(bits_as<Sints>(code), Numbers) * step + offset;
    const float size = step < 0 ? -step : step, bound = 8.8f * size;
    const Uints value = bits_as<Uints>(v), magnitude = value & 0x7fffffff;
    const auto far = bits_as<Uints>(bits_as<Numbers>(magnitude) >= bound);
    const uint32_t top = bits_as<uint32_t>(size * 16.0f) >> 16;
    const Uints last = (((value >> 16) + (31 - FAR_WINDOW)) & far) | (top & ~far);
    const Uints byte = deal(next, ~far), distance = (byte & 127) << 5 | low;
    const Uints below = (((last - distance) & ~31u) | low) & bits_as<Uints>(distance < 0xf80);
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
#pragma GCC unroll 8
      for (int i = 0; i < BLOCK; i += WIDTH) {
        const Uints bits = some(widen(codes, i), widen(lows, i), step, offset, next);
        std::memcpy(weights + i, &bits, sizeof bits);
      }
      row.high.at += next - first;
    }
    use(column, Weights32(load16(weights), load16(weights + 16)));
  }

  // Calls use(column, weights) for each 32 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each32(Use use) {
    for (int64_t column = 0; column < row.columns; column += BLOCK) block(column, use);
  }
};

}  // namespace gearbx
