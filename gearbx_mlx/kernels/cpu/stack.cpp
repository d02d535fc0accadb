// Matrix times vectors over a stack of bit planes; one plane is MLX's affine weight.
//
// Of a group, sum_i (scale code_i + bias) x_i = scale * sum_i code_i x_i + bias * sum_i x_i: only the first sum is work
// for every weight. All rows and vectors go through the same operations in the same order.

#include "codes.h"
#include "matvec.h"
#include "pool.h"
#include "prepare.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int SEGMENT = 64;  // groups whose scales are widened at a time

struct Job {
  const gearbx_stack* matrix;
  const Prepared* prepared;
  int vectors;
  float* y;
  Pieces pieces;
};

// One row's packed bytes, by the widths of its planes: known to the compiler for one and two planes.
template <int W>
struct OnePlane {
  const uint8_t* first;
  OnePlane(const gearbx_stack& m, int64_t row)
      : first(static_cast<const uint8_t*>(m.weights[0]) + row * (m.columns / 8 * W)) {}
  Bytes32 block(int64_t i) const { return unpack<W>(first + i * 4 * W); }
};

template <int W0, int W1>
struct TwoPlanes {
  OnePlane<W0> above;
  const uint8_t* second;
  TwoPlanes(const gearbx_stack& m, int64_t row)
      : above(m, row), second(static_cast<const uint8_t*>(m.weights[1]) + row * (m.columns / 8 * W1)) {}
  Bytes32 block(int64_t i) const { return put_below(above.block(i), unpack<W1>(second + i * 4 * W1), W1); }
};

struct AnyPlanes {
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

void widen(int type, const void* values, int64_t from, int count, float factor, bool onto, float* out) {
  if (type == GEARBX_BFLOAT16)
    widen<Bf16>(values, from, count, factor, onto, out);
  else if (type == GEARBX_FLOAT16)
    widen<Fp16>(values, from, count, factor, onto, out);
  else
    widen<float>(values, from, count, factor, onto, out);
}

// Scale of one unit of the lowest plane, and the biases of all planes together, of some groups of a row.
void scales_and_offsets(const gearbx_stack& m, int64_t from, int count, float* scales, float* offsets) {
  float factor = 1.0f;
  widen(m.scale_type, m.biases[0], from, count, factor, false, offsets);
  for (int p = 1; p < m.planes; p++) {
    factor /= static_cast<float>(1 << m.widths[p]);
    widen(m.scale_type, m.biases[p], from, count, factor, true, offsets);
  }
  widen(m.scale_type, m.scales, from, count, factor, false, scales);
}

// V: the number of vectors, or 0 for any.
template <class Planes, int V>
void do_rows(const Job& job, int64_t first, int64_t end) {
  const gearbx_stack& m = *job.matrix;
  const int vectors = V ? V : job.vectors;
  const int64_t groups = m.columns / m.group, blocks = m.group / BLOCK;
  const float* x = job.prepared->x.data();
  const float* sums = job.prepared->sums.data();
  F8 total[V ? V : GEARBX_MAX_VECTORS], even[V ? V : GEARBX_MAX_VECTORS], odd[V ? V : GEARBX_MAX_VECTORS];
  alignas(32) float scales[SEGMENT], offsets[SEGMENT];

  for (int64_t row = first; row < end; row++) {
    const Planes planes(m, row);
    for (int v = 0; v < vectors; v++) total[v] = zero8();
    for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
      const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
      scales_and_offsets(m, row * groups + segment, count, scales, offsets);
      for (int g = 0; g < count; g++) {
        for (int v = 0; v < vectors; v++) even[v] = odd[v] = zero8();
        for (int64_t b = (segment + g) * blocks; b < (segment + g + 1) * blocks; b++) {
          F8 codes[4];
          to_floats(planes.block(b), codes);
          for (int v = 0; v < vectors; v++) {
            const float* at = x + v * m.columns + b * BLOCK;
            even[v] = multiply_add8(codes[0], load8(at), even[v]);
            odd[v] = multiply_add8(codes[1], load8(at + 8), odd[v]);
            even[v] = multiply_add8(codes[2], load8(at + 16), even[v]);
            odd[v] = multiply_add8(codes[3], load8(at + 24), odd[v]);
          }
        }
        const F8 scale = all8(scales[g]);
        for (int v = 0; v < vectors; v++) total[v] = multiply_add8(scale, add8(even[v], odd[v]), total[v]);
      }
      for (int g = 0; g < count; g += 8) {
        const F8 offset = load8(offsets + g);
        for (int v = 0; v < vectors; v++)
          total[v] = multiply_add8(offset, load8(sums + v * job.prepared->sums_stride + segment + g), total[v]);
      }
    }
    for (int v = 0; v < vectors; v++) job.y[v * m.rows + row] = sum8(total[v]);
  }
}

template <class Planes>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t first = job.pieces.first(piece), end = job.pieces.first(piece + 1);
  if (job.vectors == 1)
    do_rows<Planes, 1>(job, first, end);
  else
    do_rows<Planes, 0>(job, first, end);
}

typedef void (*Work)(const void*, int);

Work find_work(const gearbx_stack& m) {
  if (m.planes == 1) switch (m.widths[0]) {
      case 1: return do_piece<OnePlane<1>>;
      case 2: return do_piece<OnePlane<2>>;
      case 3: return do_piece<OnePlane<3>>;
      case 4: return do_piece<OnePlane<4>>;
      case 5: return do_piece<OnePlane<5>>;
      case 6: return do_piece<OnePlane<6>>;
      default: return do_piece<OnePlane<8>>;
    }
  if (m.planes == 2) switch (10 * m.widths[0] + m.widths[1]) {
      case 22: return do_piece<TwoPlanes<2, 2>>;
      case 24: return do_piece<TwoPlanes<2, 4>>;
      case 31: return do_piece<TwoPlanes<3, 1>>;
      case 35: return do_piece<TwoPlanes<3, 5>>;
      case 41: return do_piece<TwoPlanes<4, 1>>;
      case 42: return do_piece<TwoPlanes<4, 2>>;
      case 44: return do_piece<TwoPlanes<4, 4>>;
      case 62: return do_piece<TwoPlanes<6, 2>>;
    }
  return do_piece<AnyPlanes>;
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_stack_matvec(const gearbx_stack* matrix, const float* x, int vectors, float* y) {
  using namespace gearbx;
  static thread_local Prepared prepared;
  prepare(*matrix, x, vectors, prepared);
  int bits = 0;
  for (int p = 0; p < matrix->planes; p++) bits += matrix->widths[p];
  const Job job = {matrix, &prepared, vectors, y, Pieces(matrix->rows, matrix->columns * bits / 8, vectors)};
  share_out(job.pieces.count, find_work(*matrix), &job);
}

extern "C" int gearbx_threads(void) { return gearbx::thread_count(); }
