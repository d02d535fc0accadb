// Eight codes of any width are moved at a time: to the lower bits of eight bytes, and from there to packed form. New
// codes are bytes from the start. Sums over a group use 16 lanes, then added by halves. No
// compiler changes this order, and four additions wait for each other instead of sixteen.

#include "split_codes.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "matvec.h"
#include "pool.h"
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

constexpr float WHOLE = 12582912.0f;  // added to a number below 2^22, it gives the nearest integer, ties to even

constexpr int SUMS = 16, PARTS = SUMS / LANES;  // sums over a group, in as many vectors
typedef Floats Sums[PARTS];

// The weights or codes of a group.
template <int GROUP>
struct Group {
  static constexpr int VECTORS = GROUP / LANES;
  Floats at[VECTORS];
};

float sum_of(const Sums& sums) { return sum8(in_eight(sums)); }

float largest(const Sums& sums) {
  Floats found = sums[0];
  for (int i = 1; i < PARTS; i++) found = larger(found, sums[i]);
  return gearbx::largest(found);
}

template <class T>
float rounded_to(float value) {
  if constexpr (std::is_same_v<T, Bf16>) return rounded_to_bf16(value);
  if constexpr (std::is_same_v<T, Fp16>) return rounded_to_fp16(value);
  return value;
}

template <int GROUP>
Group<GROUP> nearest(const Group<GROUP>& w, float step, float offset, float most) {
  Group<GROUP> codes;
  for (int i = 0; i < w.VECTORS; i++) {
    const Floats at = (w.at[i] - all(offset)) / all(step), above = larger(at, all(0));  // and 0 for NaN
    codes.at[i] = (smaller(above, all(most)) + all(WHOLE)) - all(WHOLE);
  }
  return codes;
}

// A group, its codes, and the step and offset that bring them back.
template <int GROUP>
struct Fit {
  Group<GROUP> w, codes;
  float step, offset;
};

// The scale and offset that bring codes nearest to the weights, rounded to a type.
template <class T, int GROUP>
void least_squares(const Fit<GROUP>& of, float least, float* step, float* offset) {
  Sums of_codes = {}, of_weights = {}, squares = {}, products = {};
  for (int i = 0; i < of.w.VECTORS; i++) of_codes[i % PARTS] += of.codes.at[i], of_weights[i % PARTS] += of.w.at[i];
  const float count = static_cast<float>(GROUP), middle = sum_of(of_codes) / count;
  for (int i = 0; i < of.w.VECTORS; i++) {
    const Floats away = of.codes.at[i] - all(middle);
    squares[i % PARTS] += away * away;
    products[i % PARTS] += away * of.w.at[i];
  }
  const float square = sum_of(squares), best = sum_of(products) / (square > 1e-9f ? square : 1e-9f);
  *step = rounded_to<T>(best > least ? best : least);
  *offset = rounded_to<T>(sum_of(of_weights) / count - *step * middle);
}

template <int GROUP>
float squared_error(const Fit<GROUP>& of) {
  Sums squares = {};
  for (int i = 0; i < of.w.VECTORS; i++) {
    const Floats left = of.w.at[i] - (of.codes.at[i] * all(of.step) + all(of.offset));
    squares[i % PARTS] += left * left;
  }
  return sum_of(squares);
}

// The smallest and the largest weight of a group; false if one is not finite.
template <int GROUP>
bool ends_of(const Group<GROUP>& w, float* least, float* most) {
  Sums low, high, zeros = {};
  for (int i = 0; i < PARTS; i++) low[i] = -w.at[i], high[i] = w.at[i];
  for (int i = 0; i < w.VECTORS; i++) {
    low[i % PARTS] = larger(-w.at[i], low[i % PARTS]);
    high[i % PARTS] = larger(w.at[i], high[i % PARTS]);
    zeros[i % PARTS] += w.at[i] - w.at[i];  // 0 for a finite number
  }
  *least = -largest(low);
  *most = largest(high);
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

// As `scale_and_bias` of kernels/bit_planes.py, and `quantize` of formats/planes.py. The codes of a row, each in a byte.
//
// Each step of a group waits for its previous step, so every step runs over several groups in turn.
template <class T, int GROUP>
void find_row(const gearbx_splitting& m, int64_t row, uint8_t* bytes) {
  const gearbx_grid& grid = *m.grid;
  const T* from = static_cast<const T*>(grid.weights) + row * m.columns;
  const int rest = m.bits - m.widths[0];
  const auto most = static_cast<float>((1 << m.bits) - 1), above = static_cast<float>(1 << rest), below = 1 / above;
  const int64_t groups = m.columns / GROUP, height = m.panel_rows ? m.panel_rows : 1;
  constexpr int AT_ONCE = 8;
  Fit<GROUP> fits[AT_ONCE];
  float scales[AT_ONCE], firsts[AT_ONCE];  // of the first plane
  for (int64_t begin = 0; begin < groups; begin += AT_ONCE) {
    const int count = static_cast<int>(groups - begin < AT_ONCE ? groups - begin : AT_ONCE);
    const auto place = [&](int k) { return (row / height * groups + begin + k) * height + row % height; };
    for (int k = 0; k < count; k++) {
      Group<GROUP>& w = fits[k].w;
      for (int i = 0; i < w.VECTORS; i++) w.at[i] = load(from + (begin + k) * GROUP + i * LANES);
      float low, high;
      const bool finite = ends_of(w, &low, &high);
      const float span = (high - low) / most * above, scale = rounded_to<T>(span > grid.least ? span : grid.least);
      fits[k].step = scale * below;
      fits[k].offset = firsts[k] = rounded_to<T>(low + scale * below * (above - 1) / 2);
      scales[k] = finite ? scale : NAN;
      for (int p = 1, shift = 0; p < m.planes; p++) {
        shift += m.widths[p];
        const float bias = rounded_to<T>(-scale * static_cast<float>((1 << m.widths[p]) - 1) / 2);
        fits[k].offset += bias / static_cast<float>(1 << shift);
        put(static_cast<T*>(grid.biases[p]), place(k), bias);
      }
    }
    for (int k = 0; k < count; k++) fits[k].codes = nearest(fits[k].w, fits[k].step, fits[k].offset, most);
    for (int k = 0; k < count && !rest; k++) {
      Fit<GROUP> other = fits[k];
      least_squares<T>(fits[k], grid.least, &other.step, &other.offset);
      other.codes = nearest(other.w, other.step, other.offset, most);
      if (!(squared_error(other) < squared_error(fits[k]))) continue;  // rounding to T may increase the error
      fits[k].codes = other.codes, firsts[k] = other.offset;
      if (scales[k] == scales[k]) scales[k] = other.step;
    }
    for (int k = 0; k < count; k++) {
      put(static_cast<T*>(grid.scales), place(k), scales[k]);
      put(static_cast<T*>(grid.biases[0]), place(k), firsts[k]);
      float codes[GROUP];
      for (int i = 0; i < fits[k].codes.VECTORS; i++) store(codes + i * LANES, fits[k].codes.at[i]);
      for (int i = 0; i < GROUP; i++) bytes[(begin + k) * GROUP + i] = static_cast<uint8_t>(codes[i]);
    }
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
