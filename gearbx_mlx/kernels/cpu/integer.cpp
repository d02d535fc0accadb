// The products of stack.cpp with activations of 8 or 16 bits, so that codes need not become floats. For a group,
//
//   sum_i (scale code_i + bias) x_i  ~  step (scale sum_i code_i q_i + bias sum_i q_i),   x_i ~ step q_i
//
// Activations have a step for each vector and group of inputs. The largest activation of a group is 127 steps, or 32384
// with two bytes, which is far finer than bfloat16. Both sums are exact, and both are over the rounded activations:
// codes are not centered, so that rounding errors would not cancel if the second sum were over the original ones.
//
// The planes of a stack are added one after the other, each with its own place value; their codes are never combined.

#include <bit>
#include <cmath>
#include <vector>

#include "dot.h"
#include "planes.h"
#include "pool.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int ORDERS = 4;  // of the activations: for planes of 1, 2 and 4 bits, and for other planes
constexpr int MOST_LANES = 8;
constexpr int AHEAD = 2048;  // distance of the prefetch, in bytes: about a row and a half of 4 bits

constexpr int order_of(int width) { return width == 1 ? 0 : width == 2 ? 1 : width == 4 ? 2 : 3; }

// The activations as bytes, in each order that a plane needs: per unit, per vector, in the order of its registers of
// codes, with zeros up to a whole unit. Per vector and group: the step, and the sum of the rounded activations.
struct Activations {
  std::vector<int32_t> whole;  // activations in steps
  std::vector<int8_t> ordered[ORDERS];
  std::vector<float> steps, sums, padded;
  int64_t stride;  // from one vector's steps and sums to the next: whole registers of groups
};

