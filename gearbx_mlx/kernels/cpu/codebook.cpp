// Matrix times vectors over codebooks: eight codes at a time pick their entries from a table in registers.
//
// Eight words lie side by side, each with K codes. Shifting all of them by the place of code k brings eight codes to the
// lowest bits, K columns apart; the activations are put in that order once per call. Of a group of a library,
// sum (midpoint + scale entry) x = scale sum entry x + midpoint sum x. Outliers come last: what their codes stand for is
// taken back, and they are added. All rows and vectors go through the same operations in the same order.

#include "codebook.h"

#include <array>
#include <utility>
#include <vector>

#include "chunks.h"
#include "lookup.h"
#include "pool.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int GROUP = 128, LIBRARY = 32;
constexpr int SUMS = 4;  // as many as hide the latency of an addition

struct Job {
  const gearbx_codebook* matrix;
  const float* x;                // as given
  std::vector<float> ordered;    // per vector, `stride`
  std::vector<float> sums;       // per vector and group, `groups` of them
  std::vector<float> library;    // widened
  int64_t stride, groups;
  int vectors;
  float* y;
  Pieces pieces;
};

// A function of k for each k below K, unrolled.
template <int K, class Each>
inline void for_each_code(Each each) {
  [&]<int... k>(std::integer_sequence<int, k...>) { (each.template operator()<k>(), ...); }
  (std::make_integer_sequence<int, K>{});
}

// One codebook a row.
template <int B>
struct ByRow {
  static constexpr int BITS = B;
  static constexpr int K = B == 5 ? 6 : 32 / B;     // codes in a lane of 32 bits
  static constexpr int SPAN = 48 / K;               // blocks that are decoded at a time for several vectors
  static constexpr bool GROUPED = false;
  static constexpr int place(int k) { return B == 5 ? k / 3 * 16 + k % 3 * 5 : k * B; }
  static int64_t blocks(const gearbx_codebook& m) { return (m.row_words + LANES - 1) / LANES; }

  const gearbx_codebook& m;
  const uint32_t* words;
  alignas(32) float entries[1 << B];
  Table<B> table;
  float below = 0.0f;  // what the code of every outlier of the row stands for

  ByRow(const Job& job, int64_t row)
      : m(*job.matrix), words(m.weights + row * m.row_words), table(widened(m.codebook + (row << B))) {
    const uint32_t first = m.outlier_offsets[row];
    if (first < m.outlier_offsets[row + 1]) below = entry_at(m.outlier_columns[first]);
  }

  const float* widened(const uint16_t* halves) {
    widen_entries<B>(halves, entries);
    return entries;
  }

  Words8 block(int64_t i) const {
    const int64_t left = m.row_words - i * LANES;
    return left >= LANES ? load_words(words + i * LANES) : load_words(words + i * LANES, static_cast<int>(left));
  }

  const Table<B>& table_of(int64_t) const { return table; }

  float entry_at(int64_t column) const {
    return entries[words[column / K] >> place(static_cast<int>(column % K)) & ((1u << B) - 1)];
  }
  float stands_for(int64_t) const { return below; }
};

// Groups that name an entry of a library.
template <int B>
struct ByGroup {
  static constexpr int BITS = B;
  static constexpr int K = 4;
  static constexpr int SPAN = GROUP / BLOCK;
  static constexpr bool GROUPED = true;
  static constexpr int place(int k) { return 8 * k; }
  static int64_t blocks(const gearbx_codebook& m) { return m.row_words / B; }

  const Job& job;
  const uint8_t* bytes;
  const uint8_t* entries;
  const uint16_t *scales, *midpoints;

  ByGroup(const Job& job, int64_t row)
      : job(job),
        bytes(reinterpret_cast<const uint8_t*>(job.matrix->weights + row * job.matrix->row_words)),
        entries(job.matrix->entries + row * job.groups),
        scales(job.matrix->scales + row * job.groups),
        midpoints(job.matrix->midpoints + row * job.groups) {}

  Words8 block(int64_t i) const { return as_words(unpack<B>(bytes + i * 4 * B)); }
  const float* entry(int64_t group) const { return job.library.data() + ((entries[group] % LIBRARY) << B); }
  Table<B> table_of(int64_t group) const { return Table<B>(entry(group)); }

