// Activations of 8 or 16 bits, in the order in which panels (panel.h) are multiplied with them.
//
// Activations have a step for each vector and group of inputs. The largest activation of a group is 127 steps, or 32384
// with two bytes, which is far finer than bfloat16. Two bytes are the nearest multiple of BASE, and the rest; or a
// number of 16 bits, for products that take words (products_of_bytes.h).

#pragma once

#include <bit>
#include <cmath>
#include <memory>

#include "panel.h"
#include "pool.h"

namespace gearbx {

constexpr int BASE = 254;

// Memory that grows, and whose content is lost then. Unlike a vector it is not filled with zeros.
template <class T>
class Buffer {
 public:
  T* room_for(int64_t size) {
    if (size > size_) {
      values_.reset(new T[static_cast<size_t>(size)]);
      size_ = size;
    }
    return values_.get();
  }

 private:
  std::unique_ptr<T[]> values_;
  int64_t size_ = 0;
};

// Columns up to a whole register of groups.
inline int64_t whole_blocks(int64_t columns, int group) {
  const int64_t block = int64_t{LANES} * group;
  return (columns + block - 1) / block * block;
}

// What activations of several matrices have in common, if they can be prepared once for all of them.
struct Rounding {
  int64_t inputs, columns;
  int group, bytes, in_byte;
  int32_t middle;
  bool row_by_row;  // for one vector; else panels
  bool words() const { return AS_WORDS && bytes == 2 && !row_by_row; }
  bool operator==(const Rounding&) const = default;
};

// Tiles of at most TILE vectors, one after the other. Of a tile: for four columns, its vectors, each with the bytes of
// four activations, or all first bytes before all second ones, or four words. For a group, its vectors.
struct Rounded {
  const int8_t* x;
  const int32_t* starts;  // the sum of rounded activations, times what is to be added to every code
  const float* steps;
  const float* sums;  // of the rounded activations
};

// A group's activations in steps of which the largest is `most`, and their sum. If one is not finite, the step is NaN,
// and with it all results of the vector. The loops have no branches, so that compilers vectorize them.
template <int G>
inline float round_group(const float* x, int32_t most, int32_t* out, int32_t* sum) {
  constexpr uint32_t INFINITE = 0x7f800000;
  uint32_t largest = 0;  // magnitudes as bits, which have the order of the numbers, with NaN above infinity
  for (int i = 0; i < G; i++) {
    const uint32_t size = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  const float step = std::bit_cast<float>(largest) / static_cast<float>(most);
  const bool finite = largest < INFINITE, some = finite && step >= 0x1p-126f;
  const float inverse = some ? 1.0f / step : 0.0f;
  constexpr float ROUND = 0x1.8p23f;  // adding it to a number rounds that to an integer
  int32_t total = 0;
  for (int i = 0; i < G; i++) {
    out[i] = std::bit_cast<int32_t>((some ? x[i] : 0.0f) * inverse + ROUND) - std::bit_cast<int32_t>(ROUND);
    total += out[i];
  }
  *sum = total;
  return finite ? (some ? step : 0.0f) : NAN;
}

// Rounded activations as bytes: all first ones, and all second ones if there are two. Those of words are the lower and
// the upper half.
template <int G, int BYTES>
inline void to_bytes(const int32_t* whole, bool words, int8_t (*out)[G]) {
  if (words) {
    for (int i = 0; i < G; i++) out[0][i] = static_cast<int8_t>(whole[i]);
    for (int i = 0; i < G; i++) out[BYTES - 1][i] = static_cast<int8_t>(whole[i] >> 8);
  } else if constexpr (BYTES == 1) {
    for (int i = 0; i < G; i++) out[0][i] = static_cast<int8_t>(whole[i]);
  } else {
    constexpr float ROUND = 0x1.8p23f;
    for (int i = 0; i < G; i++) {
      const float quotient = static_cast<float>(whole[i]) * (1.0f / BASE) + ROUND;
      const int32_t first = std::bit_cast<int32_t>(quotient) - std::bit_cast<int32_t>(ROUND);
      out[0][i] = static_cast<int8_t>(first);
      out[1][i] = static_cast<int8_t>(whole[i] - BASE * first);
    }
  }
}

// The order of codes that are masked where they are, in 16 columns: for each dword its registers, or, row by row, for
// each register its dwords. Words: of each register those at even places first.
inline const int8_t* order_of(const Rounding& r) {
  static constexpr int8_t BYTES[3][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                          {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15},
                                          {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}};
  static constexpr int8_t WORDS[3][16] = {{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15},
                                          {0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15},
                                          {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15}};
  static constexpr int8_t BY_ROW[16] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
  if (r.row_by_row && r.in_byte == 2) return BY_ROW;
  return r.words() ? WORDS[r.in_byte / 2] : BYTES[r.in_byte / 2];
}

inline void put_in_order(const int8_t* from, const int8_t* order, int8_t* out) {
#if defined(GEARBX_AVX2)
  const __m128i indices = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(bytes, indices));
#else
  for (int i = 0; i < 16; i++) out[i] = from[order[i]];
#endif
}

// Writes byte `b` of activations `at` to `at` + 15 of one vector, for products row by row: for each register of
// weights, those of its codes at the lowest bit, then at the next. All first bytes of a register precede the second
// ones.
template <int BYTES>
inline void put_for_rows(const int8_t* ordered, int64_t at, int b, int in_byte, int8_t* out) {
  const int64_t codes = 4 * LANES * in_byte, unit = at / codes, inside = at % codes / in_byte;
  int8_t* to = out + (unit * BYTES + b) * codes + inside;
  const int size = 16 / in_byte;
  for (int k = 0; k < in_byte; k++) std::memcpy(to + k * 4 * LANES, ordered + k * size, static_cast<size_t>(size));
}

// Writes words of 16 columns, of which there are the lower and the upper halves, for each dword of a tile of `n` vectors.
inline void put_words(const int8_t* lower, const int8_t* upper, int n, int8_t* out) {
  alignas(64) int8_t words[32];
#if defined(GEARBX_AVX2)
  const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i*>(lower));
  const __m128i high = _mm_load_si128(reinterpret_cast<const __m128i*>(upper));
  _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm_unpacklo_epi8(low, high));
  _mm_store_si128(reinterpret_cast<__m128i*>(words + 16), _mm_unpackhi_epi8(low, high));
