// Shannon entropy of a row of log-probabilities, as in routing/entropy.py. With MLX's exponential, the entropy over a
// whole vocabulary takes a noticeable part of a token's time.

#include <cmath>

#include "exponential.h"
#include "matvec.h"

namespace gearbx {
namespace {

constexpr float LARGEST = 3.4028235e38f;

// NaN counts as 0, +inf as 1e4 and -inf as -1e4 (GEARBX 10.1).
inline Floats sane(Floats z) {
  z = z == z ? z : Floats{};
  z = z > LARGEST ? Floats{} + 1e4f : z;
  return z < -LARGEST ? Floats{} - 1e4f : z;
}

// Numbers i to i + LANES of a row; -inf after its end.
inline Floats load(const float* row, int64_t i, int64_t count) {
  Floats z;
  if (i + LANES <= count) {
    std::memcpy(&z, row + i, sizeof z);
    return sane(z);
  }
  z = Floats{} - INFINITY;
  for (int64_t k = i; k < count; k++) z[k - i] = sane(Floats{} + row[k])[0];
  return z;
}

double sum_of(Floats lanes) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += static_cast<double>(lanes[i]);
  return sum;
}

float entropy_of_row(const float* row, int64_t count) {
  Floats highest_lanes = Floats{} - LARGEST;
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats z = load(row, i, count);
    highest_lanes = z > highest_lanes ? z : highest_lanes;
  }
  float highest = highest_lanes[0];
  for (int i = 1; i < LANES; i++) highest = highest_lanes[i] > highest ? highest_lanes[i] : highest;

  // The sums of exp(z) and of exp(z) z, where z is the distance to the highest number.
  Floats total = {}, weighted = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats below = load(row, i, count) - highest;
    const Floats z = below >= LEAST ? below : Floats{} + LEAST;
    const Floats weight = below >= LEAST ? exponential(z) : Floats{};
    total += weight;
    weighted += weight * z;
  }
  const double sum = sum_of(total);
  const double bits = std::log2(sum) - sum_of(weighted) / (sum * 0.6931471805599453);
  const double most = std::log2(static_cast<double>(count));
  return static_cast<float>(bits < 0 ? 0 : bits > most ? most : bits);
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_entropy_bits(const float* logprobs, int64_t rows, int64_t count, float* bits) {
  for (int64_t row = 0; row < rows; row++) bits[row] = gearbx::entropy_of_row(logprobs + row * count, count);
}