  float stands_for(int64_t column) const {
    const int64_t bit = column * B;
    unsigned around = bytes[bit / 8];
    if (bit % 8 + B > 8) around |= static_cast<unsigned>(bytes[bit / 8 + 1]) << 8;
    const int64_t group = column / GROUP;
    const float value = entry(group)[around >> bit % 8 & ((1u << B) - 1)];
    return multiply_add(half_to_float(scales[group]), value, half_to_float(midpoints[group]));
  }
};

// One vector's outliers of a row, added to its sum.
template <class Row>
float finish(const Job& job, const Row& row, int64_t number, const float* x, F8 total) {
  const gearbx_codebook& m = *job.matrix;
  int64_t i = m.outlier_offsets[number];
  const int64_t end = m.outlier_offsets[number + 1];
  if constexpr (!Row::GROUPED)
    for (; i + 8 <= end; i += 8) {
      const F8 off = add8(load8_fp16(m.outliers + i), all8(-row.below));
      total = multiply_add8(off, gather8(x, m.outlier_columns + i), total);
    }
  float rest = 0.0f;
  for (; i < end; i++) {
    const int64_t column = m.outlier_columns[i];
    rest = multiply_add(half_to_float(m.outliers[i]) - row.stands_for(column), x[column], rest);
  }
  return sum8(total) + rest;
}

// Adds the products of mid-points and sums of activations.
template <class Row>
F8 add_midpoints(const Job& job, const Row& row, int vector, F8 total) {
  const float* sums = job.sums.data() + vector * job.groups;
  int64_t g = 0;
  for (; g + 8 <= job.groups; g += 8) total = multiply_add8(load8_fp16(row.midpoints + g), load8(sums + g), total);
  alignas(32) float rest[8] = {};
  for (int i = 0; g < job.groups; g++, i++) rest[i] = half_to_float(row.midpoints[g]) * sums[g];
  return add8(total, load8(rest));
}

inline F8 sum_of(const F8 sums[SUMS]) { return add8(add8(sums[0], sums[1]), add8(sums[2], sums[3])); }

// R rows at a time. For several vectors, codes become floats once for all of them, SPAN blocks at a time.
template <class Row, int R, bool ONE>
void some_rows(const Job& job, int64_t first) {
  constexpr int K = Row::K, SPAN = Row::SPAN;
  const gearbx_codebook& m = *job.matrix;
  const int64_t blocks = Row::blocks(m);
  const int vectors = ONE ? 1 : job.vectors;
  F8 sums[ONE ? 1 : GEARBX_MAX_VECTORS][R][SUMS], total[ONE ? 1 : GEARBX_MAX_VECTORS][R];
  for (int v = 0; v < vectors; v++)
    for (int r = 0; r < R; r++) {
      total[v][r] = zero8();
      for (int s = 0; s < SUMS; s++) sums[v][r][s] = zero8();
    }
  const auto rows = [&]<int... r>(std::integer_sequence<int, r...>) {
    return std::array<Row, R>{Row(job, first + r)...};
  }(std::make_integer_sequence<int, R>{});

  for (int64_t span = 0; span < blocks; span += SPAN) {
    const int count = static_cast<int>(blocks - span < SPAN ? blocks - span : SPAN);
    if constexpr (ONE) {
      const auto& table = rows[0].table_of(span / SPAN);
      const float* x = job.ordered.data() + span * LANES * K;
      for (int b = 0; b < count; b++, x += LANES * K) {
        const Words8 words = rows[0].block(span + b);
        for_each_code<K>([&]<int k>() {
          sums[0][0][k % SUMS] =
              multiply_add8(table[shift_down(words, Row::place(k))], load8(x + LANES * k), sums[0][0][k % SUMS]);
        });
      }
    } else {
      F8 wide[R][SPAN * K];
      for (int r = 0; r < R; r++) {
        const auto& table = rows[r].table_of(span / SPAN);
        for (int b = 0; b < count; b++) {
          const Words8 words = rows[r].block(span + b);
          for_each_code<K>([&]<int k>() { wide[r][b * K + k] = table[shift_down(words, Row::place(k))]; });
        }
      }
      for (int v = 0; v < vectors; v++) {
        const float* x = job.ordered.data() + v * job.stride + span * LANES * K;
        F8 local[R][SUMS];
        for (int r = 0; r < R; r++)
          for (int s = 0; s < SUMS; s++) local[r][s] = sums[v][r][s];
        for (int b = 0; b < count; b++, x += LANES * K)
          for_each_code<K>([&]<int k>() {
            const F8 part = hold(load8(x + LANES * k));
            for (int r = 0; r < R; r++)
              local[r][k % SUMS] = multiply_add8(wide[r][b * K + k], part, local[r][k % SUMS]);
          });
        for (int r = 0; r < R; r++)
          for (int s = 0; s < SUMS; s++) sums[v][r][s] = local[r][s];
      }
    }
    if constexpr (Row::GROUPED)
      for (int r = 0; r < R; r++) {
        const F8 scale = all8(half_to_float(rows[r].scales[span / SPAN]));
        for (int v = 0; v < vectors; v++) {
          total[v][r] = multiply_add8(scale, sum_of(sums[v][r]), total[v][r]);
          for (int s = 0; s < SUMS; s++) sums[v][r][s] = zero8();
        }
      }
  }
  for (int v = 0; v < vectors; v++)
    for (int r = 0; r < R; r++) {
      F8 sum = total[v][r];
      if constexpr (Row::GROUPED)
        sum = add_midpoints(job, rows[r], v, sum);
      else
        sum = sum_of(sums[v][r]);
      job.y[v * m.rows + first + r] = finish(job, rows[r], first + r, job.x + v * m.columns, sum);
    }
}

