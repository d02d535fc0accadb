// exp of eight numbers at once. MLX calls that of the C library, which takes 20 ns per number on x86.
//
// The vector types are those of GCC and Clang, which work on every processor.

#pragma once

#include <cstdint>
#include <cstring>

namespace gearbx {

constexpr int LANES = 8;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr float LEAST = -80.0f;  // exp of less is negligible next to 1

// exp(z) for LEAST <= z <= 0: 2^n exp(r), n whole, |r| <= log(2) / 2, by its Taylor polynomial; exp(0) is exactly 1.
inline Floats exponential(Floats z) {
  const float rounding = 12582912.0f;  // 1.5 * 2^23: adding it to a number rounds that to an integer
  const Floats n = (z * 1.44269504f + rounding) - rounding;
  const Floats r = (z - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = Floats{} + 1.0f / 5040;
  constexpr float NEXT[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float next : NEXT) p = p * r + next;
  Ints bits;
  std::memcpy(&bits, &p, sizeof p);
  bits += __builtin_convertvector(n, Ints) * (1 << 23);
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

}  // namespace gearbx
