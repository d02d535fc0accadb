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

// Calls work(0) to work(count - 1) on several threads.
template <class Work>
void in_pieces(int64_t count, const Work& work) {
  constexpr int64_t MOST = 65535;
  for (int64_t first = 0; first < count; first += MOST) {
    struct Part {
      const Work* work;
      int64_t first;
    } const part = {&work, first};
    share_out(
        static_cast<int>(std::min(MOST, count - first)),
        [](const void* context, int piece) {
          const auto& [work, first] = *static_cast<const Part*>(context);
          (*work)(first + piece);
        },
        &part);
  }
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
  in_pieces(rows * each, [&job](int64_t number) {
    const int64_t row = number / job.each, at = number % job.each * PIECE;
    job.found[number] = moments_of(job.x + row * job.count + at, std::min(PIECE, job.count - at));
  });
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

float logsumexp_of(const float* row, int64_t count, const Moments& m) {
  if (has_no_number(row, count)) return plain_logsumexp(row, count);
  return static_cast<float>(m.highest + std::log(m.total));
}

float entropy_of(const Moments& m, int64_t count) {
  const double most = std::log2(static_cast<double>(count));
  const double found = std::log2(m.total) - m.weighted / (m.total * 0.6931471805599453);
  return static_cast<float>(found < 0 ? 0 : found > most ? most : found);
}

// The two largest numbers of a row, the place of the largest, the first of equal ones, and the largest magnitude.
struct Best {
  int64_t place = 0;
  float first = -INFINITY, second = -INFINITY, magnitude = 0;

  void take(float x, int64_t at) {
    if (x > first) second = first, first = x, place = at;
    else if (x > second) second = x;
  }

  void take(const Best& other) {  // of numbers behind these
    const float next = other.second;
    take(other.first, other.place);
    take(next, other.place);
    magnitude = std::max(magnitude, other.magnitude);
  }
};

// Of the numbers from `begin` to `end`, less `total` each, as MLX subtracts it; the magnitude is that of the numbers.
Best best_of(const float* row, int64_t begin, int64_t end, float total) {
  Best best;
  Floats magnitude = all(0);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {  // few numbers are among the two largest so far
    const Floats x = load(row + i), less = x - all(total);
    magnitude = larger(magnitude, larger(x, -x));
    if (largest(less) <= best.second) continue;
    for (int64_t lane = i; lane < i + LANES; lane++) best.take(row[lane] - total, lane);
  }
  best.magnitude = largest(magnitude);
  for (; i < end; i++) {
    best.take(row[i] - total, i);
    best.magnitude = std::max(best.magnitude, std::abs(row[i]));
  }
  return best;
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_entropy_bits(const float* logprobs, int64_t rows, int64_t count, float* bits) {
  gearbx::read_rows(logprobs, rows, count,
                    [&](int64_t row, const gearbx::Moments& m) { bits[row] = gearbx::entropy_of(m, count); });
}

extern "C" void gearbx_logsumexp(const float* logits, int64_t rows, int64_t count, float* y) {
  gearbx::read_rows(logits, rows, count, [&](int64_t row, const gearbx::Moments& m) {
    y[row] = gearbx::logsumexp_of(logits + row * count, count, m);
  });
}

extern "C" void gearbx_choices(const float* logits, int64_t rows, int64_t count, float* y) {
  using namespace gearbx;
  read_rows(logits, rows, count, [&](int64_t row, const Moments& m) {
    y[5 * row] = logsumexp_of(logits + row * count, count, m);
    y[5 * row + 1] = entropy_of(m, count);
  });
  const int64_t each = (count + PIECE - 1) / PIECE;
  static thread_local std::vector<Best> memory;
  memory.resize(static_cast<size_t>(rows * each));
  struct Job {
    const float *x, *y;
    int64_t count, each;
    Best* found;
  } const job = {logits, y, count, each, memory.data()};
  in_pieces(rows * each, [&job](int64_t number) {
    const int64_t row = number / job.each, at = number % job.each * PIECE;
    job.found[number] = best_of(job.x + row * job.count, at, std::min(at + PIECE, job.count), job.y[5 * row]);
  });
  for (int64_t row = 0; row < rows; row++, y += 5) {
    Best best;
    for (int64_t i = 0; i < each; i++) best.take(memory[static_cast<size_t>(row * each + i)]);
    y[0] = static_cast<float>(best.place), y[2] = best.first, y[3] = best.second, y[4] = best.magnitude;
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
