// Products of stacks with activations of 8 or 16 bits, so that codes need not become floats. For a group,
//
//   sum_i (scale code_i + bias) x_i  ~  step (scale sum_i code_i q_i + bias sum_i q_i),   x_i ~ step q_i
//
// Both sums are exact, and both are over the rounded activations: codes are not centered, so that rounding errors would
// not cancel if the second sum were over the original ones. A result is the sum of its groups, in their order.
//
// LANES rows at a time become a panel (panel.h), which is multiplied with all vectors, so that weights are read from
// memory once. The rows of a panel are neighbours in memory, and the next ones are read meanwhile. One vector goes row
// by row (one_vector.h).

#include "integer.h"

#include <utility>
#include <vector>

#include "chunks.h"
#include "one_vector.h"
#include "split.h"

namespace gearbx {
namespace {

struct Matrix {
  const gearbx_stack* stack;
  float* y;
  Unpacking how;
  Pieces pieces;
};

struct Job {
  const Matrix* matrices;
  int count;
  Rounded x;
  int64_t vectors;
  bool row_by_row;
};

// The codes of the next LANES rows, as much of them as a panel has. Memory is asked for them, in one stream of a plane,
// while the panel is multiplied: to write a panel takes too little time to wait for the next one.
class Ahead {
 public:
  Ahead() = default;

  Ahead(const gearbx_stack& m, int64_t row, int64_t column) : planes_(m.planes) {
    for (int p = 0; p < planes_; p++) {
      const int64_t bytes = bytes_of_row(m, p);
      size_[p] = RUN * LANES / 2 * m.widths[p];
      next_[p] = static_cast<const char*>(m.weights[p]) + row * bytes + LANES * (bytes + column / 8 * m.widths[p]);
    }
  }

  // The share of a run.
  GEARBX_INLINE void fetch() {
    for (int p = 0; p < planes_; p++, next_[p - 1] += size_[p - 1])
      for (int at = 0; at < size_[p]; at += 64) __builtin_prefetch(next_[p] + at, 0, 2);
  }

