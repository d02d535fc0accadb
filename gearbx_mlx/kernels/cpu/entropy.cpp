// Shannon entropy of a row of log-probabilities, as in decoding/sampling.py. With MLX's exponential, the entropy over a
// whole vocabulary takes a noticeable part of a token's time.

#include <cmath>

#include "exponential.h"
#include "matvec.h"

namespace gearbx {
namespace {

constexpr float LARGEST = 3.4028235e38f;

// NaN counts as 0, +inf as 1e4 and -inf as -1e4 (GEARBX 10.1).
inline Floats sane(Floats z) {
  z = z == z ? z : all(0);
  z = z > all(LARGEST) ? all(1e4f) : z;
  return z < all(-LARGEST) ? all(-1e4f) : z;
}

// Numbers i to i + LANES of a row; -inf after its end.
inline Floats load_sane(const float* row, int64_t i, int64_t count) {
  if (i + LANES <= count) return sane(load(row + i));
  float numbers[LANES];
  store(numbers, sane(load_some(row + i, count - i, 0)));
  return load_some(numbers, count - i, -INFINITY);
}

double sum_of(Floats lanes) {
  float numbers[LANES];
  store(numbers, lanes);
  double sum = 0;
  for (const float number : numbers) sum += static_cast<double>(number);
  return sum;
}

float entropy_of_row(const float* row, int64_t count) {
  Floats highest_lanes = all(-LARGEST);
  for (int64_t i = 0; i < count; i += LANES) highest_lanes = larger(load_sane(row, i, count), highest_lanes);
  const Floats highest = all(largest(highest_lanes));

  // The sums of exp(z) and of exp(z) z, where z is the distance to the highest number.
  Floats total = all(0), weighted = all(0);
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats z = load_sane(row, i, count) - highest, weight = exponential(z);
    total = total + weight;
    weighted = weighted + weight * larger(z, all(LEAST));
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
