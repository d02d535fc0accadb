// Splits the codes of an affine weight into bit planes; it may find the codes first.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// How weights become codes: the nearest numbers of steps from an offset, which each group of columns has.
typedef struct {
  const void* weights;     // (rows, columns)
  int type;                // of weights, as in gearbx_dense; steps and offsets of a single plane are rounded to it
  int group;               // 32, 64 or 128
  int fit;                 // whether steps and offsets are fitted to the codes, by least squares, and codes to these, in
                           // groups that this brings nearer to their weights
  float least;             // the smallest step after that
  float *steps, *offsets;  // (rows, columns / group)
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

// The smallest and the largest of each group of weights (groups, group) of a type.
void gearbx_group_ends(const void* weights, int type, int64_t groups, int group, float* low, float* high);

#ifdef __cplusplus
}
#endif
