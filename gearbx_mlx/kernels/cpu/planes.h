// The rows of a stack of bit planes: their codes, a block at a time, and their scales, a segment of groups at a time.

#pragma once

#include "codes.h"
#include "matvec.h"

namespace gearbx {

constexpr int SEGMENT = 64;               // groups whose scales are widened at a time
constexpr int MOST_BLOCKS = 128 / BLOCK;  // in a group

// One row's packed bytes, by the widths of its planes, known to the compiler.
template <int... W>
struct Planes {
  static constexpr int COUNT = sizeof...(W);
  static constexpr int WIDTHS[COUNT] = {W...};
  static constexpr int BITS = (W + ...);
  const uint8_t* rows[COUNT];

  Planes(const gearbx_stack& m, int64_t row) {
    for (int p = 0; p < COUNT; p++)
      rows[p] = static_cast<const uint8_t*>(m.weights[p]) + row * (m.columns / 8 * WIDTHS[p]);
  }

  template <int P = COUNT - 1>
  Bytes32 block(int64_t i) const {
    const Bytes32 codes = unpack<WIDTHS[P]>(rows[P] + i * 4 * WIDTHS[P]);
    if constexpr (P == 0)
      return codes;
    else
      return put_below(block<P - 1>(i), codes, WIDTHS[P]);
  }
};

// The same for other widths.
struct AnyPlanes {
  static constexpr int BITS = 8;  // at most
  const gearbx_stack& matrix;
  const uint8_t* planes[GEARBX_MAX_PLANES];
  AnyPlanes(const gearbx_stack& m, int64_t row) : matrix(m) {
    for (int p = 0; p < m.planes; p++)
      planes[p] = static_cast<const uint8_t*>(m.weights[p]) + row * (m.columns / 8 * m.widths[p]);
  }
  Bytes32 block(int64_t i) const {
    Bytes32 codes = unpack(matrix.widths[0], planes[0] + i * 4 * matrix.widths[0]);
    for (int p = 1; p < matrix.planes; p++) {
      const int width = matrix.widths[p];
      codes = put_below(codes, unpack(width, planes[p] + i * 4 * width), width);
    }
    return codes;
  }
};

// count values to float32, and zeros up to a multiple of 8; each times `factor`, added to what is there if `onto`.
template <class T>
void widen(const void* values, int64_t from, int count, float factor, bool onto, float* out) {
  const T* p = static_cast<const T*>(values) + from;
  const F8 factors = all8(factor);
  int i = 0;
  for (; i + 8 <= count; i += 8) store8(out + i, multiply_add8(load8(p + i), factors, onto ? load8(out + i) : zero8()));
  for (; i < count; i++) out[i] = multiply_add(to_float(p[i]), factor, onto ? out[i] : 0.0f);
  for (; i % 8; i++) out[i] = 0.0f;
}

inline void widen(int type, const void* values, int64_t from, int count, float factor, bool onto, float* out) {
  if (type == GEARBX_BFLOAT16)
    widen<Bf16>(values, from, count, factor, onto, out);
  else if (type == GEARBX_FLOAT16)
    widen<Fp16>(values, from, count, factor, onto, out);
  else
    widen<float>(values, from, count, factor, onto, out);
}

// Scale of one unit of the lowest plane, and the biases of all planes together, of some groups of a row.
inline void scales_and_offsets(const gearbx_stack& m, int64_t from, int count, float* scales, float* offsets) {
  float factor = 1.0f;
  widen(m.scale_type, m.biases[0], from, count, factor, false, offsets);
  for (int p = 1; p < m.planes; p++) {
    factor /= static_cast<float>(1 << m.widths[p]);
    widen(m.scale_type, m.biases[p], from, count, factor, true, offsets);
  }
  widen(m.scale_type, m.scales, from, count, factor, false, scales);
}

typedef void (*Work)(const void* job, int piece);

struct Form {
  int widths[GEARBX_MAX_PLANES];
  Work work;
};

template <template <class> class Kernel, int... W>
constexpr Form form() {
  return {{W...}, Kernel<Planes<W...>>::piece};
}

// Kernel<Row>::piece for the planes that a matrix has: the weights of stock quantization, the stacks of the usual ladders,
// and one that serves all others.
template <template <class> class Kernel>
Work find_work(const gearbx_stack& m) {
  static constexpr Form forms[] = {
      form<Kernel, 1>(),       form<Kernel, 2>(),       form<Kernel, 3>(),       form<Kernel, 4>(),
      form<Kernel, 5>(),       form<Kernel, 6>(),       form<Kernel, 8>(),       form<Kernel, 2, 1>(),
      form<Kernel, 2, 2>(),    form<Kernel, 2, 4>(),    form<Kernel, 2, 6>(),    form<Kernel, 3, 1>(),
      form<Kernel, 3, 5>(),    form<Kernel, 4, 1>(),    form<Kernel, 4, 2>(),    form<Kernel, 4, 4>(),
      form<Kernel, 6, 2>(),    form<Kernel, 2, 2, 4>(), form<Kernel, 3, 1, 4>(), form<Kernel, 4, 1, 1>(),
      form<Kernel, 4, 2, 2>(), form<Kernel, 4, 1, 1, 2>(),
  };
  for (const Form& known : forms)
    if (std::memcmp(known.widths, m.widths, sizeof m.widths) == 0) return known.work;
  return Kernel<AnyPlanes>::piece;
}

inline int64_t row_bytes(const gearbx_stack& m) {
  int bits = 0;
  for (int p = 0; p < m.planes; p++) bits += m.widths[p];
  return m.columns * bits / 8;
}

}  // namespace gearbx
