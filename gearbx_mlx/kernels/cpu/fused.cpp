#include "fused.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "matvec.h"
#include "pool.h"
#include "simd.h"

namespace gearbx {

// Sines and cosines of eight numbers at once, within one unit in the last place: the C library takes 10 ns each.

typedef float Eight __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));

inline void sine_and_cosine(F8 angles, F8& sines, F8& cosines) {
  // x = n pi / 2 + r with |r| <= pi / 4, in double precision: pi / 2 is the sum of 33 bits and a remainder.
  const double rounding = 6755399441055744.0;  // 1.5 * 2^52: sums with it are rounded to integers
  Eight numbers;
  std::memcpy(&numbers, &angles, sizeof numbers);
  const Doubles x = __builtin_convertvector(numbers, Doubles);
  const Doubles sum = x * 0.63661977236758134308 + rounding, n = sum - rounding;
  const Doubles r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11, square = r * r;
  Longs quarter;
  std::memcpy(&quarter, &sum, sizeof quarter);

  // Taylor polynomials of sin(r) / r and cos(r) in the square of r.
  Doubles sine = Doubles{} + 1.0 / 362880, cosine = Doubles{} - 1.0 / 3628800;
  constexpr double SINE[] = {-1.0 / 5040, 1.0 / 120, -1.0 / 6, 1.0};
  constexpr double COSINE[] = {1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5, 1.0};
  for (const double next : SINE) sine = sine * square + next;
  for (const double next : COSINE) cosine = cosine * square + next;
  sine *= r;

  const Longs swapped = (quarter & 1) != 0;
  const Doubles s = swapped ? cosine : sine, c = swapped ? sine : cosine;
  const auto narrowed = [](const Doubles& from, F8& to) {
    const Eight made = __builtin_convertvector(from, Eight);
    std::memcpy(&to, &made, sizeof to);
  };
  narrowed((quarter & 2) != 0 ? -s : s, sines);
  narrowed(((quarter + 1) & 2) != 0 ? -c : c, cosines);
}

namespace {

constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers; waking a thread takes as long as fewer

// Calls work(first, end) for ranges of 0 to `count`, on several threads if there are enough numbers.
template <class Work>
void share_ranges(int64_t count, int64_t numbers_each, const Work& work) {
  struct Job {
    const Work& work;
    int64_t count, pieces;
  };
  const Job job = {work, count, std::min<int64_t>(count, 4 * thread_count())};
  if (count * numbers_each < WORTH_SHARING) return work(0, count);
  const auto piece = [](const void* context, int i) {
    const Job& j = *static_cast<const Job*>(context);
    j.work(i * j.count / j.pieces, (i + 1) * j.count / j.pieces);
  };
  share_out(static_cast<int>(job.pieces), piece, &job);
}

float sum_of_squares(const float* x, int64_t count) {
  F16 sums[2] = {join(zero8(), zero8()), join(zero8(), zero8())};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    for (int k = 0; k < 2; k++) sums[k] = multiply_add16(load16(x + i + 16 * k), load16(x + i + 16 * k), sums[k]);
  const EvenOdd one = in_halves(sums[0]), two = in_halves(sums[1]);
  F8 both = add8(add8(one.even, two.even), add8(one.odd, two.odd));
  for (; i + 8 <= count; i += 8) both = multiply_add8(load8(x + i), load8(x + i), both);
  float sum = sum8(both);
  for (; i < count; i++) sum = multiply_add(x[i], x[i], sum);
  return sum;
}

template <class Weight>
void norm_row(const float* x, int64_t columns, const Weight* weight, float eps, float* y) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, columns) / static_cast<float>(columns) + eps);
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) store(y + i, load(x + i) * all(factor) * load(weight + i));
  for (; i < columns; i++) y[i] = x[i] * factor * to_float(weight[i]);
}

template <class Weight>
void norm_rows(const float* x, int64_t rows, int64_t columns, const Weight* weight, float eps, float* y) {
  share_ranges(rows, columns, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) norm_row(x + row * columns, columns, weight, eps, y + row * columns);
  });
}

// Rotates the pairs i to i + count, at most eight, of a vector whose numbers are `stride` apart.
void turn_pairs(const gearbx_rotation& r, F8 cosines, F8 sines, int64_t i, int64_t count, const float* x,
                int64_t stride, float* y) {
  // Pair i is the numbers at first * i and first * i + second.
  const int64_t first = r.traditional ? 2 : 1, second = r.traditional ? 1 : r.dims / 2;
  if (count == 8 && stride == 1 && first == 1) {
    const F8 a = load8(x + i), b = load8(x + i + second);
    store8(y + i, a * cosines - b * sines);
    store8(y + i + second, a * sines + b * cosines);
    return;
  }
  float c[8], s[8];
  store8(c, cosines);
  store8(s, sines);
  for (int64_t k = 0; k < count; k++) {
    const int64_t one = first * (i + k), two = one + second;
    const float a = x[one * stride], b = x[two * stride];
    y[one] = a * c[k] - b * s[k];
    y[two] = a * s[k] + b * c[k];
  }
}

