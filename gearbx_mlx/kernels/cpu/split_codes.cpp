// Eight codes of any width are moved at a time: to the lower bits of eight bytes, and from there to packed form. New
// codes are bytes from the start. Sums over a group use 16 lanes, in an order that no compiler changes.

#include "split_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "matvec.h"
#include "pool.h"
#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

// The lower `width` bits of every field of `size` bits.
constexpr uint64_t fields(int width, int size) {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += size) mask |= (width < 64 ? (uint64_t{1} << width) - 1 : ~uint64_t{0}) << at;
  return mask;
}

// The upper half of every field of 2 * N bits, the fields `size` bits apart.
template <int N>
constexpr uint64_t upper(int size) {
  return fields(2 * N, size) ^ fields(N, size);
}

// Eight consecutive codes of W bits, to eight bytes: upper halves move up, of all, of fours and of pairs.
template <int W>
uint64_t apart(uint64_t v) {
  v = (v & fields(4 * W, 64)) | (v & upper<4 * W>(64)) << (32 - 4 * W);
  v = (v & fields(2 * W, 32)) | (v & upper<2 * W>(32)) << (16 - 2 * W);
  return (v & fields(W, 16)) | (v & upper<W>(16)) << (8 - W);
}

// The inverse.
template <int W>
uint64_t together(uint64_t v) {
  v = (v & fields(W, 16)) | (v >> (8 - W) & upper<W>(16));
  v = (v & fields(2 * W, 32)) | (v >> (16 - 2 * W) & upper<2 * W>(32));
  return (v & fields(4 * W, 64)) | (v >> (32 - 4 * W) & upper<4 * W>(64));
}

template <int W>
void unpack_row(const uint8_t* packed, int64_t eights, uint64_t* out) {
  for (int64_t i = 0; i < eights; i++) {
    uint64_t codes = 0;
    std::memcpy(&codes, packed + i * W, W);
    out[i] = W == 8 ? codes : apart<W>(codes);
  }
}

// The W bits of every code above its lower `unread` ones.
template <int W>
void pack_row(const uint64_t* bytes, int64_t eights, int unread, uint8_t* out) {
  for (int64_t i = 0; i < eights; i++) {
    const uint64_t codes = bytes[i] >> unread & fields(W, 8), packed = W == 8 ? codes : together<W>(codes);
    std::memcpy(out + i * W, &packed, W);
  }
}

typedef void (*Unpack)(const uint8_t*, int64_t, uint64_t*);
typedef void (*Pack)(const uint64_t*, int64_t, int, uint8_t*);
constexpr Unpack UNPACK[] = {unpack_row<1>, unpack_row<2>, unpack_row<3>, unpack_row<4>,
                             unpack_row<5>, unpack_row<6>, unpack_row<7>, unpack_row<8>};
constexpr Pack PACK[] = {pack_row<1>, pack_row<2>, pack_row<3>, pack_row<4>,
                         pack_row<5>, pack_row<6>, pack_row<7>, pack_row<8>};

constexpr int SUMS = 16;
constexpr float WHOLE = 12582912.0f;  // added to a number below 2^22, it gives the nearest integer, ties to even

float sum_of(const float* lanes) {
  float sum = lanes[0];
  for (int lane = 1; lane < SUMS; lane++) sum += lanes[lane];
  return sum;
}

template <class T>
float rounded_to(float value) {
  if constexpr (std::is_same_v<T, Bf16>) return rounded_to_bf16(value);
  if constexpr (std::is_same_v<T, Fp16>) return rounded_to_fp16(value);
  return value;
}

template <int GROUP>
void nearest(const float* w, float step, float offset, float most, float* codes) {
  for (int i = 0; i < GROUP; i++) {
    const float at = (w[i] - offset) / step, above = at > 0 ? at : 0;  // and 0 for NaN
    codes[i] = ((above < most ? above : most) + WHOLE) - WHOLE;
  }
}

