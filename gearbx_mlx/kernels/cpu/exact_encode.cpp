// The encoder of format `exact`, in plain C++ on all threads, because it runs once per weight.

#include "exact.h"

#include <cmath>
#include <cstring>

#include "pool.h"
#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int LARGEST_GROUP = 128;

uint16_t upper_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

bool finite(uint16_t half) { return (half & 0x7f80) != 0x7f80; }

// The prediction of a weight from its code: the first of its neighbors, and whether it is near zero.
struct Prediction {
  uint16_t first;
  bool near;
};

// A group of weights, and the prediction of its codes.
struct Group {
  const gearbx_exact_source& m;
  const uint16_t* values;
  int64_t number;  // index among all groups of the matrix
  float scale, bias;
  Prediction of[LARGEST_GROUP];

  Group(const gearbx_exact_source& m, int64_t number)
      : m(m),
        values(m.values + number * m.group),
        number(number),
        scale(bf16_to_float(m.scales[number])),
        bias(bf16_to_float(m.biases[number])) {
    Prediction of_code[16];
    for (int code = 0; code < 16; code++) of_code[code] = predict(code);
    const uint8_t* codes = m.codes + number * (m.group / 2);
    for (int i = 0; i < m.group; i++) of[i] = of_code[codes[i / 2] >> i % 2 * 4 & 15];
  }

  Prediction predict(int code) const {
    const float value = multiply_add(scale, static_cast<float>(code), bias);  // scale * code is exact, or too large
    return {static_cast<uint16_t>(upper_bits(value) - 144), !(std::fabs(value) > std::fabs(scale) * 0.5f)};
  }

  static bool comes_back(uint16_t weight, Prediction p) {
    return p.near || static_cast<uint16_t>(p.first + (weight - p.first & 255)) == weight;
  }

  bool comes_back() const {
    if (!std::isfinite(scale * 15) || !finite(m.scales[number]) || !finite(m.biases[number])) return false;
    for (int i = 0; i < m.group; i++)
      if (!comes_back(values[i], of[i])) return false;
    return true;
  }

  // The bytes that the group stores in `high`; it may be null.
  int write(bool kept, uint8_t* high) const {
    int count = 0;
    for (int i = 0; i < m.group; i++) {
      if (kept && !of[i].near) continue;
      if (high) high[count] = static_cast<uint8_t>(values[i] >> 8);
      count++;
    }
    return count;
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
  const int64_t groups = m.columns / m.group;
  for (int64_t row = job.pieces.first(piece); row < job.pieces.first(piece + 1); row++) {
    uint32_t count = 0;
    for (int64_t g = row * groups; g < (row + 1) * groups; g++) {
      const Group group(m, g);
      job.kept[g] = group.comes_back();
      for (int i = 0; i < m.group; i++) job.low[g * m.group + i] = static_cast<uint8_t>(group.values[i]);
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