// All vectors number t of the sequences `first` to `end`, at the same position.
void turn_position(const gearbx_rotation& r, int64_t first, int64_t end, int64_t t, const float* x, float* y) {
  const int64_t length = r.shape[2], width = r.shape[3], half = r.dims / 2, stride = r.strides[3];
  const int64_t offset = r.offset - (r.padding ? r.padding[first] : 0);
  const float position = (static_cast<float>(t) + static_cast<float>(offset)) * r.scale;
  const auto each_vector = [&](auto work) {
    for (int64_t row = first * r.shape[1]; row < end * r.shape[1]; row++)
      work(x + row / r.shape[1] * r.strides[0] + row % r.shape[1] * r.strides[1] + t * r.strides[2],
           y + (row * length + t) * width);
  };
  for (int64_t i = 0; i < half; i += 8) {
    const int64_t count = std::min<int64_t>(8, half - i);
    float angles[8] = {};
    for (int64_t k = 0; k < count; k++) angles[k] = position * r.frequencies[i + k];
    F8 cosines, sines;
    sine_and_cosine(load8(angles), sines, cosines);
    each_vector([&](const float* from, float* to) { turn_pairs(r, cosines, sines, i, count, from, stride, to); });
  }
  if (r.dims == width) return;
  each_vector([&](const float* from, float* to) {
    for (int64_t i = r.dims; i < width; i++) to[i] = from[i * stride];
  });
}

// gate / (1 + exp(-z)) * up.
Floats gated(Floats gate, Floats z, Floats up) {
  const Floats zero = all(0), one = all(1);
  const Floats e = exponential(z < zero ? z : zero - z);  // of -|z|, or NaN
  return gate * ((z < zero ? e : one) / (e + one)) * up;
}

Floats swiglu(Floats gate, Floats up) { return gated(gate, gate, up); }

Floats geglu(Floats gate, Floats up) {
  constexpr float SLOPE = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return gated(gate, all(SLOPE) * (gate + all(0.044715f) * (gate * gate * gate)), up);
}

template <Floats (*WORK)(Floats, Floats)>
void each_number(const float* a, const float* b, int64_t count, float* y) {
  share_ranges((count + LANES - 1) / LANES, LANES, [&](int64_t first, int64_t end) {
    for (int64_t i = first * LANES; i < end * LANES; i += LANES) {
      if (i + LANES <= count)
        store(y + i, WORK(load(a + i), load(b + i)));
      else
        store_some(y + i, count - i, WORK(load_some(a + i, count - i, 0), load_some(b + i, count - i, 0)));
    }
  });
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_rms_norm(const float* x, int64_t rows, int64_t columns, const void* weight, int type, float eps,
                                float* y) {
  using namespace gearbx;
  if (type == GEARBX_BFLOAT16)
    norm_rows(x, rows, columns, static_cast<const Bf16*>(weight), eps, y);
  else if (type == GEARBX_FLOAT16)
    norm_rows(x, rows, columns, static_cast<const Fp16*>(weight), eps, y);
  else
    norm_rows(x, rows, columns, static_cast<const float*>(weight), eps, y);
}

extern "C" void gearbx_add_one(const void* weight, int64_t columns, int type, float* y) {
  using namespace gearbx;
  for (int64_t i = 0; i < columns; i++) {
    if (type == GEARBX_BFLOAT16)
      y[i] = rounded_to_bf16(1.0f + to_float(static_cast<const Bf16*>(weight)[i]));
    else if (type == GEARBX_FLOAT16)
      y[i] = rounded_to_fp16(1.0f + to_float(static_cast<const Fp16*>(weight)[i]));
    else
      y[i] = 1.0f + static_cast<const float*>(weight)[i];
  }
}

extern "C" void gearbx_rope(const gearbx_rotation* rotation, const float* x, float* y) {
  const gearbx_rotation& r = *rotation;
  gearbx::share_ranges(r.shape[2], r.shape[0] * r.shape[1] * r.shape[3], [&](int64_t first, int64_t end) {
    const int64_t batch = r.shape[0], together = r.padding ? 1 : batch;
    for (int64_t t = first; t < end; t++)
      for (int64_t b = 0; b < batch; b += together) gearbx::turn_position(r, b, b + together, t, x, y);
  });
}

extern "C" void gearbx_swiglu(const float* gate, const float* up, int64_t count, float* y) {
  gearbx::each_number<gearbx::swiglu>(gate, up, count, y);
}

extern "C" void gearbx_geglu(const float* gate, const float* up, int64_t count, float* y) {
  gearbx::each_number<gearbx::geglu>(gate, up, count, y);
}
