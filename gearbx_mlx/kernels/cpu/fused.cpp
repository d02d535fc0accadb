#include "fused.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "exponential.h"
#include "matvec.h"
#include "simd.h"

namespace gearbx {
namespace {

float sum_of_squares(const float* x, int64_t count) {
  F8 sums = zero8();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) sums = multiply_add8(load8(x + i), load8(x + i), sums);
  float sum = sum8(sums);
  for (; i < count; i++) sum = multiply_add(x[i], x[i], sum);
  return sum;
}

template <class Weight>
void norm_rows(const float* x, int64_t rows, int64_t columns, const Weight* weight, float eps, float* y) {
  for (int64_t row = 0; row < rows; row++, x += columns, y += columns) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, columns) / static_cast<float>(columns) + eps);
    int64_t i = 0;
    for (; i + 8 <= columns; i += 8)
      store8(y + i, multiply8(multiply8(load8(x + i), all8(factor)), load8(weight + i)));
    for (; i < columns; i++) y[i] = x[i] * factor * to_float(weight[i]);
  }
}

Floats swiglu(Floats gate, Floats up) {
  const Floats size = gate < 0 ? gate : -gate;  // -|gate|, or NaN
  const Floats e = exponential(size < LEAST ? Floats{} + LEAST : size);
  return gate * ((gate < 0 ? e : Floats{} + 1.0f) / (e + 1.0f)) * up;
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_rms_norm(const float* x, int64_t rows, int64_t columns, const void* weight, int type, float eps,
                                float* y) {
  using namespace gearbx;
  if (type == GEARBX_BFLOAT16)
    norm_rows(x, rows, columns, static_cast<const Bf16*>(weight), eps, y);
  else if (type == GEARBX_FLOAT16)
    norm_rows(x, rows, columns, static_cast<const Fp16*>(weight), eps, y);
  else
    norm_rows(x, rows, columns, static_cast<const float*>(weight), eps, y);
}

extern "C" void gearbx_rope(const gearbx_rotation* rotation, const float* x, float* y) {
  const auto& [shape, strides, frequencies, dims, traditional, scale, offset] = *rotation;
  const int64_t length = shape[2], width = shape[3], half = dims / 2;
  // Pair i is the numbers at first * i and first * i + second.
  const int64_t first = traditional ? 2 : 1, second = traditional ? 1 : half;
  std::vector<float> cosines(static_cast<size_t>(half)), sines(static_cast<size_t>(half));
  for (int64_t t = 0; t < length; t++) {
    const float position = (static_cast<float>(t) + static_cast<float>(offset)) * scale;
    for (int64_t i = 0; i < half; i++) {
      cosines[static_cast<size_t>(i)] = std::cos(position * frequencies[i]);
      sines[static_cast<size_t>(i)] = std::sin(position * frequencies[i]);
    }
    for (int64_t row = 0; row < shape[0] * shape[1]; row++) {
      const float* from = x + row / shape[1] * strides[0] + row % shape[1] * strides[1] + t * strides[2];
      float* to = y + (row * length + t) * width;
      for (int64_t i = 0; i < half; i++) {
        const float a = from[first * i * strides[3]], b = from[(first * i + second) * strides[3]];
        const float c = cosines[static_cast<size_t>(i)], s = sines[static_cast<size_t>(i)];
        to[first * i] = a * c - b * s;
        to[first * i + second] = a * s + b * c;
      }
      for (int64_t i = dims; i < width; i++) to[i] = from[i * strides[3]];
    }
  }
}

extern "C" void gearbx_swiglu(const float* gate, const float* up, int64_t count, float* y) {
  using namespace gearbx;
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    std::memcpy(&a, gate + i, sizeof a);
    std::memcpy(&b, up + i, sizeof b);
    const Floats made = swiglu(a, b);
    std::memcpy(y + i, &made, sizeof made);
  }
  for (; i < count; i++) y[i] = swiglu(Floats{} + gate[i], Floats{} + up[i])[0];
}
