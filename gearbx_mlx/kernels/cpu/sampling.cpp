// Reductions of rows of logits or log-probabilities: entropy, the logarithm of the sum of exponentials, and the two
// largest numbers. Over a whole vocabulary, MLX's operations take a noticeable part of a token's time.
//
// Threads read a row in pieces of one size, and the pieces' results are merged in order: results depend neither on the
// number of threads nor on other rows.

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "lanes.h"
#include "matvec.h"
#include "pool.h"

namespace gearbx {
namespace {

constexpr float LARGEST = 3.4028235e38f;
constexpr int64_t PIECE = 8192;  // numbers; starting threads takes as long as reading some thousand

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

// Sums of exp(z) and exp(z) z over some numbers, with z the distance to the highest of them.
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

// The moments of all pieces.
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
  const auto one = [](const void* context, int piece) { (*static_cast<const Work*>(context))(piece); };
  share_out(static_cast<int>(count), one, &work);
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

// Equals MLX's result for rows with an infinity or NaN.
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

// The two largest numbers of a row, the index of the largest (the first of equal ones), and the largest magnitude.
struct Best {
  int64_t place = 0;
  float first = -INFINITY, second = -INFINITY, magnitude = 0;

  void take(float x, int64_t at) {
    if (x > first) second = first, first = x, place = at;
    else if (x > second) second = x;
  }

  void take(const Best& other) {  // `other`: of later numbers
    const float next = other.second;
    take(other.first, other.place);
    take(next, other.place);
    magnitude = std::max(magnitude, other.magnitude);
  }
};

// The best of the numbers from `begin` to `end`, less `total` each, as in MLX; the magnitude is the numbers'.
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
    const float total = y[5 * row] = logsumexp_of(logits + row * count, count, m);
    y[5 * row + 1] = std::isfinite(total) ? entropy_of(m, count) : 0;  // Python searches for NaN at 0
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

// The token sampled from a row of logits: mlx-lm's filters, then Gumbel noise as in MLX, computed only for tokens that
// can still win.

namespace gearbx {
namespace {

constexpr float MAX_BELOW = 16;  // nats below the largest logit, the first range for the tokens of a nucleus

// A register of the `count` remaining numbers; -inf after their end.
inline Floats load_row(const float* row, int64_t count) {
  return count >= LANES ? load(row) : load_some(row, count, -INFINITY);
}

std::vector<float> at_least(const float* logits, int64_t count, float least) {
  std::vector<float> found;
  for (int64_t i = 0; i < count; i++)
    if (logits[i] >= least) found.push_back(logits[i]);
  return found;
}

// The lowest logit of the fewest tokens with a total probability of at least `p`.
float nucleus(const float* logits, int64_t count, float highest, float p) {
  double total = 0;
  for (int64_t i = 0; i < count; i += LANES) total += sum_of(exponential(load_row(logits + i, count - i) - all(highest)));
  for (const float below : {MAX_BELOW, INFINITY}) {
    std::vector<float> heap = at_least(logits, count, highest - below);
    std::make_heap(heap.begin(), heap.end());
    double mass = 0;
    for (auto end = heap.end(); end != heap.begin(); --end) {
      mass += std::exp(static_cast<double>(heap.front() - highest));
      if (mass >= static_cast<double>(p) * total) return heap.front();
      std::pop_heap(heap.begin(), end);
    }
  }
  return -INFINITY;
}

// The lowest logit that mlx-lm's filters keep, applied in sequence.
float least_kept(const float* logits, int64_t count, float highest, const gearbx_sampling& how) {
  float least = -INFINITY;
  if (how.top_p > 0 && how.top_p < 1) least = nucleus(logits, count, highest, how.top_p);
  if (how.min_p > 0) least = std::max(least, highest + std::log(how.min_p));
  if (how.top_k > 0 && how.top_k < count) {
    std::vector<float> kept = at_least(logits, count, least);
    if (how.top_k < static_cast<int64_t>(kept.size())) {
      std::nth_element(kept.begin(), kept.begin() + how.top_k - 1, kept.end(), std::greater<float>());
      least = kept[static_cast<size_t>(how.top_k - 1)];
    }
  }
  return least;
}

// The hash of MLX's random numbers, Threefry-2x32 (Salmon et al., 2011), of one or several uint32.
template <class T>
std::pair<T, T> hashed(const uint32_t key[2], T a, T b) {
  constexpr int ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  a += keys[0], b += keys[1];
  for (uint32_t i = 0; i < 5; i++) {
    for (const int r : ROTATIONS[i % 2]) a += b, b = (b << r | b >> (32 - r)) ^ a;
    a += keys[(i + 1) % 3], b += keys[(i + 2) % 3] + i + 1;
  }
  return {a, b};
}

// The winner so far, and the largest sum of the other tokens. Numbers that cannot exceed `bar` are skipped.
struct Sampled {
  int64_t token;
  bool wants_second;
  float score = -INFINITY, second = -INFINITY;

