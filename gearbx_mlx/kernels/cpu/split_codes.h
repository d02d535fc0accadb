// Splits the codes of an affine weight into bit planes, and may quantize the weight first.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The quantization of weights to codes, by groups of columns. The first plane's scale divides a group's range into
// 2^bits - 1 steps, and its bias is the middle of the range of the omitted bits, both rounded to the weights' type. A
// single plane's scale and bias are then fitted to the codes by least squares, and the codes to these, in groups whose
// error falls. A group with a weight that is not finite has the scale NaN.
typedef struct {
  const void* weights;   // (rows, columns)
  int type;              // of weights, scales and biases, as in gearbx_dense
  int group;             // 32, 64 or 128
  float least;           // the smallest scale
  void* scales;          // (rows, columns / group), in panels like the words
  void* const* biases;   // of each plane, as scales; planes of one width may share an array
} gearbx_grid;

typedef struct {
  int64_t rows, columns;   // columns is a multiple of 32
  int bits;                // of a code, 1 to 8
  const uint8_t* codes;    // (rows, columns * bits / 8) bytes, as packed by MLX; or null with a grid
  const gearbx_grid* grid; // quantization of weights to codes; columns is then a multiple of its group
  int planes;              // 1 to 8
  const int* widths;       // of each plane, most significant first; `bits` in all
  int panel_rows;          // 0, or the rows of a panel, as in gearbx_stack; a divisor of rows
  uint32_t* const* words;  // of each plane (rows, columns * width / 32)
} gearbx_splitting;

void gearbx_split_codes(const gearbx_splitting* splitting);

#ifdef __cplusplus
}
#endif
