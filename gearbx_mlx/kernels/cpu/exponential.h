// exp of several numbers at once. MLX calls that of the C library, which takes 20 ns per number on x86.

#pragma once

#include "lanes.h"

namespace gearbx {

constexpr float LEAST = -80.0f;  // exp of less is negligible next to 1

// exp(z) for z <= 0, and 0 where z is below LEAST: 2^n exp(r), n whole, |r| <= log(2) / 2, by its Taylor polynomial.
// exp(0) is exactly 1, and exp(NaN) is NaN.
inline Floats exponential(Floats z) {
  const Floats rounding = all(12582912.0f);  // 1.5 * 2^23: a sum with it is rounded to an integer, in the lowest bits
  const Floats sum = multiply_add(z, all(1.44269504f), rounding), n = sum - rounding;
  const Floats r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), z));
  Floats p = all(1.0f / 5040);
  constexpr float NEXT[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float next : NEXT) p = multiply_add(p, r, all(next));
  const Floats power = as_floats((as_ints(sum) << 23) + as_ints(all(1.0f)));
  return unless_less(z, LEAST, p * power);
}

}  // namespace gearbx
