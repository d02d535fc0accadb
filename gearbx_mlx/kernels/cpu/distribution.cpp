// What is read off rows of logits or log-probabilities: their entropy, the logarithm of their sum of exponentials, and
// the two largest. Over a whole vocabulary MLX's operations take a noticeable part of a token's time.
//
// A row is read in pieces of one size, on several threads, and what the pieces give is put together in their order: so
// results depend neither on the number of threads nor on other rows.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "exponential.h"
#include "matvec.h"
#include "pool.h"

namespace gearbx {
namespace {

constexpr float LARGEST = 3.4028235e38f;
constexpr int64_t PIECE = 8192;  // numbers: to start threads takes as long as to read some thousand

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

// The sums of exp(z) and of exp(z) z over some numbers, where z is the distance to the highest of them.
struct Moments {
  double highest, total, weighted;
};

Moments moments_of(const float* row, int64_t count) {
  Floats highest_lanes = all(-LARGEST);
  for (int64_t i = 0; i < count; i += LANES) highest_lanes = larger(load_sane(row, i, count), highest_lanes);
  const Floats highest = all(largest(highest_lanes));
  Floats total = all(0), weighted = all(0);
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats z = load_sane(row, i, count) - highest, weight = exponential(z);
    total = total + weight;
    weighted = weighted + weight * larger(z, all(LEAST));
  }
  return {static_cast<double>(largest(highest_lanes)), sum_of(total), sum_of(weighted)};
}

// Those of all pieces.
Moments joined(const Moments* pieces, int64_t count) {
  Moments all = {pieces[0].highest, 0, 0};
  for (int64_t i = 1; i < count; i++) all.highest = std::max(all.highest, pieces[i].highest);
  for (int64_t i = 0; i < count; i++) {
    const double below = pieces[i].highest - all.highest, share = std::exp(below);
    all.total += share * pieces[i].total;
    if (share > 0) all.weighted += share * (pieces[i].weighted + below * pieces[i].total);
  }
  return all;
}

// Calls done(row, its moments) for each row (rows, count).
template <class Done>
void read_rows(const float* x, int64_t rows, int64_t count, const Done& done) {
  const int64_t each = (count + PIECE - 1) / PIECE;
  static thread_local std::vector<Moments> memory;
  memory.resize(static_cast<size_t>(rows * each));
  struct Job {
    const float* x;
    int64_t count, each;
    Moments* found;
  } const job = {x, count, each, memory.data()};
  constexpr int64_t MOST = 65535;
  for (int64_t first = 0; first < rows * each; first += MOST) {
    struct Part {
      const Job* job;
      int64_t first;
    } const part = {&job, first};
    share_out(
        static_cast<int>(std::min(MOST, rows * each - first)),
        [](const void* context, int piece) {
          const auto& [job, first] = *static_cast<const Part*>(context);
          const int64_t number = first + piece, row = number / job->each, at = number % job->each * PIECE;
          job->found[number] = moments_of(job->x + row * job->count + at, std::min(PIECE, job->count - at));
        },
        &part);
  }
  for (int64_t row = 0; row < rows; row++) done(row, joined(memory.data() + row * each, each));
}

bool has_no_number(const float* row, int64_t count) {
  Floats sum = all(0);
  for (int64_t i = 0; i + LANES <= count; i += LANES) sum = sum + (load(row + i) - load(row + i));
  for (int64_t i = count / LANES * LANES; i < count; i++) sum = sum + all(row[i] - row[i]);
  return std::isnan(sum_of(sum));
}

// As MLX's, of rows that contain an infinity or NaN.
float plain_logsumexp(const float* row, int64_t count) {
  float highest = -INFINITY;
  for (int64_t i = 0; i < count; i++) {
    if (std::isnan(row[i])) return NAN;
    highest = std::max(highest, row[i]);
  }
  if (std::isinf(highest)) return highest;
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += std::exp(static_cast<double>(row[i] - highest));
  return highest + static_cast<float>(std::log(sum));
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_entropy_bits(const float* logprobs, int64_t rows, int64_t count, float* bits) {
  const double most = std::log2(static_cast<double>(count));
  gearbx::read_rows(logprobs, rows, count, [&](int64_t row, const gearbx::Moments& m) {
    const double found = std::log2(m.total) - m.weighted / (m.total * 0.6931471805599453);
    bits[row] = static_cast<float>(found < 0 ? 0 : found > most ? most : found);
  });
}

extern "C" void gearbx_logsumexp(const float* logits, int64_t rows, int64_t count, float* y) {
  gearbx::read_rows(logits, rows, count, [&](int64_t row, const gearbx::Moments& m) {
    const float* x = logits + row * count;
    const bool plain = gearbx::has_no_number(x, count);
    y[row] = plain ? gearbx::plain_logsumexp(x, count) : static_cast<float>(m.highest + std::log(m.total));
  });
}

extern "C" void gearbx_extremes(const float* x, int64_t rows, int64_t count, float* y) {
  using namespace gearbx;
  for (int64_t row = 0; row < rows; row++, x += count, y += 3) {
    Floats first = all(-INFINITY), second = first, magnitude = all(0);
    const auto take = [&](Floats a) {
      a = a == a ? a : all(-INFINITY);
      second = larger(second, -larger(-first, -a));  // the smaller of the two
      first = larger(first, a);
      magnitude = larger(magnitude, larger(a, -a));
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) take(load(x + i));
    float best[2 * LANES], largest_one = largest(magnitude);
    store(best, first);
    store(best + LANES, second);
    std::partial_sort(best, best + 2, best + 2 * LANES, std::greater<float>());
    for (; i < count; i++) {
      if (x[i] > best[0]) best[1] = best[0], best[0] = x[i];
      else if (x[i] > best[1]) best[1] = x[i];
      largest_one = std::max(largest_one, std::abs(x[i]));
    }
    y[0] = best[0], y[1] = best[1], y[2] = largest_one;
  }
}

extern "C" void gearbx_largest(const float* x, int64_t count, int most, int64_t* places) {
  using namespace gearbx;
  std::vector<float> found(static_cast<size_t>(most), -INFINITY);
  for (int i = 0; i < most; i++) places[i] = i;
  const auto take = [&](int64_t place) {
    int at = most;
    while (at > 0 && x[place] > found[static_cast<size_t>(at - 1)]) at--;
    if (at == most) return;
    std::copy_backward(found.begin() + at, found.end() - 1, found.end());
    std::copy_backward(places + at, places + most - 1, places + most);
    found[static_cast<size_t>(at)] = x[place], places[at] = place;
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {  // few numbers are among the largest so far
    if (largest(load(x + i)) <= found.back()) continue;
    for (int64_t lane = i; lane < i + LANES; lane++) take(lane);
  }
  for (; i < count; i++) take(i);
}
