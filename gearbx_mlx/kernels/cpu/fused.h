// Fused operations: RMS norms, rotary positions, SwiGLU and GeGLU. Plain C, so that a test can call them without
// Python.
//
// On a CPU, MLX makes ten to twenty-five operations of a norm or a rotation; for one token, their number determines
// their time. It makes a single one for SwiGLU, with an exponential that takes 20 ns per number.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// y = x / sqrt(mean(x^2) + eps) * weight for each row of x and y (rows, columns). weight: (columns), of `type`
// (matvec.h). A row's bits do not depend on other rows.
void gearbx_rms_norm(const float* x, int64_t rows, int64_t columns, const void* weight, int type, float eps, float* y);

// y = 1 + weight, rounded to the weight's type: the factor of some norms.
void gearbx_add_one(const void* weight, int64_t columns, int type, float* y);

// Rotates pairs of the first `dims` numbers of x (batch, heads, length, width) by their position times a frequency.
typedef struct {
  int64_t shape[4], strides[4];  // of x, in numbers; y is contiguous
  const float* frequencies;      // (dims / 2), radians per position
  int dims;                      // even, at most width; numbers after the first dims are copied
  int traditional;               // 1: the two numbers of a pair are neighbors; 0: they are dims / 2 apart
  float scale;                   // of positions
  int64_t offset;                // first position
  const int32_t* padding;        // (batch): number of padding positions of a sequence before its first token; NULL: none
} gearbx_rotation;

void gearbx_rope(const gearbx_rotation* rotation, const float* x, float* y);

// y = gate / (1 + exp(-gate)) * up, for `count` numbers. A result's bits do not depend on its index.
void gearbx_swiglu(const float* gate, const float* up, int64_t count, float* y);

// y = gelu(gate) * up, where gelu is approximated by tanh: 0.5 gate (1 + tanh(z / 2)) = gate / (1 + exp(-z)) with
// z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
void gearbx_geglu(const float* gate, const float* up, int64_t count, float* y);

#ifdef __cplusplus
}
#endif
