#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "exponential.h"
#include "pool.h"
#include "simd.h"

namespace gearbx {
namespace {

constexpr int64_t TAKEN = 16, MOST_PIECES = 1 << 15;  // queries per piece of work, more if there are too many pieces
constexpr int64_t WORTH_SHARING = 1 << 17;  // multiplications: to wake another thread takes as long as fewer

float dot(const float* a, const float* b, int64_t count) {
  F8 even = zero8(), odd = zero8();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    even = multiply_add8(load8(a + i), load8(b + i), even);
    odd = multiply_add8(load8(a + i + 8), load8(b + i + 8), odd);
  }
  for (; i + 8 <= count; i += 8) even = multiply_add8(load8(a + i), load8(b + i), even);
  float sum = sum8(add8(even, odd));
  for (; i < count; i++) sum = multiply_add(a[i], b[i], sum);
  return sum;
}

// Replaces scores by exp(score - highest), and returns the sum of these. NaN stays NaN.
float exponentials(float* scores, int64_t count) {
  float highest = -INFINITY;
  for (int64_t i = 0; i < count; i++) highest = scores[i] > highest ? scores[i] : highest;
  Floats sums = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(count - i);
    Floats z = Floats{} - INFINITY;
    i + LANES <= count ? std::memcpy(&z, scores + i, sizeof z) : std::memcpy(&z, scores + i, bytes);
    z -= highest;
    const Floats weights = z < LEAST ? Floats{} : z >= LEAST ? exponential(z >= LEAST ? z : Floats{}) : z;
    i + LANES <= count ? std::memcpy(scores + i, &weights, sizeof z) : std::memcpy(scores + i, &weights, bytes);
    sums += weights;
  }
  float sum = 0;
  for (int k = 0; k < LANES; k++) sum += sums[k];
  return sum;
}

// y (8 N) = factor times the weighted sum of values (count, 8 N), which are `stride` apart.
template <int N>
void weighted_sum(const float* weights, int64_t count, const float* values, int64_t stride, float factor, float* y) {
  F8 sums[N];
  for (F8& sum : sums) sum = zero8();
  for (int64_t i = 0; i < count; i++)
    for (int n = 0; n < N; n++) sums[n] = multiply_add8(all8(weights[i]), load8(values + i * stride + 8 * n), sums[n]);
  for (int n = 0; n < N; n++) store8(y + 8 * n, multiply8(sums[n], all8(factor)));
}

struct Job {
  const gearbx_attention& form;
  const float *queries, *keys, *values;
  float* y;
  int64_t taken;
};

// Sets the scores of masked keys to -inf, and returns the number of keys up to the last one that is not masked. If all
// keys are masked, sets all scores to 0.
int64_t hide(const uint8_t* mask, int64_t stride, std::vector<float>& scores) {
  int64_t seen = static_cast<int64_t>(scores.size());
  while (seen > 0 && !mask[(seen - 1) * stride]) seen--;
  if (seen == 0) {
    std::fill(scores.begin(), scores.end(), 0.0f);
    return static_cast<int64_t>(scores.size());
  }
  for (int64_t i = 0; i < seen; i++)
    if (!mask[i * stride]) scores[static_cast<size_t>(i)] = -INFINITY;
  return seen;
}

// One query of one head, which sees at most the first `seen` keys.
void attend(const Job& job, int64_t batch, int64_t head, int64_t position, int64_t seen, std::vector<float>& weights) {
  const gearbx_attention& f = job.form;
  const auto start = [&](const int64_t* strides, int64_t h) { return batch * strides[0] + h * strides[1]; };
  const float* query = job.queries + start(f.query_strides, head) + position * f.query_strides[2];
  const float* keys = job.keys + start(f.key_strides, head / f.shared);
  const float* values = job.values + start(f.value_strides, head / f.shared);
  float* y = job.y + ((batch * f.heads + head) * f.length + position) * f.width;
  const int64_t stride = f.value_strides[2];
  weights.resize(static_cast<size_t>(seen));
  for (int64_t i = 0; i < seen; i++)
    weights[static_cast<size_t>(i)] = f.scale * dot(query, keys + i * f.key_strides[2], f.width);
  if (f.mask) {
    const int64_t* strides = f.mask_strides;
    seen = hide(f.mask + start(strides, head) + position * strides[2], strides[3], weights);
  }
  const float factor = 1.0f / exponentials(weights.data(), seen);
  int64_t d = 0;
  for (; d + 64 <= f.width; d += 64) weighted_sum<8>(weights.data(), seen, values + d, stride, factor, y + d);
  for (; d + 16 <= f.width; d += 16) weighted_sum<2>(weights.data(), seen, values + d, stride, factor, y + d);
  for (; d < f.width; d++) {
    float sum = 0;
    for (int64_t i = 0; i < seen; i++) sum = multiply_add(weights[static_cast<size_t>(i)], values[i * stride + d], sum);
    y[d] = sum * factor;
  }
}

void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const gearbx_attention& f = job.form;
  static thread_local std::vector<float> weights;
  const int64_t first = piece * job.taken, all = f.batch * f.heads * f.length;
  for (int64_t query = first; query < first + job.taken && query < all; query++) {
    const int64_t head = query / f.length, i = query % f.length;
    attend(job, head / f.heads, head % f.heads, i, f.causal ? f.keys - f.length + i + 1 : f.keys, weights);
  }
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_attend(const gearbx_attention* form, const float* queries, const float* keys,
                              const float* values, float* y) {
  using namespace gearbx;
  const int64_t all = form->batch * form->heads * form->length;
  const int64_t some = form->length < TAKEN ? form->length : TAKEN, least = (all + MOST_PIECES - 1) / MOST_PIECES;
  const bool shared = all * form->keys * form->width >= WORTH_SHARING;
  const Job job = {*form, queries, keys, values, y, !shared ? all : some > least ? some : least};
  share_out(static_cast<int>((all + job.taken - 1) / job.taken), do_piece, &job);
}