#else
  for (int i = 0; i < 32; i++) words[i] = i % 2 ? upper[i / 2] : lower[i / 2];
#endif
  for (int dword = 0; dword < 4; dword++) std::memcpy(out + dword * n * 8, words + 8 * dword, 8);
}

// All of a tile: `n` vectors. The tile's arrays begin at the places of its first vector.
template <int G, int BYTES>
void round_tile(const Rounding& r, const float* x, int n, int8_t* out, int32_t* starts, float* steps, float* sums) {
  constexpr int32_t MOST = BYTES == 1 ? 127 : 127 * BASE + BASE / 2 - 1;
  alignas(64) int32_t whole[G];
  alignas(64) int8_t bytes[BYTES][G], ordered[BYTES][16];
  alignas(64) float rest[G];
  const int8_t* order = order_of(r);
  for (int v = 0; v < n; v++)
    for (int64_t g = 0; g < r.columns / G; g++) {
      const float* from = x + v * r.inputs + g * G;
      const int64_t left = r.inputs - g * G;
      if (left < G) {  // the columns that are padding
        std::memset(rest, 0, sizeof rest);
        if (left > 0) std::memcpy(rest, from, static_cast<size_t>(left) * 4);
        from = rest;
      }
      int32_t sum;
      const float step = round_group<G>(from, MOST, whole, &sum);
      const int64_t at = g * n + v;
      steps[at] = step;
      sums[at] = step * static_cast<float>(sum);
      starts[at] = sum * r.middle;
      to_bytes<G, BYTES>(whole, r.words(), bytes);
      for (int i = 0; i < G; i += 16) {
        for (int b = 0; b < BYTES; b++) put_in_order(bytes[b] + i, order, ordered[b]);
        int8_t* to = out + ((g * G + i) / 4 * n + v) * BYTES * 4;
        if (r.words()) {
          put_words(ordered[0], ordered[BYTES - 1], n, to);
          continue;
        }
        for (int b = 0; b < BYTES; b++)
          if (r.row_by_row)
            put_for_rows<BYTES>(ordered[b], g * G + i, b, r.in_byte, out);
          else
            for (int dword = 0; dword < 4; dword++) std::memcpy(to + (dword * n * BYTES + b) * 4, ordered[b] + 4 * dword, 4);
      }
    }
}

struct RoundingJob {
  const Rounding& how;
  const float* x;
  int64_t vectors;
  int8_t* out;
  int32_t* starts;
  float *steps, *sums;

  static void piece(const void* context, int tile) {
    const RoundingJob& j = *static_cast<const RoundingJob*>(context);
    const Rounding& r = j.how;
    const int64_t first = int64_t{tile} * TILE, left = j.vectors - first, groups = first * (r.columns / r.group);
    const auto round = [&](auto work) {
      work(r, j.x + first * r.inputs, static_cast<int>(left < TILE ? left : TILE), j.out + first * r.columns * r.bytes,
           j.starts + groups, j.steps + groups, j.sums + groups);
    };
    if (r.group == 32) return round(r.bytes == 1 ? round_tile<32, 1> : round_tile<32, 2>);
    if (r.group == 64) return round(r.bytes == 1 ? round_tile<64, 1> : round_tile<64, 2>);
    round(r.bytes == 1 ? round_tile<128, 1> : round_tile<128, 2>);
  }
};

// Rounds vectors, on all threads if there are many. The result is valid until this thread's next call.
inline Rounded round_all(const Rounding& how, const float* x, int64_t vectors) {
  static thread_local Buffer<int8_t> bytes;
  static thread_local Buffer<int32_t> starts;
  static thread_local Buffer<float> steps, sums;
  const int64_t columns = how.row_by_row ? whole_blocks(how.columns, how.group) : how.columns;
  const int64_t groups = vectors * (columns / how.group);
  const RoundingJob job = {how, x, vectors, bytes.room_for(vectors * columns * how.bytes), starts.room_for(groups),
                           steps.room_for(groups), sums.room_for(groups)};
  if (columns > how.columns) {  // registers that the columns do not fill
    for (int64_t g = how.columns / how.group; g < groups; g++) {
      job.starts[g] = 0;
      job.steps[g] = job.sums[g] = 0.0f;
    }
    const int64_t from = how.columns / (32 * LANES) * (32 * LANES), end = columns;
    std::memset(job.out + from * how.bytes, 0, static_cast<size_t>((end - from) * how.bytes));
  }
  share_out(static_cast<int>((vectors + TILE - 1) / TILE), RoundingJob::piece, &job);
  return {job.out, job.starts, job.steps, job.sums};
}

}  // namespace gearbx
