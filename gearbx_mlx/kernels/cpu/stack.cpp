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
constexpr int MOST_BLOCKS = 128 / BLOCK;  // in a group

struct Job {
  const gearbx_stack* matrix;
  const Prepared* prepared;
  int vectors;
  float* y;
  Pieces pieces;
};

// One row's packed bytes, by the widths of its planes, known to the compiler.
template <int... W>
struct Planes {
  static constexpr int COUNT = sizeof...(W);
  static constexpr int WIDTHS[COUNT] = {W...};
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

template <class Row>
void one_vector(const Job& job, int64_t row) {
  const gearbx_stack& m = *job.matrix;
  const int64_t groups = m.columns / m.group, blocks = m.group / BLOCK;
  const float* sums = job.prepared->sums.data();
  alignas(32) float scales[SEGMENT], offsets[SEGMENT];
  const Row planes(m, row);
  F8 total = zero8();
  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    scales_and_offsets(m, row * groups + segment, count, scales, offsets);
    for (int g = 0; g < count; g++) {
      F8 even = zero8(), odd = zero8();
      for (int64_t b = (segment + g) * blocks; b < (segment + g + 1) * blocks; b++) {
        const float* x = job.prepared->x.data() + b * BLOCK;
        F8 codes[4];
        to_floats(planes.block(b), codes);
        even = multiply_add8(codes[0], load8(x), even);
        odd = multiply_add8(codes[1], load8(x + 8), odd);
        even = multiply_add8(codes[2], load8(x + 16), even);
        odd = multiply_add8(codes[3], load8(x + 24), odd);
      }
      total = multiply_add8(all8(scales[g]), add8(even, odd), total);
    }
    for (int g = 0; g < count; g += 8) total = multiply_add8(load8(offsets + g), load8(sums + segment + g), total);
  }
  job.y[row] = sum8(total);
}

// R rows at a time, a group at a time: the codes become floats once for all vectors, and a vector's activations are
// read once for all rows. For each row and vector the same sums as in one_vector, in the same order.
template <class Row, int R>
void several_vectors(const Job& job, int64_t first) {
  const gearbx_stack& m = *job.matrix;
  const int64_t groups = m.columns / m.group;
  const int blocks = m.group / BLOCK;
  const float* sums = job.prepared->sums.data();
  alignas(32) float scales[R][SEGMENT], offsets[R][SEGMENT];
  F8 total[GEARBX_MAX_VECTORS][R], codes[R][4 * MOST_BLOCKS];
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++) total[v][r] = zero8();

  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    for (int r = 0; r < R; r++)
      scales_and_offsets(m, (first + r) * groups + segment, count, scales[r], offsets[r]);
    for (int g = 0; g < count; g++) {
      for (int r = 0; r < R; r++) {
        const Row planes(m, first + r);
        for (int b = 0; b < blocks; b++) to_floats(planes.block((segment + g) * blocks + b), codes[r] + 4 * b);
      }
      for (int v = 0; v < job.vectors; v++) {
        const float* x = job.prepared->x.data() + v * m.columns + (segment + g) * m.group;
        F8 even[R], odd[R];
        for (int r = 0; r < R; r++) even[r] = odd[r] = zero8();
        for (int b = 0; b < 4 * blocks; b += 2) {
          const F8 x_even = hold(load8(x + 8 * b)), x_odd = hold(load8(x + 8 * b + 8));
          for (int r = 0; r < R; r++) {
            even[r] = multiply_add8(codes[r][b], x_even, even[r]);
            odd[r] = multiply_add8(codes[r][b + 1], x_odd, odd[r]);
          }
        }
        for (int r = 0; r < R; r++)
          total[v][r] = multiply_add8(all8(scales[r][g]), add8(even[r], odd[r]), total[v][r]);
      }
    }
    for (int v = 0; v < job.vectors; v++)
      for (int g = 0; g < count; g += 8) {
        const F8 x = load8(sums + v * job.prepared->sums_stride + segment + g);
        for (int r = 0; r < R; r++) total[v][r] = multiply_add8(load8(offsets[r] + g), x, total[v][r]);
      }
  }
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++) job.y[v * m.rows + first + r] = sum8(total[v][r]);
}

template <class Row>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t end = job.pieces.first(piece + 1);
  int64_t row = job.pieces.first(piece);
  if (job.vectors == 1) {
    for (; row < end; row++) one_vector<Row>(job, row);
  } else {
    for (; row + 4 <= end; row += 4) several_vectors<Row, 4>(job, row);
    for (; row < end; row++) several_vectors<Row, 1>(job, row);
  }
}

struct Form {
  int widths[GEARBX_MAX_PLANES];
  void (*work)(const void*, int);
};

template <int... W>
constexpr Form form() {
  return {{W...}, do_piece<Planes<W...>>};
}

// The weights of stock quantization, and the stacks of the usual ladders.
constexpr Form FORMS[] = {
    form<1>(),    form<2>(),       form<3>(),    form<4>(),          form<5>(),       form<6>(),
    form<8>(),    form<2, 1>(),    form<2, 2>(), form<2, 4>(),       form<2, 6>(),    form<3, 1>(),
    form<3, 5>(), form<4, 1>(),    form<4, 2>(), form<4, 4>(),       form<6, 2>(),    form<2, 2, 4>(),
    form<3, 1, 4>(), form<4, 1, 1>(), form<4, 2, 2>(), form<4, 1, 1, 2>(),
};

const Form& find_form(const gearbx_stack& m) {
  static constexpr Form any = {{}, do_piece<AnyPlanes>};
  for (const Form& known : FORMS)
    if (std::memcmp(known.widths, m.widths, sizeof m.widths) == 0) return known;
  return any;
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
  share_out(job.pieces.count, find_form(*matrix).work, &job);
}

extern "C" int gearbx_threads(void) { return gearbx::thread_count(); }
