// Products over exact weights: a row is decoded once, and multiplied as a row of dense bf16 weights would be.

#include "exact.h"

#include <cmath>
#include <vector>

#include "chunks.h"
#include "tile.h"
#if defined(GEARBX_AVX512) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && defined(__AVX512BITALG__)
#include "exact_planes_avx512.h"
#define GEARBX_EXACT_AVX512 1
#else
#include "exact_bytes.h"
#include "exact_planes.h"
#endif

namespace gearbx {
namespace {

#ifdef GEARBX_EXACT_AVX512
template <int GROUP>
using PlanesDecoder = Planes64<GROUP>;
#else
template <int GROUP>
using PlanesDecoder = Planes32<GROUP>;
#endif

// Calls use(column, weights) for each 16 weights of a row. False if the row's bytes did not suffice.
template <class Codes, class Use>
GEARBX_INLINE bool each16(const gearbx_exact& m, int64_t number, Use use) {
  ExactRow row(m, number);
  Codes(row).each16(use);
  return row.high.sufficed();
}

template <class Codes>
float multiply_row(const gearbx_exact& m, int64_t row, const float* x) {
  F16 sums = {};
  const bool right = each16<Codes>(m, row, [&](int64_t column, F16 weights) __attribute__((always_inline)) {
    sums = multiply_add16(weights, load16(x + column), sums);
  });
  const EvenOdd halves = in_halves(sums);
  return right ? sum8(add8(halves.even, halves.odd)) + 0.0f : NAN;  // + 0: as dense rows, which never give -0
}

template <class Codes>
void decode_row(const gearbx_exact& m, int64_t row, float* weights) {
  const bool right = each16<Codes>(m, row, [&](int64_t column, F16 values) __attribute__((always_inline)) {
    store16(weights + column, values);
  });
  for (int64_t i = 0; !right && i < m.columns; i++) weights[i] = NAN;
}

// The memory of a thread for decoded rows.
float* decoded_rows(int64_t rows, int64_t columns) {
  static thread_local std::vector<float> memory;
  return reserve(memory, rows * columns);
}

constexpr int64_t SOME_ROWS = 48;  // whole panels, and whole tiles

// Calls work(matrix, row, end, y) for the rows from `row` to `end`, some at a time where they are in panels: of those it
// makes a matrix whose codes, scales and biases are row after row. `y` is the result of its first row.
template <class Y, class Work>
void by_rows(const gearbx_exact& m, int64_t row, int64_t end, int64_t at_once, Y* y, int64_t y_row, const Work& work) {
  if (!m.panel_rows) return work(m, row, end, y);
  static thread_local std::vector<uint32_t> codes;
  static thread_local std::vector<uint16_t> numbers;
  const int64_t height = m.panel_rows, dwords = m.columns * m.bits / 32, groups = m.columns / m.group;
  codes.resize(static_cast<size_t>(m.planes * at_once * dwords));
  numbers.resize(static_cast<size_t>((1 + m.planes) * at_once * groups));
  while (row < end) {
    const int64_t first = row / height * height, left = (m.rows - first), count = at_once < left ? at_once : left;
    gearbx_exact some = m;
    some.panel_rows = 0;
    some.rows = count;
    uint16_t* values = numbers.data();
    const auto write = [&](const uint16_t* from) {
      for (int64_t r = 0; r < count; r += height) gearbx_rows_of_words(from + (first + r) * groups, groups, values + r * groups);
      values += at_once * groups;
      return values - at_once * groups;
    };
    some.scales = write(m.scales);
    for (int p = 0; p < m.planes; p++) {
      some.biases[p] = write(m.biases[p]);
      uint32_t* words = codes.data() + p * at_once * dwords;
      for (int64_t r = 0; r < count; r += height)
        gearbx_rows_of_dwords(reinterpret_cast<const uint32_t*>(m.weights[p]) + (first + r) * dwords, dwords,
                              words + r * dwords);
      some.weights[p] = reinterpret_cast<const uint8_t*>(words);
    }
    some.low += first * (m.planes == 1 ? m.columns : m.columns / 8 * 5);
    some.offsets += first;
    const int64_t last = first + count < end ? first + count : end;
    work(some, row - first, last - first, y + first * y_row);
    row = last;
  }
}

template <class Codes>
struct Multiply {
  static void rows(const gearbx_exact& m, const Activations& x, int64_t row, int64_t end, float* y) {
    const int64_t stride = m.rows;
    if (x.vectors == 1)
      return by_rows(m, row, end, m.panel_rows, y, 1, [&](const gearbx_exact& m, int64_t row, int64_t end, float* y) {
        for (; row < end; row++) y[row] = multiply_row<Codes>(m, row, x.x);
      });
    const int64_t height = block_rows(m.rows, 4 * m.columns, x.vectors);
    float* weights = decoded_rows(height, m.columns);
    by_rows(m, row, end, SOME_ROWS, y, 1, [&](const gearbx_exact& m, int64_t row, int64_t end, float* y) {
      for (; row < end; row += height) {
        const int64_t count = end - row < height ? end - row : height;
        for (int64_t r = 0; r < count; r++) decode_row<Codes>(m, row + r, weights + r * m.columns);
        multiply_rows<float>({weights, count, m.columns, {}}, x, y + row, stride);
      }
    });
  }
};

template <class Codes>
struct Decode {
  static void rows(const gearbx_exact& m, uint16_t* decoded, int64_t row, int64_t end) {
    float* weights = decoded_rows(1, m.columns);
    const auto work = [&](const gearbx_exact& m, int64_t row, int64_t end, uint16_t* decoded) {
      for (; row < end; row++) {
        decode_row<Codes>(m, row, weights);
        for (int64_t i = 0; i < m.columns; i++) {
          uint32_t bits;
          std::memcpy(&bits, weights + i, 4);
          decoded[row * m.columns + i] = static_cast<uint16_t>(bits >> 16);
        }
      }
    };
    by_rows(m, row, end, m.panel_rows, decoded, m.columns, work);
  }
};

template <template <class> class Kernel, int BITS>
auto for_group(const gearbx_exact& m) {
  if (m.group == 32) return Kernel<Decoder<BITS, 32>>::rows;
  return m.group == 64 ? Kernel<Decoder<BITS, 64>>::rows : Kernel<Decoder<BITS, 128>>::rows;
}

// The work on some rows of a matrix of this form.
template <template <class> class Kernel>
auto find_work(const gearbx_exact& m) {
  if (m.planes == 1) return m.bits == 3 ? for_group<Kernel, 3>(m) : for_group<Kernel, 4>(m);
  if (m.group == 32) return Kernel<PlanesDecoder<32>>::rows;
  return m.group == 64 ? Kernel<PlanesDecoder<64>>::rows : Kernel<PlanesDecoder<128>>::rows;
}

TilePieces pieces_of(const gearbx_exact& m, int vectors) {
  const int64_t row_bytes = m.columns * 27 / 16;  // about
  return TilePieces(m.rows, row_bytes, block_rows(m.rows, 4 * m.columns, vectors), vectors);
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_exact_products(const gearbx_exact* const* matrices, int count, const float* x, int64_t vectors,
                                      float* const* y) {
  using namespace gearbx;
  const int64_t columns = matrices[0]->columns;
  const auto some = [&](int64_t first, int n) {
    const Activations activations(x + first * columns, n, columns);
    share_rows(
        count, [&](int i) { return pieces_of(*matrices[i], n); },
        [&](int i, int64_t row, int64_t end) {
          const gearbx_exact& m = *matrices[i];
          find_work<Multiply>(m)(m, activations, row, end, y[i] + first * m.rows);
        });
  };
  in_chunks(vectors, some, MOST_AT_ONCE);
}

extern "C" void gearbx_exact_product(const gearbx_exact* matrix, const float* x, int64_t vectors, float* y) {
  gearbx_exact_products(&matrix, 1, x, vectors, &y);
}

extern "C" void gearbx_exact_decode(const gearbx_exact* matrix, uint16_t* weights) {
  using namespace gearbx;
  share_rows(
      1, [&](int) { return pieces_of(*matrix, 1); },
      [&](int, int64_t row, int64_t end) { find_work<Decode>(*matrix)(*matrix, weights, row, end); });
}
