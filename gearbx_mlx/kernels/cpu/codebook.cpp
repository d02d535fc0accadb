// Matrix times vectors over codebooks. For a group with a library, sum (midpoint + scale entry) x is computed as scale
// sum entry x + midpoint sum x. Outliers come last: the product of the code in their position is subtracted, and the
// outlier's is added. All rows and vectors go through the same operations in the same order.

#include "codebook.h"

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "lookup.h"
#include "pool.h"
#include "split.h"

namespace gearbx {

// The weights of one row, block by block, without its outliers: N registers of eight floats, in an order of their own.
//
// A block has COLUMNS columns, and column(n, l) is the one in lane l of register n. The activations are put in that
// order once per call. After the last column, any weight may follow; it meets activations of zero.

constexpr int GROUP = GEARBX_CODEBOOK_GROUP, LIBRARY = GEARBX_CODEBOOK_LIBRARY;

// One codebook per row. A block is W registers of eight words; its codes fill whole registers of bytes.
template <int B>
struct ByRow {
  static constexpr bool GROUPED = false;
  static constexpr int K = B == 5 ? 6 : 32 / B;  // codes per 32-bit word
  static constexpr int W = B == 5 ? 2 : B == 6 ? 4 : 1;
  static constexpr int N = W * K, COLUMNS = 8 * N;
  static constexpr int SPAN = N >= 16 ? 2 : 4;  // blocks decoded at a time for several vectors

  static constexpr int place(int k) { return B == 5 ? k / 3 * 16 + k % 3 * 5 : k * B; }

  static constexpr int column(int n, int l) {
    if (B <= 3) return l * K + n;
    const int part = n / 4, byte = n % 4 * 8 + l, lane = byte / 4, j = byte % 4;
    if (B == 4) return 8 * lane + 2 * j + part;
    if (B == 5) return part < 2 ? part * 48 + 6 * lane + j / 2 * 3 + j % 2 : j % 2 * 48 + 6 * lane + j / 2 * 3 + 2;
    return part < 4 ? part * 40 + 5 * lane + j : j * 40 + 5 * lane + 4;
  }

  static int64_t blocks(const gearbx_codebook& m) { return (m.row_words + 8 * W - 1) / (8 * W); }

  const gearbx_codebook& m;
  const uint32_t* words;
  const uint16_t* halves;
  float below = 0.0f;  // the value of the code at outliers, equal in the whole row

  ByRow(const gearbx_codebook& matrix, int64_t row)
      : m(matrix), words(m.weights + row * m.row_words), halves(m.codebook + (row << B)), table(halves) {
    const uint32_t first = m.outlier_offsets[row];
    if (first < m.outlier_offsets[row + 1]) below = half_to_float(halves[code(m.outlier_columns[first])]);
  }

  unsigned code(int64_t column) const {
    return words[column / K] >> place(static_cast<int>(column % K)) & ((1u << B) - 1);
  }
  float weight_at(int64_t) const { return below; }
  void enter(int64_t) {}

#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)

  Words load(int64_t vector) const { return load_words(words + 8 * vector, m.row_words - 8 * vector); }

  void decode(int64_t block, F8 out[N]) const {
    const Words a = load(W * block);
    if constexpr (B <= 3) {
      for (int k = 0; k < K; k++) out[k] = table[shifted(a, -B * k)];
    } else if constexpr (B == 4) {
      table.pick(masked(a, 0, 0x0f0f0f0f), out);
      table.pick(masked(a, -4, 0x0f0f0f0f), out + 4);
    } else if constexpr (B == 5) {
      const Words b = load(W * block + 1);
      const auto two = [](Words v) { return masked(v, 0, 0x001f001f) | masked(v, 3, 0x1f001f00); };
      table.pick(two(a), out);
      table.pick(two(b), out + 4);
      table.pick(masked(a, -10, 0x001f001f) | masked(b, -2, 0x1f001f00), out + 8);
    } else {
      Words fifth = masked(a, -24, 0x3f);
      for (int p = 0; p < 4; p++) {
        const Words v = p ? load(W * block + p) : a;
        if (p) fifth = fifth | masked(v, 8 * p - 24, 0x3fu << 8 * p);
        table.pick((masked(v, 0, 0x3f) | masked(v, 2, 0x3f00)) | (masked(v, 4, 0x3f0000) | masked(v, 6, 0x3f000000)),
                   out + 4 * p);
      }
      table.pick(fifth, out + 16);
    }
  }

