// Matmuls over exact weights: a row is decoded once, and multiplied like a row of dense bf16 weights.

#include "exact.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "tile.h"
#if defined(GEARBX_AVX512) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && defined(__AVX512BITALG__)
#include "exact_avx512.h"
#elif defined(GEARBX_AVX2)
#include "exact_avx2.h"
#else
#include "exact_bytes.h"
#endif

namespace gearbx {
namespace {

inline void set_nan(float* p) { *p = NAN; }
inline void set_nan(Bf16* p) { p->bits = 0x7fc0; }

// y[row] = the row times x. The decoder's registers are kept from row to row.
template <class Codes, class X>
void multiply_one_vector(const ByRow& m, int64_t first, int64_t end, const X* x, float* y) {
  ExactRow row(m, first);
  Codes codes(row);
  for (int64_t r = first; r < end; r++) {
    row = ExactRow(m, r);
    SumsOfRow sums = {};
    codes.each32([&](int64_t column, const Weights32& weights) __attribute__((always_inline)) {
      sums = multiply_add(weights, x + column, sums);
    });
    const EvenOdd halves = join_sums(sums);
    // + 0: as dense rows, which never return -0
    y[r] = row.high.sufficed() ? sum8(add8(halves.even, halves.odd)) + 0.0f : NAN;
  }
}

// Rows are written from `weights` on. Not inlined: it is compiled once for each size of groups.
template <class Codes, class T>
__attribute__((noinline)) void decode_rows(const ByRow& m, int64_t first, int64_t end, T* weights) {
  ExactRow row(m, first);
  Codes codes(row);
  for (int64_t r = first; r < end; r++, weights += m.columns) {
    row = ExactRow(m, r);
    codes.each32([&](int64_t column, const Weights32& values) __attribute__((always_inline)) {
      store(weights + column, values);
    });
    for (int64_t i = 0; !row.high.sufficed() && i < m.columns; i++) set_nan(weights + i);
  }
}

// The memory of a thread for decoded rows.
Decoded* decoded_rows(int64_t rows, int64_t columns) {
  static thread_local Buffer<Decoded> memory;
  return memory.room_for(rows * columns);
}

// Only one matrix tile at a time, whose decoded weights stay in the first-level cache.
template <class X>
constexpr int64_t TILE = std::is_same_v<X, Paired> ? 16 : TILE_ROWS;

// The number of rows decoded at a time.
template <class X>
int64_t rows_at_once(const gearbx_exact& m, int64_t vectors) {
  return block_rows(m.rows, m.columns * static_cast<int64_t>(sizeof(Decoded)), vectors, TILE<X>);
}

constexpr int64_t SOME_ROWS = 48;  // whole panels, and whole tiles

// Calls work(matrix, row, end, y) for the rows from `row` to `end`. For panels, it first makes a matrix of some rows
// whose codes, scales and biases are row by row. `y` is the result of its first row.
template <class Y, class Work>
void by_rows(const gearbx_exact& m, int64_t row, int64_t end, int64_t at_once, Y* y, int64_t y_row, const Work& work) {
  if (!m.panel_rows) return work(ByRow{m}, row, end, y);
  static thread_local std::vector<uint32_t> codes;
  static thread_local std::vector<uint16_t> numbers;
  const int64_t height = m.panel_rows, dwords = m.columns / 8, groups = m.columns / m.group;
  codes.resize(static_cast<size_t>(at_once * dwords));
  numbers.resize(static_cast<size_t>(2 * at_once * groups));
  while (row < end) {
    const int64_t first = row / height * height, left = m.rows - first, count = at_once < left ? at_once : left;
    ByRow some(m);
    some.panel_rows = 0;
    some.rows = count;
    const auto write = [&](const uint16_t* from, uint16_t* to) {
      for (int64_t r = 0; r < count; r += height) gearbx_rows_of_words(from + (first + r) * groups, groups, to + r * groups);
      return to;
    };
    some.scales = write(m.scales, numbers.data());
    some.biases = write(m.biases, numbers.data() + at_once * groups);
    const auto* panels = reinterpret_cast<const uint32_t*>(m.codes) + first * dwords;
    for (int64_t r = 0; r < count; r += height) gearbx_rows_of_dwords(panels + r * dwords, dwords, codes.data() + r * dwords);
    some.codes = reinterpret_cast<const uint8_t*>(codes.data());
    some.ahead = m.codes + (first + count) * dwords * 4;
    some.low += first * m.columns;
    some.offsets += first;
    const int64_t last = first + count < end ? first + count : end;
    work(some, row - first, last - first, y + first * y_row);
    row = last;
  }
}

template <class Codes, class X>
struct Multiply {
  // Otherwise one vector also uses decoded rows: they are compiled for both types of activations, this for one.
  static constexpr bool WHILE_DECODING = std::is_same_v<X, RoundedForBf16>;