  float bar() const { return wants_second ? second : score; }

  void take(int64_t other, float scaled, uint32_t bits) {
    const float u = std::min(static_cast<float>(bits) / 4294967296.0f, std::nextafter(1.0f, 0.0f));
    const float sum = scaled - std::log(-std::log(u));
    if (sum > score) token = other, second = score, score = sum;
    else second = std::max(second, sum);
  }
};

constexpr float MAX_NOISE = 16.7f;  // for the largest u
constexpr float SLACK = 2e-7f;       // u is rounded to a float

// Offers the tokens from `first` on, with logits z, to `best`. Noise above d has a u above exp(-exp(-d)), and therefore
// 1 - u below exp(-d); this is compared first.
void take_lanes(Sampled& best, int64_t first, Floats z, Ints bits, float least, float inverse_temp) {
  const Floats scaled = z * all(inverse_temp);
  const Floats most = exponential(-larger(all(best.bar()) - scaled, all(0)));
  float logits[LANES], scales[LANES], mosts[LANES];
  uint32_t numbers[LANES];
  store(logits, z), store(scales, scaled), store(mosts, most);
  std::memcpy(numbers, &bits, sizeof numbers);
  for (int lane = 0; lane < LANES; lane++) {
    const float above = static_cast<float>(~numbers[lane]) / 4294967296.0f;
    if (logits[lane] >= least && above <= mosts[lane] * 1.001f + SLACK)
      best.take(first + lane, scales[lane], numbers[lane]);
  }
}

}  // namespace
}  // namespace gearbx

extern "C" int64_t gearbx_sampled(const float* logits, int64_t count, const gearbx_sampling* how, float* margin) {
  using namespace gearbx;
  int64_t likeliest;
  gearbx_largest(logits, count, 1, &likeliest);
  const float least = least_kept(logits, count, logits[likeliest], *how), inverse_temp = 1 / how->temp;
  Sampled best = {likeliest, margin != nullptr};
  // MLX hashes an index in the first half of a row with one in the second; an odd middle one is hashed separately.
  const int64_t half = count / 2, second = count - half;
  if (second > half && logits[half] >= least)
    best.take(half, logits[half] * inverse_temp, hashed<uint32_t>(how->key, static_cast<uint32_t>(half), 0).first);
  Ints place;
  for (uint32_t lane = 0; lane < LANES; lane++) place[lane] = lane;
  for (int64_t i = 0; i < half; i += LANES, place += LANES) {
    const Floats a = load_row(logits + i, half - i), b = load_row(logits + second + i, half - i);
    const float highest = largest(larger(a, b));
    if (highest < least || highest * inverse_temp + MAX_NOISE < best.bar()) continue;
    const auto [of_a, of_b] = hashed<Ints>(how->key, place, place + static_cast<uint32_t>(second));
    take_lanes(best, i, a, of_a, least, inverse_temp);
    take_lanes(best, second + i, b, of_b, least, inverse_temp);
  }
  if (margin) *margin = how->temp * (best.score - best.second);
  return best.token;
}
