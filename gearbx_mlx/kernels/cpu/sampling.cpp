// The token that is sampled from a row of logits: mlx-lm's filters, then Gumbel noise as MLX makes it, which is computed
// only for tokens that could still win.

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "exponential.h"
#include "matvec.h"

namespace gearbx {
namespace {

constexpr float MOST_BELOW = 16;  // nats below the largest logit, where the tokens of a nucleus are looked for first

// As many numbers as lie side by side, of `count` that are left; -inf after their end.
inline Floats load_row(const float* row, int64_t count) {
  return count >= LANES ? load(row) : load_some(row, count, -INFINITY);
}

std::vector<float> at_least(const float* logits, int64_t count, float least) {
  std::vector<float> found;
  for (int64_t i = 0; i < count; i++)
    if (logits[i] >= least) found.push_back(logits[i]);
  return found;
}

// The least logit of the fewest tokens that have a share `p` of all probability together.
float nucleus(const float* logits, int64_t count, float highest, float p) {
  double total = 0;
  for (int64_t i = 0; i < count; i += LANES) total += sum_of(exponential(load_row(logits + i, count - i) - all(highest)));
  for (const float below : {MOST_BELOW, INFINITY}) {
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

// The least logit that mlx-lm's filters keep, one after the other.
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

// The hash of MLX's random numbers, Threefry-2x32 (Salmon et al., 2011): of uint32, or of several at once.
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

// The winner so far, and the largest sum of another token. What cannot exceed `bar` is not looked at.
struct Best {
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

constexpr float MOST_NOISE = 16.7f;  // that of the largest u
constexpr float SLACK = 2e-7f;       // u is rounded to a float

// Offers the tokens from `first` on, whose logits are z, to `best`. Noise above d has a u above exp(-exp(-d)), and so
// 1 - u is below exp(-d): that is compared first.
void take_lanes(Best& best, int64_t first, Floats z, Ints bits, float least, float inverse_temp) {
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
  Best best = {likeliest, margin != nullptr};
  // MLX hashes a place in the first half of a row together with one in the second; an odd one is left in the middle.
  const int64_t half = count / 2, second = count - half;
  if (second > half && logits[half] >= least)
    best.take(half, logits[half] * inverse_temp, hashed<uint32_t>(how->key, static_cast<uint32_t>(half), 0).first);
  Ints place;
  for (uint32_t lane = 0; lane < LANES; lane++) place[lane] = lane;
  for (int64_t i = 0; i < half; i += LANES, place += LANES) {
    const Floats a = load_row(logits + i, half - i), b = load_row(logits + second + i, half - i);
    const float highest = largest(larger(a, b));
    if (highest < least || highest * inverse_temp + MOST_NOISE < best.bar()) continue;
    const auto [of_a, of_b] = hashed<Ints>(how->key, place, place + static_cast<uint32_t>(second));
    take_lanes(best, i, a, of_a, least, inverse_temp);
    take_lanes(best, second + i, b, of_b, least, inverse_temp);
  }
  if (margin) *margin = how->temp * (best.score - best.second);
  return best.token;
}
