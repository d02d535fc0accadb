// Decodes rows 32 weights at a time, on processors without AVX-512's permutations of bytes.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

template <int BITS, int GROUP>
struct Decoder {
  ExactRow& row;
  explicit Decoder(ExactRow& r) : row(r) {}

  template <class Use>
  GEARBX_INLINE void each16(Use use) {
    alignas(32) uint16_t first[16];
    alignas(32) uint8_t zero[16];
    for (int64_t column = 0; column < row.columns; column += BLOCK) {
      if (column % GROUP == 0) mean(column / GROUP, first, zero);
      const Bytes32 codes = unpack<BITS>(row.weights[0] + column / 8 * BITS);
      alignas(32) uint8_t code[BLOCK];
      std::memcpy(code, &codes, BLOCK);
      alignas(64) uint32_t bits[BLOCK];
      for (int i = 0; i < BLOCK; i++) {
        const uint32_t c = first[code[i]], low = row.low[column + i];
        const uint32_t weight = zero[code[i]] ? static_cast<uint32_t>(row.high.next()) << 8 | low : c + ((low - c) & 255);
        bits[i] = weight << 16;
      }
      alignas(64) float weights[BLOCK];
      std::memcpy(weights, bits, sizeof bits);
      use(column, load16(weights));
      use(column + 16, load16(weights + 16));
    }
  }

  // For each code of a group: the first of the neighbours, and whether it is in the zero cell.
  void mean(int64_t group, uint16_t* first, uint8_t* zero) const {
    const float scale = bf16_to_float(row.scales[group]), bias = bf16_to_float(row.biases[0][group]);
    const float bound = (scale < 0 ? -scale : scale) * 0.5f;
    for (int q = 0; q < 1 << BITS; q++) {
      const float v = scale * static_cast<float>(q) + bias;
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      zero[q] = !((v < 0 ? -v : v) > bound);
      first[q] = static_cast<uint16_t>((bits >> 16) - WINDOW);
    }
  }
};

}  // namespace gearbx