 private:
  int planes_ = 0, size_[GEARBX_MAX_PLANES];
  const char* next_[GEARBX_MAX_PLANES];
};

// Adds the products of N vectors and `groups` groups to the totals. Activations have X bytes.
template <int N, int X, bool NARROW>
void multiply(const Panel& panel, int groups, int group, bool affine, Rounded x, Ahead ahead, float* totals) {
  const uint8_t* codes = panel.codes;
  Floats total[N];
  for (int v = 0; v < N; v++) total[v] = load_floats(totals + v * LANES);
  for (int g = 0; g < groups; g++, x.starts += N, x.steps += N, x.sums += N) {
    Ints sums[N][X];
    for (int v = 0; v < N; v++) {
      for (int b = 0; b < X; b++) sums[v][b] = zero_ints();
      sums[v][X - 1] = all_ints(x.starts[v]);
    }
    for (int run = 0; run < group; run += 4 * RUN) {
      ahead.fetch();
      Sums<NARROW> some[N * X];
      for (int v = 0; v < N; v++)
        for (int b = 0; b < X; b++) some[v * X + b].begin(sums[v][b]);
      for (int step = 0; step < RUN; step++, codes += 4 * LANES, x.x += N * X * 4) {
        add_all<N * X>(load_ints(codes), x.x, some);
      }
      for (int v = 0; v < N; v++)
        for (int b = 0; b < X; b++) sums[v][b] = some[v * X + b].end(sums[v][b]);
    }
    const Floats scale = load_floats(panel.scales + g * LANES), offset = load_floats(panel.offsets + g * LANES);
    for (int v = 0; v < N; v++) {
      if (X == 2) sums[v][1] = add_ints(sums[v][1], multiply_ints(sums[v][0], BASE));
      const Floats sum = multiply_floats(to_floats(sums[v][X - 1]), all_floats(x.steps[v]));
      const Floats added = affine ? multiply_add_floats(sum, scale, multiply_floats(offset, all_floats(x.sums[v])))
                                  : multiply_floats(sum, scale);
      total[v] = add_floats(total[v], added);
    }
  }
  for (int v = 0; v < N; v++) store_floats(totals + v * LANES, total[v]);
}

typedef void (*Multiply)(const Panel&, int groups, int group, bool affine, Rounded, Ahead, float* totals);

template <int X, bool NARROW, size_t... N>
Multiply find_multiply(int vectors, std::index_sequence<N...>) {
  static constexpr Multiply forms[] = {multiply<N + 1, X, NARROW>...};
  return forms[vectors - 1];
}

Multiply find_multiply(int vectors, int bytes, bool narrow) {
  const auto counts = std::make_index_sequence<TILE>();
  if (SIGNED_BYTES && narrow)
    return bytes == 1 ? find_multiply<1, SIGNED_BYTES>(vectors, counts)
                      : find_multiply<2, SIGNED_BYTES>(vectors, counts);
  return bytes == 1 ? find_multiply<1, false>(vectors, counts) : find_multiply<2, false>(vectors, counts);
}

// All vectors times LANES rows or fewer.
void multiply_rows(const Job& job, const Matrix& matrix, int64_t row, int height, float* totals) {
  const gearbx_stack& m = *matrix.stack;
  const int64_t groups = m.columns / m.group;
  const int bytes = m.x_bits / 8, most = groups_of_panel(m);
  std::memset(totals, 0, static_cast<size_t>(job.vectors * LANES) * 4);
  Panel panel;
  for (int64_t first = 0; first < groups; first += most) {
    const int count = static_cast<int>(groups - first < most ? groups - first : most);
    write_panel(m, matrix.how, row, height, first, count, panel);
    for (int64_t v = 0; v < job.vectors; v += TILE) {
      const int n = static_cast<int>(job.vectors - v < TILE ? job.vectors - v : TILE);
      const int64_t at = v * groups + first * n;  // of the tile's first vector and group
      const Rounded x = {job.x.x + at * m.group * bytes, job.x.starts + at, job.x.steps + at, job.x.sums + at};
      const Multiply multiply = find_multiply(n, bytes, matrix.how.bits <= 4);
      const Ahead ahead = v ? Ahead() : Ahead(m, row, first * m.group);
      multiply(panel, count, m.group, m.kind == GEARBX_AFFINE, x, ahead, totals + v * LANES);
    }
  }
  for (int64_t v = 0; v < job.vectors; v++)
    std::memcpy(matrix.y + v * m.rows + row, totals + v * LANES, static_cast<size_t>(height) * 4);
}

void do_piece(const void* context, int piece) {
  static thread_local Buffer<float> totals;
  const Job& job = *static_cast<const Job*>(context);
  const Matrix* matrix = job.matrices;
  for (; piece >= matrix->pieces.count; matrix++) piece -= matrix->pieces.count;
  const int64_t end = matrix->pieces.first(piece + 1);
#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)
  if (job.row_by_row) {
    OneVector work(*matrix->stack, matrix->how, job.x);
    for (int64_t row = matrix->pieces.first(piece); row < end; row += LANES)
      work.multiply(row, static_cast<int>(end - row < LANES ? end - row : LANES), matrix->y + row);
    return;
  }
#endif
  float* room = totals.room_for(job.vectors * LANES);
  for (int64_t row = matrix->pieces.first(piece); row < end; row += LANES)
    multiply_rows(job, *matrix, row, static_cast<int>(end - row < LANES ? end - row : LANES), room);
}

// Whether rows are read one after the other: for one vector, unless rows are so short that most of the sums over LANES
// groups would be of nothing.
bool reads_row_by_row(const gearbx_stack& m, int64_t vectors) {
  return ROW_BY_ROW && vectors == 1 && 2 * m.columns > int64_t{LANES} * m.group;
}

Rounding rounding_of(const gearbx_stack& m, int64_t vectors) {
  const Unpacking how(m);
  return {inputs_of(m), m.columns, m.group, m.x_bits / 8, how.in_byte, how.middle, reads_row_by_row(m, vectors)};
}

void multiply_some(const gearbx_stack* const* stacks, int count, const float* x, int64_t vectors, float* const* y) {
  static thread_local std::vector<Matrix> matrices;
  for (int done = 0; done < count;) {
    const Rounding rounding = rounding_of(*stacks[done], vectors);
    matrices.clear();
    int pieces = 0;
    for (; done < count && rounding_of(*stacks[done], vectors) == rounding; done++) {
      const gearbx_stack& m = *stacks[done];
      matrices.push_back({&m, y[done], Unpacking(m), Pieces(m.rows, row_bytes(m), vectors, LANES)});
      pieces += matrices.back().pieces.count;
    }
    const Job job = {matrices.data(), static_cast<int>(matrices.size()), round_all(rounding, x, vectors), vectors,
                     rounding.row_by_row};
    share_out(pieces, do_piece, &job);
  }
}

}  // namespace

void integer_products(const gearbx_stack* const* stacks, int count, const float* x, int64_t vectors, float* const* y) {
  static thread_local std::vector<float*> results;
  const auto some = [&](int64_t first, int n) {
    results.clear();
    for (int i = 0; i < count; i++) results.push_back(y[i] + first * stacks[i]->rows);
    multiply_some(stacks, count, x + first * inputs_of(*stacks[0]), n, results.data());
  };
  in_chunks(vectors, some, MOST_AT_ONCE);
}

}  // namespace gearbx