  std::conditional_t<(B <= 3), FloatTable<B < 3 ? 2 : 3>, HalfTable<B < 4 ? 4 : B>> table;

#else

  void decode(int64_t block, F8 out[N]) const {
    for (int n = 0; n < N; n++)
      for (int l = 0; l < 8; l++) {
        const int64_t at = block * COLUMNS + column(n, l);
        out[n][l] = at < m.columns ? half_to_float(halves[code(at)]) : 0.0f;
      }
  }

  struct None {
    explicit None(const uint16_t*) {}
  } table;

#endif
};

// A library of codebooks. A block is 32 codes; a group is four blocks.
template <int B>
struct ByGroup {
  static constexpr bool GROUPED = true;
  static constexpr int N = 4, COLUMNS = BLOCK;
  static constexpr int SPAN = GROUP / BLOCK;
  static constexpr int column(int n, int l) { return B == 4 ? 8 * n + l : 4 * l + n; }
  static int64_t blocks(const gearbx_codebook& m) { return m.row_words / B; }

  const gearbx_codebook& m;
  const uint8_t* bytes;
  const uint8_t* entries;
  const uint16_t *scales, *midpoints;

  ByGroup(const gearbx_codebook& matrix, int64_t row) : m(matrix), table(m.codebook) {
    const int64_t groups = (m.columns + GROUP - 1) / GROUP;
    bytes = reinterpret_cast<const uint8_t*>(m.weights + row * m.row_words);
    entries = m.entries + row * groups;
    scales = m.scales + row * groups;
    midpoints = m.midpoints + row * groups;
  }

  const uint16_t* entry(int64_t group) const { return m.codebook + ((entries[group] % LIBRARY) << B); }

  unsigned code(int64_t column) const {
    const int64_t bit = column * B;
    unsigned around = bytes[bit / 8];
    if (bit % 8 + B > 8) around |= static_cast<unsigned>(bytes[bit / 8 + 1]) << 8;
    return around >> bit % 8 & ((1u << B) - 1);
  }

  float weight_at(int64_t column) const {
    const int64_t group = column / GROUP;
    const float value = half_to_float(entry(group)[code(column)]);
    return multiply_add(half_to_float(scales[group]), value, half_to_float(midpoints[group]));
  }

#if defined(GEARBX_AVX2) || defined(GEARBX_NEON)

  std::conditional_t<B == 4, HalfTable<4>, FloatTable<B < 4 ? B : 3>> table;

  void enter(int64_t group) { table = decltype(table)(entry(group)); }

  void decode(int64_t block, F8 out[N]) const {
    const Bytes32 codes = unpack<B>(bytes + block * 4 * B);
    if constexpr (B == 4)
      table.pick(codes, out);
    else
      for (int k = 0; k < 4; k++) out[k] = table[shifted(words_of(codes), -8 * k)];
  }

#else

  const uint16_t* table;

  void enter(int64_t group) { table = entry(group); }

  void decode(int64_t block, F8 out[N]) const {
    for (int n = 0; n < N; n++)
      for (int l = 0; l < 8; l++) out[n][l] = half_to_float(table[code(block * COLUMNS + column(n, l))]);
  }

#endif
};

namespace {

constexpr int SUMS = 4;  // independent sums: enough to hide the latency of an addition

struct Job {
  const gearbx_codebook* matrix;
  const float* x;
  std::vector<float> ordered;  // activations in the order of the codes, `stride` per vector
  std::vector<float> sums;     // of the activations of each group, `groups` per vector
  int64_t stride, groups;
  int vectors;
  float* y;
  Pieces pieces;
};

// The result of one row and vector: its sum, with the outliers added.
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
    rest = multiply_add(half_to_float(m.outliers[i]) - row.weight_at(column), x[column], rest);
  }
  return sum8(total) + rest;
}

// total plus the products of mid-points and sums of activations.
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

