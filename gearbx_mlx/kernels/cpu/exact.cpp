// Products over exact weights: a row is decoded once, and multiplied as a row of dense bf16 weights would be.

#include "exact.h"

#include <cmath>
#include <vector>

#include "pool.h"
#include "split.h"
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

constexpr int64_t CACHE = 256 << 10;  // bytes of decoded rows that stay in the second cache
constexpr int64_t MOST_ROWS = 24;     // decoded at a time

struct Job {
  const gearbx_exact* matrix;
  const float* x;
  int64_t vectors;
  float* y;
  int64_t height;  // rows that are decoded at a time
  Pieces pieces;
};

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

template <class Codes>
struct Multiply {
  static void piece(const void* context, int piece) {
    const Job& job = *static_cast<const Job*>(context);
    const gearbx_exact& m = *job.matrix;
    const int64_t end = job.pieces.first(piece + 1);
    int64_t row = job.pieces.first(piece);
    if (job.vectors == 1) {
      for (; row < end; row++) job.y[row] = multiply_row<Codes>(m, row, job.x);
      return;
    }
    static thread_local std::vector<float> weights;
    weights.resize(static_cast<size_t>(job.height * m.columns));
    for (; row < end; row += job.height) {
      const int64_t count = end - row < job.height ? end - row : job.height;
      for (int64_t r = 0; r < count; r++) decode_row<Codes>(m, row + r, weights.data() + r * m.columns);
      for (int64_t v = 0; v < job.vectors; v += TILE_VECTORS) {
        const int64_t some = job.vectors - v < TILE_VECTORS ? job.vectors - v : TILE_VECTORS;
        float* y = job.y + v * m.rows + row;
        multiply_rows<float>({weights.data(), job.x + v * m.columns, m.columns, y, m.rows, false}, count, some);
      }
    }
  }
};

struct DecodeJob {
  const gearbx_exact* matrix;
  uint16_t* weights;
  Pieces pieces;
};

template <class Codes>
struct Decode {
  static void piece(const void* context, int piece) {
    const DecodeJob& job = *static_cast<const DecodeJob*>(context);
    const gearbx_exact& m = *job.matrix;
    static thread_local std::vector<float> weights;
    weights.resize(static_cast<size_t>(m.columns));
    for (int64_t row = job.pieces.first(piece); row < job.pieces.first(piece + 1); row++) {
      decode_row<Codes>(m, row, weights.data());
      for (int64_t i = 0; i < m.columns; i++) {
        uint32_t bits;
        std::memcpy(&bits, &weights[static_cast<size_t>(i)], 4);
        job.weights[row * m.columns + i] = static_cast<uint16_t>(bits >> 16);
      }
    }
  }
};

typedef void (*Work)(const void* job, int piece);

template <template <class> class Kernel, int BITS>
Work for_group(const gearbx_exact& m) {
  if (m.group == 32) return Kernel<Decoder<BITS, 32>>::piece;
  return m.group == 64 ? Kernel<Decoder<BITS, 64>>::piece : Kernel<Decoder<BITS, 128>>::piece;
}

template <template <class> class Kernel>
Work find_work(const gearbx_exact& m) {
  if (m.planes == 1) return m.bits == 3 ? for_group<Kernel, 3>(m) : for_group<Kernel, 4>(m);
  if (m.group == 32) return Kernel<PlanesDecoder<32>>::piece;
  return m.group == 64 ? Kernel<PlanesDecoder<64>>::piece : Kernel<PlanesDecoder<128>>::piece;
}

int64_t row_bytes(const gearbx_exact& m) { return m.columns * 27 / 16; }  // about

// How many rows are decoded at a time: few for a few vectors, so that they stay in the first cache; more for many
// vectors, which are then read less often.
int64_t rows_at_a_time(const gearbx_exact& m, int64_t vectors) {
  if (vectors <= GEARBX_MAX_VECTORS) return TILE_ROWS;
  const int64_t fit = CACHE / (4 * m.columns) / TILE_ROWS * TILE_ROWS;
  return fit < TILE_ROWS ? TILE_ROWS : fit < MOST_ROWS ? fit : MOST_ROWS;
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_exact_product(const gearbx_exact* matrix, const float* x, int64_t vectors, float* y) {
  using namespace gearbx;
  const int64_t height = rows_at_a_time(*matrix, vectors);
  const int counted = static_cast<int>(vectors < 1024 ? vectors : 1024);
  const Job job = {matrix, x, vectors, y, height, Pieces(matrix->rows, row_bytes(*matrix), counted, height)};
  share_out(job.pieces.count, find_work<Multiply>(*matrix), &job);
}

extern "C" void gearbx_exact_decode(const gearbx_exact* matrix, uint16_t* weights) {
  using namespace gearbx;
  const DecodeJob job = {matrix, weights, Pieces(matrix->rows, row_bytes(*matrix), 1)};
  share_out(job.pieces.count, find_work<Decode>(*matrix), &job);
}
