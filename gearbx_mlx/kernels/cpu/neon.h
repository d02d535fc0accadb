// Vectors of eight floats in the two registers that they need on a 64-bit ARM. A type of their own: GCC keeps its
// vectors of 32 bytes in memory there.

#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace gearbx {

struct F8 {
  float32x4_t low, high;
};

inline F8 operator+(F8 a, F8 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F8 operator-(F8 a, F8 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F8 operator*(F8 a, F8 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }

inline F8 zero8() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline F8 all8(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
inline F8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F8 add8(F8 a, F8 b) { return a + b; }
inline F8 multiply8(F8 a, F8 b) { return a * b; }
inline F8 multiply_add8(F8 a, F8 b, F8 c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float32x4_t bf16_to_floats(uint16x4_t halves) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
inline float32x4_t fp16_to_floats(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }

inline F8 bf16_to_floats(uint16x8_t halves) {
  return {bf16_to_floats(vget_low_u16(halves)), bf16_to_floats(vget_high_u16(halves))};
}
inline F8 fp16_to_floats(uint16x8_t halves) {
  return {fp16_to_floats(vget_low_u16(halves)), fp16_to_floats(vget_high_u16(halves))};
}
inline F8 load8_bf16(const uint16_t* p) { return bf16_to_floats(vld1q_u16(p)); }
inline F8 load8_fp16(const uint16_t* p) { return fp16_to_floats(vld1q_u16(p)); }

inline void store8(float* p, F8 a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}

// Loads are instructions of their own, so that compilers do not repeat them.
inline F8 hold(F8 a) { return a; }

// The sums of four vectors, in the order of sum8.
inline float32x4_t sums4(F8 a, F8 b, F8 c, F8 d) {
  const auto fours = [](F8 v) { return vreinterpretq_f64_f32(vaddq_f32(v.low, v.high)); };
  const auto twos = [&](F8 v, F8 w) {
    const float64x2_t one = fours(v), two = fours(w);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(one, two)), vreinterpretq_f32_f64(vzip2q_f64(one, two)));
  };
  return vpaddq_f32(twos(a, b), twos(c, d));
}

}  // namespace gearbx