template <class Row>
void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t end = job.pieces.first(piece + 1);
  int64_t row = job.pieces.first(piece);
  if (job.vectors == 1) {
    for (; row < end; row++) some_rows<Row, 1, true>(job, row);
  } else {
    for (; row + 2 <= end; row += 2) some_rows<Row, 2, false>(job, row);
    for (; row < end; row++) some_rows<Row, 1, false>(job, row);
  }
}

// Activations in the order of the codes, zeros where there is none, and their sums over groups.
template <class Row>
void prepare(Job& job) {
  constexpr int K = Row::K;
  const gearbx_codebook& m = *job.matrix;
  const int64_t blocks = Row::blocks(m);
  job.stride = blocks * LANES * K;
  job.groups = (m.columns + GROUP - 1) / GROUP;
  job.ordered.assign(static_cast<size_t>(job.vectors * job.stride), 0.0f);
  for (int v = 0; v < job.vectors; v++) {
    const float* x = job.x + v * m.columns;
    float* out = job.ordered.data() + v * job.stride;
    for (int64_t block = 0; block < blocks; block++, out += LANES * K)
      for (int k = 0; k < K; k++)
        for (int l = 0; l < LANES; l++) {
          const int64_t column = (block * LANES + l) * K + k;
          if (column < m.columns) out[LANES * k + l] = x[column];
        }
  }
  if constexpr (Row::GROUPED) {
    job.sums.assign(static_cast<size_t>(job.vectors * job.groups), 0.0f);
    for (int v = 0; v < job.vectors; v++)
      for (int64_t i = 0; i < m.columns; i++)
        job.sums[static_cast<size_t>(v * job.groups + i / GROUP)] += job.x[v * m.columns + i];
    job.library.resize(LIBRARY << Row::BITS);
    for (size_t i = 0; i < job.library.size(); i++) job.library[i] = half_to_float(m.codebook[i]);
  }
}

template <class Row>
void multiply(const gearbx_codebook& m, const float* x, int vectors, float* y) {
  Job job = {&m, x, {}, {}, {}, 0, 0, vectors, y, Pieces(m.rows, m.row_words * 4, vectors)};
  prepare<Row>(job);
  share_out(job.pieces.count, do_piece<Row>, &job);
}

using Multiply = void (*)(const gearbx_codebook&, const float*, int, float*);

Multiply kind_of(const gearbx_codebook& m) {
  if (m.entries) return m.bits == 2 ? multiply<ByGroup<2>> : m.bits == 3 ? multiply<ByGroup<3>> : multiply<ByGroup<4>>;
  switch (m.bits) {
    case 2: return multiply<ByRow<2>>;
    case 3: return multiply<ByRow<3>>;
    case 4: return multiply<ByRow<4>>;
    case 5: return multiply<ByRow<5>>;
    default: return multiply<ByRow<6>>;
  }
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_codebook_product(const gearbx_codebook* matrix, const float* x, int64_t vectors, float* y) {
  const gearbx_codebook& m = *matrix;
  const auto run = gearbx::kind_of(m);
  gearbx::in_chunks(vectors, [&](int64_t first, int n) { run(m, x + first * m.columns, n, y + first * m.rows); });
}