  static void rows(const gearbx_exact& m, const Activations<X>& x, int64_t row, int64_t end, float* y) {
    const int64_t stride = m.rows;
    if constexpr (WHILE_DECODING) {
      if (x.vectors == 1)
        return by_rows(m, row, end, m.panel_rows, y, 1, [&](const ByRow& m, int64_t row, int64_t end, float* y) {
          multiply_one_vector<Codes>(m, row, end, x.packed, y);
        });
    }
    const int64_t height = rows_at_once<X>(m, x.vectors);
    Decoded* weights = decoded_rows(height, m.columns);
    by_rows(m, row, end, SOME_ROWS, y, 1, [&](const ByRow& m, int64_t row, int64_t end, float* y) {
      for (; row < end; row += height) {
        const int64_t count = end - row < height ? end - row : height;
        decode_rows<Codes>(m, row, row + count, weights);
        multiply_rows(gearbx::Rows<Decoded>{weights, count, m.columns, {}}, x, y + row, stride);
      }
    });
  }
};

template <class Codes>
struct Decode {
  static void rows(const gearbx_exact& m, uint16_t* decoded, int64_t row, int64_t end) {
    const auto work = [&](const ByRow& m, int64_t row, int64_t end, uint16_t* decoded) {
      decode_rows<Codes>(m, row, end, reinterpret_cast<Bf16*>(decoded) + row * m.columns);
    };
    by_rows(m, row, end, m.panel_rows, decoded, m.columns, work);
  }
};

template <class Codes>
using MultiplyFloats = Multiply<Codes, ForBf16>;
template <class Codes>
using MultiplyRounded = Multiply<Codes, RoundedForBf16>;

template <class Codes>
using MultiplyPaired = Multiply<Codes, Paired>;

// The work on some rows of a matrix with groups of this size.
template <template <class> class Kernel>
auto find_work(const gearbx_exact& m) {
  if (m.group == 32) return Kernel<Decoder<32>>::rows;
  return m.group == 64 ? Kernel<Decoder<64>>::rows : Kernel<Decoder<128>>::rows;
}

template <class X>
TilePieces pieces_of(const gearbx_exact& m, int vectors) {
  const int64_t row_bytes = m.columns * 27 / 16;  // approximate
  return TilePieces(m.rows, row_bytes, rows_at_once<X>(m, vectors), vectors, TILE<X>);
}

template <template <class> class Kernel, class X>
void multiply(const gearbx_exact* const* matrices, int count, const float* x, int64_t vectors, float* const* y) {
  const auto work = [](const gearbx_exact& m, const Activations<X>& a, int64_t row, int64_t end, float* y) {
    find_work<Kernel>(m)(m, a, row, end, y);
  };
  multiply_matrices<X>(matrices, count, x, vectors, y, pieces_of<X>, work);
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_exact_products(const gearbx_exact* const* matrices, int count, const float* x, int64_t vectors,
                                      float* const* y) {
  using namespace gearbx;
  multiply_neighbors(matrices, count, x, vectors, y, [](const gearbx_exact& m) {
#ifdef GEARBX_TILES
    if (m.x_bits && tiles_allowed()) return multiply<MultiplyPaired, Paired>;
#endif
    return m.x_bits ? multiply<MultiplyRounded, RoundedForBf16> : multiply<MultiplyFloats, ForBf16>;
  });
}

extern "C" void gearbx_exact_product(const gearbx_exact* matrix, const float* x, int64_t vectors, float* y) {
  gearbx_exact_products(&matrix, 1, x, vectors, &y);
}

extern "C" void gearbx_exact_decode(const gearbx_exact* matrix, uint16_t* weights) {
  using namespace gearbx;
  share_rows(
      1, [&](int) { return pieces_of<RoundedForBf16>(*matrix, 1); },
      [&](int, int64_t row, int64_t end) { find_work<Decode>(*matrix)(*matrix, weights, row, end); });
}
