// Splits the codes of an affine weight into bit planes; it may find the codes first.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// How weights become codes, group by group of columns. The scale of the first plane spans the group in 2^bits - 1 steps and
// its bias lies in the middle of what the other bits select from, both rounded to the type of the weights. Those of a
// single plane are then fitted to the codes by least squares, and the codes to these, in groups that this brings nearer to
// their weights. A group with a weight that is not finite has a scale that is no number.
typedef struct {
  const void* weights;   // (rows, columns)
  int type;              // of weights, scales and biases, as in gearbx_dense
  int group;             // 32, 64 or 128
  float least;           // the smallest scale
  void* scales;          // (rows, columns / group), side by side in panels as the words are
  void* const* biases;   // of each plane, as scales; planes of one width may share an array
} gearbx_grid;

typedef struct {
  int64_t rows, columns;   // columns is a multiple of 32
  int bits;                // of a code, 1 to 8
  const uint8_t* codes;    // (rows, columns * bits / 8) bytes, as MLX packs them; or null, where
  const gearbx_grid* grid; // says how weights become codes; columns is then a multiple of its group
  int planes;              // 1 to 8
  const int* widths;       // of each plane, most significant first; together `bits`
  int panel_rows;          // 0; or of so many rows the uint32 are side by side, as in gearbx_stack; rows is a multiple
  uint32_t* const* words;  // of each plane (rows, columns * width / 32)
} gearbx_splitting;

void gearbx_split_codes(const gearbx_splitting* splitting);

#ifdef __cplusplus
}
#endif
