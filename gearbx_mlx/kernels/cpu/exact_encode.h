// What format `exact` stores beside the codes of bf16 weights (exact.h), and a proof that they come back. Plain C.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t rows, columns;   // columns is a multiple of group
  int group;               // 32, 64 or 128
  const uint16_t* values;  // (rows, columns), the bits of bf16
  const uint8_t* codes;    // (rows, columns / 2) bytes, codes of 4 bits as MLX packs them
  const uint16_t* scales;  // (rows, columns / group), the bits of bf16
  const uint16_t* biases;  // as scales
} gearbx_exact_source;

// kept (rows, columns / group): 1, or 0 where a group does not come back from its codes; such a group counts as one
// whose codes, scale and biases are 0. low: as in gearbx_exact. counts (rows): bytes that each row stores in `high`.
void gearbx_exact_examine(const gearbx_exact_source* source, uint8_t* kept, uint8_t* low, uint32_t* counts);

// Writes `high`. offsets (rows): where each row begins there.
void gearbx_exact_write_high(const gearbx_exact_source* source, const uint8_t* kept, const uint32_t* offsets,
                             uint8_t* high);

#ifdef __cplusplus
}
#endif