// Writes the activations of a group in steps, `most` for the largest, and returns the step. If an activation is not
// finite, the step is NaN, and with it all results of the vector. The loops have no branches, so that the compiler
// vectorizes them.
float quantize_group(const float* x, int group, int32_t most, int32_t* out) {
  constexpr uint32_t INFINITE = 0x7f800000;
  uint32_t largest = 0;  // magnitudes as bits, which have the order of the numbers, with NaN above infinity
  for (int i = 0; i < group; i++) {
    const uint32_t size = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  const float step = std::bit_cast<float>(largest) / static_cast<float>(most);
  const bool finite = largest < INFINITE, some = finite && step >= 0x1p-126f;
  const float inverse = some ? 1.0f / step : 0.0f;
  constexpr float ROUND = 0x1.8p23f;  // adding it to a number rounds that to an integer
  for (int i = 0; i < group; i++)
    out[i] = std::bit_cast<int32_t>((some ? x[i] : 0.0f) * inverse + ROUND) - std::bit_cast<int32_t>(ROUND);
  return finite ? (some ? step : 0.0f) : NAN;
}

// The first of two bytes: the nearest multiple of BASE. The remainder fits the second byte.
inline int first_byte(int32_t whole) { return (whole + BASE / 2 + BASE * 128) / BASE - 128; }

template <int W, int BYTES>
void put_in_order(const Activations& a, int64_t columns, int vectors, std::vector<int8_t>& out) {
  constexpr int CODES = Unit<W>::CODES;
  const int64_t units = (columns + CODES - 1) / CODES;
  out.resize(static_cast<size_t>(units * CODES * vectors * BYTES));
  for (int64_t u = 0; u < units; u++)
    for (int v = 0; v < vectors; v++) {
      const int32_t* from = a.whole.data() + v * columns + u * CODES;
      int32_t rest[CODES] = {};
      if ((u + 1) * CODES > columns) {
        std::memcpy(rest, from, static_cast<size_t>(columns - u * CODES) * 4);
        from = rest;
      }
      int8_t* to = out.data() + (u * vectors + v) * CODES * BYTES;
      for (int k = 0; k < Unit<W>::REGISTERS; k++)
        for (int i = 0; i < 32; i++) {
          const int32_t q = from[input_at<W>(k, i)];
          if constexpr (BYTES == 1) {
            to[32 * k + i] = static_cast<int8_t>(q);
          } else {
            const int first = first_byte(q);
            to[32 * k + i] = static_cast<int8_t>(first);
            to[CODES + 32 * k + i] = static_cast<int8_t>(q - BASE * first);
          }
        }
    }
}

template <int BYTES>
void quantize(const gearbx_stack& m, const float* x, int vectors, Activations& out) {
  constexpr int32_t MOST = BYTES == 1 ? 127 : 127 * BASE + BASE / 2 - 1;
  const int64_t groups = m.columns / m.group;
  x = padded(m, x, vectors, out.padded);
  out.stride = (groups + 7) / 8 * 8;
  const size_t size = static_cast<size_t>(vectors * out.stride);
  out.whole.resize(static_cast<size_t>(vectors * m.columns));
  out.steps.assign(size, 0.0f);
  out.sums.assign(size, 0.0f);
  for (int v = 0; v < vectors; v++)
    for (int64_t g = 0; g < groups; g++) {
      int32_t* whole = out.whole.data() + v * m.columns + g * m.group;
      const size_t at = static_cast<size_t>(v * out.stride + g);
      const float step = quantize_group(x + v * m.columns + g * m.group, m.group, MOST, whole);
      int32_t total = 0;
      for (int i = 0; i < m.group; i++) total += whole[i];
      out.steps[at] = step;
      out.sums[at] = step * static_cast<float>(total);
    }
  bool done[ORDERS] = {};
  for (int p = 0; p < m.planes; p++) {
    const int order = order_of(m.widths[p]);
    if (done[order]) continue;
    done[order] = true;
    std::vector<int8_t>& ordered = out.ordered[order];
    if (order == 0) put_in_order<1, BYTES>(out, m.columns, vectors, ordered);
    if (order == 1) put_in_order<2, BYTES>(out, m.columns, vectors, ordered);
    if (order == 2) put_in_order<4, BYTES>(out, m.columns, vectors, ordered);
    if (order == 3) put_in_order<8, BYTES>(out, m.columns, vectors, ordered);
  }
}

// Scale times step of some groups, per vector; zeros after the last group, up to the end of a unit.
typedef float Factors[SEGMENT + MOST_LANES];

// Some groups of a plane's row.
struct Part {
  const uint8_t* row;
  int64_t bytes;          // of the row
  int64_t first, end;     // columns
  const int8_t* x;        // in the plane's order
  const Factors* factors;  // of each vector
  int group, vectors;     // of all vectors in x
  bool flip;  // codes of eight bits are stored signed and products take unsigned ones, or the reverse
};

// Adds a plane's products to the totals of N vectors. R lanes of a unit's sums belong to one group. Activations have X
// bytes.
template <int W, int R, int N, int X>
void add_plane(const Part& part, F8* totals) {
  constexpr int CODES = Unit<W>::CODES, BYTES = Unit<W>::BYTES;
  // In registers, and two for each vector, so that an addition need not wait for the one before.
  F8 even[N], odd[N];
  for (int v = 0; v < N; v++) {
    even[v] = totals[v];
    odd[v] = zero8();
  }
  // A unit has 8 / R groups, or a group has several units.
  const int units = part.group / CODES, shift = units == 4 ? 2 : units == 2 ? 1 : 0;
  const auto add_unit = [&](int64_t unit, const uint8_t* bytes, F8* total) __attribute__((always_inline)) {
    Bytes32 codes[Unit<W>::REGISTERS];
    load_codes<W>(bytes, codes);
    if constexpr (W == 8)
      if (part.flip) codes[0] = flip_signs(codes[0]);
    const int64_t before = unit - part.first / CODES, group = R == 8 ? before >> shift : before * (8 / R);
    const int8_t* x = part.x + unit * CODES * X * part.vectors;
    for (int v = 0; v < N; v++)
      total[v] = multiply_add8(spread<R>(part.factors[v] + group),
                               to_floats(products<W, X>(codes, x + v * CODES * X)), total[v]);
  };
  int64_t unit = part.first / CODES;
  const int64_t whole = part.end / CODES < part.bytes / BYTES ? part.end / CODES : part.bytes / BYTES;
  for (; unit + 2 <= whole; unit += 2) {
    __builtin_prefetch(part.row + unit * BYTES + AHEAD);
    add_unit(unit, part.row + unit * BYTES, even);
    add_unit(unit + 1, part.row + (unit + 1) * BYTES, odd);
  }
  if (unit < whole) {
    add_unit(unit, part.row + unit * BYTES, even);
    unit++;
  }
  for (; unit * CODES < part.end; unit++) {  // where the row ends within a unit
    uint8_t rest[BYTES] = {};
    const int64_t left = part.bytes - unit * BYTES;
    if (left > 0) std::memcpy(rest, part.row + unit * BYTES, static_cast<size_t>(left < BYTES ? left : BYTES));
    add_unit(unit, rest, even);
  }
  for (int v = 0; v < N; v++) totals[v] = add8(even[v], odd[v]);
}

template <int N, int X>
void add_plane(int width, const Part& part, F8* total) {
  const int units_lanes = part.group / 4;  // lanes of a group, where a unit is 32 codes
  switch (width) {
    case 1: return units_lanes == 8 ? add_plane<1, 1, N, X>(part, total)
                   : units_lanes == 16 ? add_plane<1, 2, N, X>(part, total) : add_plane<1, 4, N, X>(part, total);
    case 2: return units_lanes == 8 ? add_plane<2, 2, N, X>(part, total)
                   : units_lanes == 16 ? add_plane<2, 4, N, X>(part, total) : add_plane<2, 8, N, X>(part, total);
    case 4: return units_lanes == 8 ? add_plane<4, 4, N, X>(part, total) : add_plane<4, 8, N, X>(part, total);
    case 3: return add_plane<3, 8, N, X>(part, total);
    case 5: return add_plane<5, 8, N, X>(part, total);
    case 6: return add_plane<6, 8, N, X>(part, total);
    default: return add_plane<8, 8, N, X>(part, total);
  }
}

constexpr int codes_of_a_unit(int width) { return divides_a_byte(width) ? 256 / width : 32; }

struct Job {
  const gearbx_stack* matrix;
  const Activations* activations;
  int vectors;
  float* y;
  Pieces pieces;
};

// One row, for all vectors, a few at a time. The operations for a vector do not depend on other vectors.
template <int MOST, int X>
void one_row(const Job& job, int64_t row) {
  const gearbx_stack& m = *job.matrix;
  const Activations& a = *job.activations;
  const int vectors = job.vectors;
  const int64_t groups = m.columns / m.group;
  const bool one_byte = m.widths[0] == 8, symmetric = m.kind != GEARBX_AFFINE;
  // Corrects the offset where products take signed codes of eight bits: these are 128 below the unsigned ones.
  const float middle = one_byte && SIGNED_BYTES ? 128.0f : 0.0f;
  alignas(32) float scales[SEGMENT], offsets[SEGMENT];
  alignas(32) Factors factors[MOST];
  F8 total[MOST];
  for (int v = 0; v < vectors; v++) total[v] = zero8();
  for (int64_t segment = 0; segment < groups; segment += SEGMENT) {
    const int count = static_cast<int>(groups - segment < SEGMENT ? groups - segment : SEGMENT);
    scales_and_offsets(m, row, segment, count, scales, offsets);
    for (int v = 0; v < vectors; v++) {
      for (int g = 0; g < count; g += 8) {
        const int64_t at = v * a.stride + segment + g;
        const F8 scale = load8(scales + g);
        const F8 offset = multiply_add8(scale, all8(middle), load8(offsets + g));
        store8(factors[v] + g, multiply8(scale, load8(a.steps.data() + at)));
        total[v] = multiply_add8(offset, load8(a.sums.data() + at), total[v]);
      }
      store8(factors[v] + (count + 7) / 8 * 8, zero8());
    }
    // From the lowest plane to the highest: the factors begin as those of the lowest plane.
    for (int p = m.planes - 1; p >= 0; p--) {
      const int width = m.widths[p];
      const int64_t bytes = symmetric ? m.row_bytes : m.columns / 8 * width;
      Part part = {static_cast<const uint8_t*>(m.weights[p]) + row * bytes,
                         bytes,
                         segment * m.group,
                         (segment + count) * m.group,
                         a.ordered[order_of(width)].data(),
                         factors,
                         m.group,
                         vectors,
                         symmetric != SIGNED_BYTES};
      int v = 0;
      const auto add = [&](auto plane, int n) {
        for (; v + n <= vectors; v += n) {
          plane(width, part, total + v);
          part.x += n * X * codes_of_a_unit(width);
          part.factors += n;
        }
      };
      if constexpr (MOST > 1) add(add_plane<4, X>, 4);
      add(add_plane<1, X>, 1);
      if (p)
        for (int v = 0; v < vectors; v++)
          for (int g = 0; g < count; g += 8)
            store8(factors[v] + g, multiply8(load8(factors[v] + g), all8(static_cast<float>(1 << width))));
    }
  }
  for (int v = 0; v < vectors; v++) job.y[v * m.rows + row] = sum8(total[v]);
}

template <int X>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t end = job.pieces.first(piece + 1);
  for (int64_t row = job.pieces.first(piece); row < end; row++)
    job.vectors == 1 ? one_row<1, X>(job, row) : one_row<GEARBX_MAX_VECTORS, X>(job, row);
}

}  // namespace

void integer_matvec(const gearbx_stack& matrix, const float* x, int vectors, float* y) {
  static thread_local Activations activations;
  const bool one_byte = matrix.x_bits == 8;
  one_byte ? quantize<1>(matrix, x, vectors, activations) : quantize<2>(matrix, x, vectors, activations);
  const Job job = {&matrix, &activations, vectors, y, Pieces(matrix.rows, row_bytes(matrix), 1)};
  share_out(job.pieces.count, one_byte ? do_piece<1> : do_piece<2>, &job);
}

}  // namespace gearbx
