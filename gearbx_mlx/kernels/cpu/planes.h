// Reads the rows of a stack of bit planes: codes one block at a time, scales one segment of groups at a time.

#pragma once

#include <vector>

#include "codes.h"
#include "matvec.h"

namespace gearbx {

constexpr int SEGMENT = 64;               // groups whose scales are converted at a time
constexpr int MOST_BLOCKS = 128 / BLOCK;  // in a group

// One row of planes whose widths the compiler knows.
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
      return append_plane(block<P - 1>(i), codes, WIDTHS[P]);
  }
};

// One row of planes of any widths.
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
      codes = append_plane(codes, unpack(width, planes[p] + i * 4 * width), width);
    }
    return codes;
  }
};

// One row of symmetric codes, made unsigned. It may end within a block: missing codes meet activations of zero.
template <int W>
struct SymmetricRow {
  static constexpr int BITS = W;
  const uint8_t* row;
  int64_t bytes;
  SymmetricRow(const gearbx_stack& m, int64_t number)
      : row(static_cast<const uint8_t*>(m.weights[0]) + number * m.row_bytes), bytes(m.row_bytes) {}
  Bytes32 block(int64_t i) const {
    const int64_t from = i * 4 * W, left = bytes - from;
    if (left >= 4 * W) return without_sign(unpack<W>(row + from));
    uint8_t rest[4 * W] = {};
    if (left > 0) std::memcpy(rest, row + from, static_cast<size_t>(left));
    return without_sign(unpack<W>(rest));
  }
  static Bytes32 without_sign(Bytes32 codes) { return W == 8 ? flip_signs(codes) : codes; }
};

// Converts `count` values to float32 times `factor`, with zeros up to a multiple of 8. Adds them to `out` if `onto`.
template <class T>
GEARBX_INLINE void widen(const T* p, int count, float factor, bool onto, float* out) {
  const F8 factors = all8(factor);
  int i = 0;
  for (; i + 8 <= count; i += 8) store8(out + i, multiply_add8(load8(p + i), factors, onto ? load8(out + i) : zero8()));
  for (; i < count; i++) out[i] = multiply_add(to_float(p[i]), factor, onto ? out[i] : 0.0f);
  for (; i % 8; i++) out[i] = 0.0f;
}

template <class T>
GEARBX_INLINE void scales_and_offsets(const gearbx_stack& m, int64_t row, int64_t group, int count, float* scales,
                                      float* offsets) {
  const int64_t from = row * (m.columns / m.group) + group;
  const T* stored = static_cast<const T*>(m.scales);
  if (m.kind == GEARBX_AFFINE) {
    float factor = 1.0f;
    widen(static_cast<const T*>(m.biases[0]) + from, count, factor, false, offsets);
    for (int p = 1; p < m.planes; p++) {
      factor /= static_cast<float>(1 << m.widths[p]);
      if (m.biases[p]) widen(static_cast<const T*>(m.biases[p]) + from, count, factor, true, offsets);
    }
    if (m.middle != 0.0f) widen(stored + from, count, m.middle, true, offsets);
    widen(stored + from, count, factor, false, scales);
    return;
  }
  if (m.kind == GEARBX_SYMMETRIC_GROUPS)
    widen(stored + from, count, 1.0f, false, scales);
  else
    for (int g = 0; g < (count + 7) / 8 * 8; g++) scales[g] = g < count ? to_float(stored[row]) : 0.0f;
  const F8 middle = all8(-static_cast<float>(1 << (m.widths[0] - 1)));
  for (int g = 0; g < count; g += 8) store8(offsets + g, multiply8(load8(scales + g), middle));
}

// Writes, for `count` groups of a row, the scale of the lowest plane, and the sum of the biases of all planes. Not
// inlined: in every form of every kernel it would take compilers minutes.
__attribute__((noinline)) inline void scales_and_offsets(const gearbx_stack& m, int64_t row, int64_t group, int count,
                                                         float* scales, float* offsets) {
  if (m.scale_type == GEARBX_BFLOAT16) return scales_and_offsets<Bf16>(m, row, group, count, scales, offsets);
  if (m.scale_type == GEARBX_FLOAT16) return scales_and_offsets<Fp16>(m, row, group, count, scales, offsets);
  scales_and_offsets<float>(m, row, group, count, scales, offsets);
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

// Finds Kernel<Row>::piece for the planes of a matrix. MLX's own weights and the stacks of the usual ladders have forms
// of their own; one form serves all other stacks.
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
  if (m.kind != GEARBX_AFFINE) switch (m.widths[0]) {
      case 2: return Kernel<SymmetricRow<2>>::piece;
      case 4: return Kernel<SymmetricRow<4>>::piece;
      case 6: return Kernel<SymmetricRow<6>>::piece;
      default: return Kernel<SymmetricRow<8>>::piece;
    }
  for (const Form& known : forms)
    if (std::memcmp(known.widths, m.widths, sizeof m.widths) == 0) return known.work;
  return Kernel<AnyPlanes>::piece;
}

// The activations, with zeros for the columns that are padding; uses `copy` if there are any.
inline const float* padded(const gearbx_stack& m, const float* x, int vectors, std::vector<float>& copy) {
  const int64_t inputs = inputs_of(m);
  if (inputs == m.columns) return x;
  copy.assign(static_cast<size_t>(vectors * m.columns), 0.0f);
  for (int v = 0; v < vectors; v++)
    std::memcpy(copy.data() + v * m.columns, x + v * inputs, static_cast<size_t>(inputs) * 4);
  return copy.data();
}

}  // namespace gearbx