// R rows at a time. For several vectors, the codes of SPAN blocks at a time are decoded once for all of them.
template <class Row, int R, bool ONE>
void some_rows(const Job& job, int64_t first) {
  constexpr int N = Row::N, SPAN = Row::SPAN, MOST = ONE ? 1 : GEARBX_MAX_VECTORS;
  const gearbx_codebook& m = *job.matrix;
  const int64_t blocks = Row::blocks(m);
  const int vectors = ONE ? 1 : job.vectors;
  F8 sums[MOST][R][SUMS], total[MOST][R];
  for (int v = 0; v < vectors; v++)
    for (int r = 0; r < R; r++) {
      total[v][r] = zero8();
      for (int s = 0; s < SUMS; s++) sums[v][r][s] = zero8();
    }
  auto rows = [&]<int... r>(std::integer_sequence<int, r...>) {
    return std::array<Row, R>{Row(m, first + r)...};
  }(std::make_integer_sequence<int, R>{});

  for (int64_t span = 0; span < blocks; span += SPAN) {
    const int count = static_cast<int>(blocks - span < SPAN ? blocks - span : SPAN);
    for (Row& row : rows) row.enter(span / SPAN);
    if constexpr (ONE) {
      const float* x = job.ordered.data() + span * 8 * N;
      for (int b = 0; b < count; b++, x += 8 * N) {
        F8 wide[N];
        rows[0].decode(span + b, wide);
        for (int n = 0; n < N; n++)
          sums[0][0][n % SUMS] = multiply_add8(wide[n], load8(x + 8 * n), sums[0][0][n % SUMS]);
      }
    } else {
      F8 wide[R][SPAN][N];
      for (int r = 0; r < R; r++)
        for (int b = 0; b < count; b++) rows[r].decode(span + b, wide[r][b]);
      for (int v = 0; v < vectors; v++) {
        const float* x = job.ordered.data() + v * job.stride + span * 8 * N;
        F8 local[R][SUMS];
        for (int r = 0; r < R; r++)
          for (int s = 0; s < SUMS; s++) local[r][s] = sums[v][r][s];
        for (int b = 0; b < count; b++, x += 8 * N)
          for (int n = 0; n < N; n++) {
            const F8 part = hold(load8(x + 8 * n));
            for (int r = 0; r < R; r++) local[r][n % SUMS] = multiply_add8(wide[r][b][n], part, local[r][n % SUMS]);
          }
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
      F8 sum = sum_of(sums[v][r]);
      if constexpr (Row::GROUPED) sum = add_midpoints(job, rows[r], v, total[v][r]);
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

// Reorders the activations like the codes, with zeros beyond the columns, and sums them over groups.
template <class Row>
void prepare(Job& job) {
  constexpr int N = Row::N;
  const gearbx_codebook& m = *job.matrix;
  const int64_t blocks = Row::blocks(m);
  job.stride = blocks * 8 * N;
  job.groups = (m.columns + GROUP - 1) / GROUP;
  job.ordered.assign(static_cast<size_t>(job.vectors * job.stride), 0.0f);
  for (int v = 0; v < job.vectors; v++) {
    const float* x = job.x + v * m.columns;
    float* out = job.ordered.data() + v * job.stride;
    for (int64_t block = 0; block < blocks; block++, out += 8 * N)
      for (int n = 0; n < N; n++)
        for (int l = 0; l < 8; l++) {
          const int64_t column = block * Row::COLUMNS + Row::column(n, l);
          if (column < m.columns) out[8 * n + l] = x[column];
        }
  }
  if constexpr (Row::GROUPED) {
    job.sums.assign(static_cast<size_t>(job.vectors * job.groups), 0.0f);
    for (int v = 0; v < job.vectors; v++)
      for (int64_t i = 0; i < m.columns; i++)
        job.sums[static_cast<size_t>(v * job.groups + i / GROUP)] += job.x[v * m.columns + i];
  }
}

template <class Row>
void multiply(const gearbx_codebook& m, const float* x, int vectors, float* y) {
  Job job = {&m, x, {}, {}, 0, 0, vectors, y, Pieces(m.rows, m.row_words * 4, vectors)};
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
