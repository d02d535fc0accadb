// Sines and cosines of eight numbers at once, within one unit in the last place: the C library's take 10 ns each.

#pragma once

#include "simd.h"

namespace gearbx {

typedef float Eight __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));

inline void sine_and_cosine(F8 angles, F8& sines, F8& cosines) {
  // x = n pi / 2 + r with |r| <= pi / 4, in double precision: pi / 2 is the sum of 33 bits and a rest.
  const double rounding = 6755399441055744.0;  // 1.5 * 2^52: a sum with it is rounded to an integer, in the lowest bits
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

}  // namespace gearbx
