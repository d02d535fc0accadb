// Eight codes of any width are moved at a time: to the lower bits of eight bytes, and from there side by side.

#include "split_codes.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

// Eight codes of W bits, one after the other, to eight bytes: upper halves move up, of all, of fours and of pairs.
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
      UNPACK[m.bits - 1](m.codes + (row + r) * eights * m.bits, eights, bytes.data());
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
  const Job job = {*splitting, Pieces(splitting->rows, splitting->columns * splitting->bits / 4, 0, least)};
  share_out(job.pieces.count, piece, &job);
}