// The scale and offset that bring codes nearest to the weights, rounded to a type.
template <class T, int GROUP>
void least_squares(const float* w, const float* codes, float least, float* step, float* offset) {
  float of_codes[SUMS] = {}, of_weights[SUMS] = {}, squares[SUMS] = {}, products[SUMS] = {};
  for (int i = 0; i < GROUP; i += SUMS)
    for (int lane = 0; lane < SUMS; lane++) of_codes[lane] += codes[i + lane], of_weights[lane] += w[i + lane];
  const float count = static_cast<float>(GROUP), middle = sum_of(of_codes) / count;
  for (int i = 0; i < GROUP; i += SUMS)
    for (int lane = 0; lane < SUMS; lane++) {
      const float away = codes[i + lane] - middle;
      squares[lane] += away * away;
      products[lane] += away * w[i + lane];
    }
  const float square = sum_of(squares), best = sum_of(products) / (square > 1e-9f ? square : 1e-9f);
  *step = rounded_to<T>(best > least ? best : least);
  *offset = rounded_to<T>(sum_of(of_weights) / count - *step * middle);
}

// The sum of squared errors of the codes.
template <int GROUP>
float error_of(const float* w, const float* codes, float step, float offset) {
  float squares[SUMS] = {};
  for (int i = 0; i < GROUP; i += SUMS)
    for (int lane = 0; lane < SUMS; lane++) {
      const float left = w[i + lane] - (codes[i + lane] * step + offset);
      squares[lane] += left * left;
    }
  return sum_of(squares);
}

// The smallest and the largest weight of a group; false if one is not finite.
template <int GROUP>
bool ends_of(const float* w, float* least, float* most) {
  float low[SUMS], high[SUMS], zeros[SUMS];  // a finite number minus itself is 0
  for (int lane = 0; lane < SUMS; lane++) low[lane] = high[lane] = w[lane], zeros[lane] = w[lane] - w[lane];
  for (int i = SUMS; i < GROUP; i += SUMS)
    for (int lane = 0; lane < SUMS; lane++) {
      const float value = w[i + lane];
      low[lane] = value < low[lane] ? value : low[lane];
      high[lane] = value > high[lane] ? value : high[lane];
      zeros[lane] += value - value;
    }
  *least = *std::min_element(low, low + SUMS);
  *most = *std::max_element(high, high + SUMS);
  return sum_of(zeros) == 0;
}

// A number that is already rounded to the type.
void put(float* numbers, int64_t at, float value) { numbers[at] = value; }

void put(Bf16* numbers, int64_t at, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  numbers[at].bits = static_cast<uint16_t>(bits >> 16);
}

void put(Fp16* numbers, int64_t at, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const float size = value < 0 ? -value : value;
  uint32_t half = (bits & 0x7fffffff) >> 13;
  if (!(size < 65520.0f)) half = size >= 65520.0f ? 0x7c00 : 0x7e00;  // infinite, or NaN
  else if (size < 0x1p-14f) half = static_cast<uint32_t>(size * 0x1p24f);
  else half -= 112 << 10;
  numbers[at].bits = static_cast<uint16_t>((bits >> 16 & 0x8000) | half);
}

// As `scale_and_bias` of kernels/bit_planes.py. The codes of a row, each in a byte.
template <class T, int GROUP>
void find_row(const gearbx_splitting& m, int64_t row, uint8_t* bytes) {
  const gearbx_grid& grid = *m.grid;
  const T* from = static_cast<const T*>(grid.weights) + row * m.columns;
  const int rest = m.bits - m.widths[0];
  const auto most = static_cast<float>((1 << m.bits) - 1), above = static_cast<float>(1 << rest), below = 1 / above;
  const int64_t groups = m.columns / GROUP, height = m.panel_rows ? m.panel_rows : 1;
  float w[GROUP], codes[GROUP], others[GROUP];
  for (int64_t g = 0; g < groups; g++) {
    for (int i = 0; i < GROUP; i++) w[i] = to_float(from[g * GROUP + i]);
    float low, high;
    const bool finite = ends_of<GROUP>(w, &low, &high);
    const float span = (high - low) / most * above;
    float scale = rounded_to<T>(span > grid.least ? span : grid.least);
    float first = rounded_to<T>(low + scale * below * (above - 1) / 2), step = scale * below, offset = first;
    const int64_t at = (row / height * groups + g) * height + row % height;
    for (int p = 1, shift = 0; p < m.planes; p++) {
      shift += m.widths[p];
      const float bias = rounded_to<T>(-scale * static_cast<float>((1 << m.widths[p]) - 1) / 2);
      offset = offset + bias / static_cast<float>(1 << shift);
      put(static_cast<T*>(grid.biases[p]), at, bias);
    }
    nearest<GROUP>(w, step, offset, most, codes);
    if (!rest) {
      float other_step, other_offset;
      least_squares<T, GROUP>(w, codes, grid.least, &other_step, &other_offset);
      nearest<GROUP>(w, other_step, other_offset, most, others);
      // rounding to T may increase the error
      if (error_of<GROUP>(w, others, other_step, other_offset) < error_of<GROUP>(w, codes, step, offset)) {
        scale = other_step, first = other_offset;
        std::copy_n(others, GROUP, codes);
      }
    }
    put(static_cast<T*>(grid.scales), at, finite ? scale : NAN);
    put(static_cast<T*>(grid.biases[0]), at, first);
    for (int i = 0; i < GROUP; i++) bytes[g * GROUP + i] = static_cast<uint8_t>(codes[i]);
  }
}

