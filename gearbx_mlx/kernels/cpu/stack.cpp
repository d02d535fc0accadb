// Matrix times vectors over a stack of bit planes, an affine weight of MLX (one plane), or symmetric codes.
//
// For a group, sum_i (scale code_i + bias) x_i = scale * sum_i code_i x_i + bias * sum_i x_i, and only the first sum
// needs an operation for every weight. All rows and vectors go through the same operations in the same order.

#include <vector>

#include "codes.h"
#include "matvec.h"
#include "pool.h"
#include "products.h"
#include "split.h"

namespace gearbx {

// Reads the rows of a stack of bit planes: codes one block at a time, scales one segment of groups at a time.

constexpr int SEGMENT = 64;               // groups whose scales are converted at a time
constexpr int MAX_BLOCKS = 128 / BLOCK;  // in a group

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

// One row of symmetric codes, made unsigned. It may end within a block: activations of missing codes are zero.
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

// Finds Kernel<Row>::piece for the planes of a matrix. MLX's weights and the stacks of common ladders have specialized
// forms; one general form serves all other stacks.
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

// Activations in the order of unpacked codes (codes.h), once per call. x: per group, per vector, per block, lane l of
// register k is input 4 l + k divided by PLACE[k]. The vectors of a group are neighbors, since vectors a power of two
// apart would compete for the same cache lines. sums: of the activations, per vector and group, with zeros up to
// whole registers; they are multiplied by the offset that a group's weights share.
struct Prepared {
  std::vector<float> x, sums, padded;
  int64_t sums_stride;
};

inline void prepare(const gearbx_stack& matrix, const float* x, int vectors, Prepared& out) {
  const int64_t columns = matrix.columns, groups = columns / matrix.group;
  x = padded(matrix, x, vectors, out.padded);
  out.sums_stride = (groups + 7) / 8 * 8;
  out.x.resize(static_cast<size_t>(vectors * columns));
  out.sums.assign(static_cast<size_t>(vectors * out.sums_stride), 0.0f);
  for (int v = 0; v < vectors; v++) {
    const float* from = x + v * columns;
    for (int64_t g = 0; g < groups; g++) {
      float* to = out.x.data() + (g * vectors + v) * matrix.group;
      for (int block = 0; block < matrix.group; block += BLOCK)
        for (int k = 0; k < 4; k++)
          for (int l = 0; l < 8; l++)
            to[block + 8 * k + l] = from[g * matrix.group + block + 4 * l + k] * (1.0f / PLACE[k]);
      F8 sum = zero8();
      for (int i = 0; i < matrix.group; i += 8) sum = add8(sum, load8(from + g * matrix.group + i));
      out.sums[static_cast<size_t>(v * out.sums_stride + g)] = sum8(sum);
    }
  }
}

namespace {

struct Job {
  const gearbx_stack* matrix;
  const Prepared* prepared;
  int vectors;
  float* y;
  Pieces pieces;
};

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
    scales_and_offsets(m, row, segment, count, scales, offsets);
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

// R rows at a time, one group at a time. Codes become floats once for all vectors, and a vector's activations are read
// once for all rows. For each row and vector, the sums equal one_vector's, in the same order.
template <class Row, int R>
void several_vectors(const Job& job, int64_t first) {
  const gearbx_stack& m = *job.matrix;
  const int64_t groups = m.columns / m.group;
  const int blocks = m.group / BLOCK;
  const float* sums = job.prepared->sums.data();
  alignas(32) float scales[R][SEGMENT], offsets[R][SEGMENT];
  F8 total[GEARBX_MAX_VECTORS][R], codes[R][4 * MAX_BLOCKS];
  for (int v = 0; v < job.vectors; v++)
    for (int r = 0; r < R; r++) total[v][r] = zero8();

  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    for (int r = 0; r < R; r++) scales_and_offsets(m, first + r, segment, count, scales[r], offsets[r]);
    for (int g = 0; g < count; g++) {
      for (int r = 0; r < R; r++) {
        const Row planes(m, first + r);
        for (int b = 0; b < blocks; b++) to_floats(planes.block((segment + g) * blocks + b), codes[r] + 4 * b);
      }
      const float* x = job.prepared->x.data() + (segment + g) * job.vectors * m.group;
      for (int v = 0; v < job.vectors; v++, x += m.group) {
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
struct WeightOnly {
  static void piece(const void* context, int piece) {
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
};

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_stack_matvec(const gearbx_stack* matrix, const float* x, int vectors, float* y) {
  using namespace gearbx;
  if (matrix->x_bits) return integer_products(&matrix, 1, x, vectors, &y);
  static thread_local Prepared prepared;
  prepare(*matrix, x, vectors, prepared);
  const Job job = {matrix, &prepared, vectors, y, Pieces(matrix->rows, row_bytes(*matrix), vectors)};
  share_out(job.pieces.count, find_work<WeightOnly>(*matrix), &job);
}

extern "C" int gearbx_threads(void) { return gearbx::thread_count(); }
