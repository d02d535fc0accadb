// What stands between the products of a layer: RMS norms, rotary positions, and SwiGLU. Plain C.
//
// MLX makes ten to twenty-five operations of a norm or a rotation on a CPU, and for one token their number is what they
// cost. Of SwiGLU it makes one, with an exponential that takes 20 ns a number.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// y = x / sqrt(mean(x^2) + eps) * weight for each row of x and y (rows, columns). weight: (columns) of a type of
// matvec.h. A row has the same bits whatever the others are.
void gearbx_rms_norm(const float* x, int64_t rows, int64_t columns, const void* weight, int type, float eps, float* y);

// Turns pairs of the first `dims` numbers of x (batch, heads, length, width) by their position times a frequency.
typedef struct {
  int64_t shape[4], strides[4];  // of x, in numbers; y lies row after row
  const float* frequencies;      // (dims / 2), radians from position to position
  int dims;                      // even, width at most; the numbers behind them stay as they are
  int traditional;               // the two of a pair are neighbours; else dims / 2 apart
  float scale;                   // of positions
  int64_t offset;                // position of the first
} gearbx_rotation;

void gearbx_rope(const gearbx_rotation* rotation, const float* x, float* y);

// y = gate / (1 + exp(-gate)) * up, of `count` numbers. A number has the same bits wherever it lies.
void gearbx_swiglu(const float* gate, const float* up, int64_t count, float* y);

#ifdef __cplusplus
}
#endif
