// The encoder of format `exact`. It runs once for a weight, so that it is plain C++ on all threads.

#include "exact_encode.h"

#include <cmath>
#include <cstring>

#include "pool.h"
#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int LARGEST_GROUP = 128;
constexpr int LOW_BITS = 5;  // of a weight over two planes

uint16_t upper_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

bool finite(uint16_t half) { return (half & 0x7f80) != 0x7f80; }

int code_at(const uint8_t* codes, int bits, int i) {
  const int at = i * bits, byte = at / 8;
  const int both = codes[byte] | (at % 8 + bits > 8 ? codes[byte + 1] << 8 : 0);
  return both >> at % 8 & ((1 << bits) - 1);
}

// What the codes say of a weight: the first of its neighbours, and whether it is near zero.
struct Prediction {
  uint16_t first;
  bool near;
};

// A group of weights, and what its codes say of them.
struct Group {
  const gearbx_exact_source& m;
  const uint16_t* values;
  int64_t number;  // of all groups of the matrix
  float step, offset;
  uint16_t largest;  // of magnitudes near zero, over two planes
  Prediction of[LARGEST_GROUP];

  Group(const gearbx_exact_source& m, int64_t number)
      : m(m), values(m.values + number * m.group), number(number), largest(0) {
    const float scale = bf16_to_float(m.scales[number]), bias = bf16_to_float(m.biases[0][number]);
    step = m.planes == 1 ? scale : scale * 0x1p-4f;
    offset = m.planes == 1 ? bias : bias + bf16_to_float(m.biases[1][number]) * 0x1p-4f;
    const int64_t begin = number * (m.group * m.bits / 8);
    if (m.planes == 1) {
      Prediction of_code[16];
      for (int code = 0; code < 1 << m.bits; code++) of_code[code] = predict(code);
      for (int i = 0; i < m.group; i++) of[i] = of_code[code_at(m.weights[0] + begin, m.bits, i)];
      return;
    }
    largest = upper_bits(16 * std::fabs(step));
    for (int i = 0; i < m.group; i++)
      of[i] = predict(code_at(m.weights[0] + begin, 4, i) << 4 | code_at(m.weights[1] + begin, 4, i));
  }

  Prediction predict(int code) const {
    const float value = multiply_add(step, static_cast<float>(code), offset);  // step * code is exact, or too large
    if (m.planes == 1) return {static_cast<uint16_t>(upper_bits(value) - 144), !(std::fabs(value) > std::fabs(step) * 0.5f)};
    return {static_cast<uint16_t>(upper_bits(value) - 16), !(std::fabs(value) >= 8.8f * std::fabs(step))};
  }

  uint16_t low(uint16_t weight) const { return weight & (m.planes == 1 ? 255 : (1 << LOW_BITS) - 1); }

  // What is stored beside the low bits of a weight near zero.
  uint8_t stored(uint16_t weight) const {
    if (m.planes == 1) return static_cast<uint8_t>(weight >> 8);
    const uint16_t magnitude = weight & 0x7fff, below = static_cast<uint16_t>(largest - magnitude) & 0xfff;
    return static_cast<uint8_t>((weight >> 15) << 7 | (magnitude == 0 ? 127 : below >> LOW_BITS));
  }

  uint16_t decoded(uint16_t low, uint8_t stored, Prediction p) const {
    const int mask = m.planes == 1 ? 255 : (1 << LOW_BITS) - 1;
    if (!p.near) return static_cast<uint16_t>(p.first + (low - p.first & mask));
    if (m.planes == 1) return static_cast<uint16_t>(stored << 8 | low);
    const int below = (stored & 127) << LOW_BITS | (largest - low & mask);
    return static_cast<uint16_t>((stored >> 7) << 15 | (below >= 0xf80 ? 0 : static_cast<uint16_t>(largest - below)));
  }

  bool comes_back() const {
    if (!std::isfinite(step * static_cast<float>((1 << m.bits * m.planes) - 1))) return false;
    if (!finite(m.scales[number]) || !finite(m.biases[0][number])) return false;
    if (m.planes == 2 && (!finite(m.biases[1][number]) || m.scales[number] == 0)) return false;
    for (int i = 0; i < m.group; i++)
      if (decoded(low(values[i]), stored(values[i]), of[i]) != values[i]) return false;
    return true;
  }

  // The bytes that the group stores in `high`, which may be null.
  int write(bool kept, uint8_t* high) const {
    int count = 0;
    const auto put = [&](int byte) {
      if (high) high[count] = static_cast<uint8_t>(byte);
      count++;
    };
    for (int i = 0; i < m.group; i++) {
      if (!kept) {
        if (m.planes == 2) put(values[i] & 255);
        put(values[i] >> 8);
      } else if (of[i].near) {
        put(stored(values[i]));
      }
    }
    return count;
  }

  void write_low(uint8_t* to) const {
    if (m.planes == 1) {
      for (int i = 0; i < m.group; i++) to[i] = static_cast<uint8_t>(values[i]);
      return;
    }
    for (int i = 0; i < m.group; i += 8, to += LOW_BITS) {
      uint64_t packed = 0;
      for (int k = 0; k < 8; k++) packed |= static_cast<uint64_t>(low(values[i + k])) << k * LOW_BITS;
      for (int k = 0; k < LOW_BITS; k++) to[k] = static_cast<uint8_t>(packed >> 8 * k);
    }
  }
};

struct Job {
  const gearbx_exact_source& source;
  Pieces pieces;
  uint8_t* kept;
  uint8_t* low;
  uint32_t* counts;
  const uint8_t* known;
  const uint32_t* offsets;
  uint8_t* high;
};

void examine(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const gearbx_exact_source& m = job.source;
  const int64_t groups = m.columns / m.group, low_bytes = m.group * (m.planes == 1 ? 8 : LOW_BITS) / 8;
  for (int64_t row = job.pieces.first(piece); row < job.pieces.first(piece + 1); row++) {
    uint32_t count = 0;
    for (int64_t g = row * groups; g < (row + 1) * groups; g++) {
      const Group group(m, g);
      job.kept[g] = group.comes_back();
      group.write_low(job.low + g * low_bytes);
      count += static_cast<uint32_t>(group.write(job.kept[g], nullptr));
    }
    job.counts[row] = count;
  }
}

void write_high(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t groups = job.source.columns / job.source.group;
  for (int64_t row = job.pieces.first(piece); row < job.pieces.first(piece + 1); row++) {
    uint8_t* high = job.high + job.offsets[row];
    for (int64_t g = row * groups; g < (row + 1) * groups; g++) high += Group(job.source, g).write(job.known[g], high);
  }
}

}  // namespace
}  // namespace gearbx

extern "C" {
void gearbx_exact_examine(const gearbx_exact_source* source, uint8_t* kept, uint8_t* low, uint32_t* counts) {
  using namespace gearbx;
  const Job job = {*source, Pieces(source->rows, source->columns * 2, 1), kept, low, counts, nullptr, nullptr, nullptr};
  share_out(job.pieces.count, examine, &job);
}
void gearbx_exact_write_high(const gearbx_exact_source* source, const uint8_t* kept, const uint32_t* offsets,
                             uint8_t* high) {
  using namespace gearbx;
  const Job job = {*source, Pieces(source->rows, source->columns * 2, 1), nullptr, nullptr, nullptr, kept, offsets, high};
  share_out(job.pieces.count, write_high, &job);
}
}
