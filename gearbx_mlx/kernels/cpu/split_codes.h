// Splits the codes of an affine weight into bit planes.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t rows, columns;   // columns is a multiple of 32
  int bits;                // of a code, 1 to 8
  const uint8_t* codes;    // (rows, columns * bits / 8) bytes, as MLX packs them
  int planes;              // 1 to 8
  const int* widths;       // of each plane, most significant first; together `bits`
  int panel_rows;          // 0; or of so many rows the uint32 are side by side, as in gearbx_stack; rows is a multiple
  uint32_t* const* words;  // of each plane (rows, columns * width / 32)
} gearbx_splitting;

void gearbx_split_codes(const gearbx_splitting* splitting);

#ifdef __cplusplus
}
#endif