template <class T>
void find_row(const gearbx_splitting& m, int64_t row, uint8_t* bytes) {
  if (m.grid->group == 32) return find_row<T, 32>(m, row, bytes);
  if (m.grid->group == 64) return find_row<T, 64>(m, row, bytes);
  find_row<T, 128>(m, row, bytes);
}

// The codes of a row, each in a byte.
void codes_of(const gearbx_splitting& m, int64_t row, uint64_t* bytes) {
  const int64_t eights = m.columns / 8;
  if (m.codes) return UNPACK[m.bits - 1](m.codes + row * eights * m.bits, eights, bytes);
  auto* out = reinterpret_cast<uint8_t*>(bytes);
  if (m.grid->type == GEARBX_BFLOAT16) return find_row<Bf16>(m, row, out);
  if (m.grid->type == GEARBX_FLOAT16) return find_row<Fp16>(m, row, out);
  find_row<float>(m, row, out);
}

struct Job {
  const gearbx_splitting& m;
  Pieces pieces;
};

void piece(const void* context, int number) {
  const Job& job = *static_cast<const Job*>(context);
  const gearbx_splitting& m = job.m;
  const int64_t eights = m.columns / 8, height = m.panel_rows ? m.panel_rows : 1;
  std::vector<uint64_t> bytes(static_cast<size_t>(eights));
  std::vector<uint32_t> side_by_side(static_cast<size_t>(m.panel_rows ? height * m.columns / 4 : 0));
  for (int64_t row = job.pieces.first(number); row < job.pieces.first(number + 1); row += height) {
    int64_t begin = 0;  // of a plane, in side_by_side
    for (int64_t r = 0; r < height; r++) {
      codes_of(m, row + r, bytes.data());
      begin = 0;
      for (int p = 0, unread = m.bits; p < m.planes; p++) {
        const int64_t words = m.columns / 32 * m.widths[p];
        uint32_t* out = m.panel_rows ? side_by_side.data() + begin + r * words : m.words[p] + row * words;
        PACK[m.widths[p] - 1](bytes.data(), eights, unread -= m.widths[p], reinterpret_cast<uint8_t*>(out));
        begin += height * words;
      }
    }
    if (!m.panel_rows) continue;
    begin = 0;
    for (int p = 0; p < m.planes; p++) {
      const int64_t words = m.columns / 32 * m.widths[p];
      const uint32_t* from = side_by_side.data() + begin;
      uint32_t* out = m.words[p] + row * words;
      for (int64_t i = 0; i < words; i++)
        for (int64_t r = 0; r < height; r++) out[i * height + r] = from[r * words + i];
      begin += height * words;
    }
  }
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_split_codes(const gearbx_splitting* splitting) {
  using namespace gearbx;
  const int64_t least = splitting->panel_rows ? splitting->panel_rows : 1;
  const int64_t row_bytes = splitting->codes ? splitting->columns * splitting->bits / 4 : splitting->columns * 8;
  const Job job = {*splitting, Pieces(splitting->rows, row_bytes, 0, least)};
  share_out(job.pieces.count, piece, &job);
}
