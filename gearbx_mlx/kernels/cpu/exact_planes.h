// Decodes rows of planes 4+4 with five low bits, 32 weights at a time. Vectors of GCC and Clang do the arithmetic on
// every processor; the bytes of weights near zero are dealt out one by one.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint8_t Octet __attribute__((vector_size(8)));
typedef float Eight __attribute__((vector_size(32)));

GEARBX_INLINE U8 widen8(const uint8_t* p) {
  Octet bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, U8);
}

template <class To, class From>
GEARBX_INLINE To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <int GROUP>
struct PlanesDecoder {
  ExactRow& row;
  explicit PlanesDecoder(ExactRow& r) : row(r) {}

  // Eight weights as bits of bf16 in the upper halves of words; `first` codes and `low` bits.
  GEARBX_INLINE U8 eight(const uint8_t* code, const uint8_t* low_bits, float step, float offset) {
    const U8 low = widen8(low_bits);
    const Eight v = __builtin_convertvector(widen8(code), Eight) * step + offset;
    const float size = step < 0 ? -step : step, bound = 8.8f * size;
    const U8 value = bits_as<U8>(v), magnitude = value & 0x7fffffff;
    const U8 first = ((value >> 16) - FAR_WINDOW) & 0xffff;
    U8 weights = first + ((low - first) & 31);
    const auto near = ~(bits_as<Eight>(magnitude) >= bound);
    alignas(32) int32_t which[8];
    std::memcpy(which, &near, sizeof which);
    const uint32_t top = bits_as<uint32_t>(size * 16.0f) >> 16;
    for (int i = 0; i < 8; i++)
      if (which[i]) {
        const uint32_t byte = row.high.next(), distance = (byte & 127) << 5 | ((top - low[i]) & 31);
        weights[i] = (byte >> 7) << 15 | (distance >= 0xf80 ? 0 : top - distance);
      }
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

  // Calls use(column, weights) for each 16 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each16(Use use) {
    for (int64_t column = 0; column < row.columns; column += BLOCK) {
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
  }
};

}  // namespace gearbx
