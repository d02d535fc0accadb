// Registers whose lanes are rows (row_lanes.h), of a 64-bit ARM: four rows.

#pragma once

#include "simd.h"

namespace gearbx {

constexpr int LANES = 4;
constexpr int DWORDS = 4;
constexpr int TILE = 8;
typedef int32x4_t Ints;
typedef float32x4_t Floats;

inline Ints zero_ints() { return vdupq_n_s32(0); }
inline Ints all_ints(int32_t value) { return vdupq_n_s32(value); }
inline Ints load_ints(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline void store_ints(void* p, Ints a) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(a)); }
inline Ints add_ints(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints multiply_ints(Ints a, int32_t b) { return vmulq_n_s32(a, b); }
inline Ints or_ints(Ints a, Ints b) { return vorrq_s32(a, b); }
inline Ints and_ints(Ints a, uint32_t mask) { return vandq_s32(a, all_ints(static_cast<int32_t>(mask))); }
inline Ints flip_ints(Ints a, uint32_t mask) { return veorq_s32(a, all_ints(static_cast<int32_t>(mask))); }
template <int UP>
inline Ints shift_ints(Ints a) {
  const uint32x4_t words = vreinterpretq_u32_s32(a);
  if constexpr (UP > 0) return vreinterpretq_s32_u32(vshlq_n_u32(words, UP));
  if constexpr (UP < 0) return vreinterpretq_s32_u32(vshrq_n_u32(words, -UP));
  return a;
}
// Each byte shifted down.
template <int DOWN>
inline Ints shift_bytes(Ints a) {
  return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), DOWN));
}

inline Floats all_floats(float value) { return vdupq_n_f32(value); }
inline Floats load_floats(const float* p) { return vld1q_f32(p); }
inline void store_floats(float* p, Floats a) { vst1q_f32(p, a); }
inline Floats add_floats(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats multiply_floats(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats multiply_add_floats(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats to_floats(Ints a) { return vcvtq_f32_s32(a); }
inline Floats as_floats(Ints a) { return vreinterpretq_f32_s32(a); }
inline Floats low_halves(Ints a) { return fp16_to_floats(vmovn_u32(vreinterpretq_u32_s32(a))); }

inline Floats load_values(const float* p) { return load_floats(p); }
inline Floats load_values(const Bf16* p) { return bf16_to_floats(vld1_u16(&p->bits)); }
inline Floats load_values(const Fp16* p) { return fp16_to_floats(vld1_u16(&p->bits)); }

// Additions of neighbours keep groups in order.
template <int R>
GEARBX_INLINE Ints fold(Ints a, Ints b) {
  static_assert(R == 2);
  return vpaddq_s32(a, b);
}
inline void store_sum_of_halves(int32_t* p, Ints a) { vst1_s32(p, vadd_s32(vget_low_s32(a), vget_high_s32(a))); }
inline Ints permute(Ints a, const int32_t*) { return a; }

template <int D>
GEARBX_INLINE void transpose(const uint8_t* p, int64_t stride, Ints* out) {
  const auto row = [&](int r) { return load_ints(p + r * stride); };
  const auto low = [](Ints a, Ints b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  };
  const auto high = [](Ints a, Ints b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  };
  const Ints even[2] = {vtrn1q_s32(row(0), row(1)), vtrn1q_s32(row(2), row(3))};
  const Ints odd[2] = {vtrn2q_s32(row(0), row(1)), vtrn2q_s32(row(2), row(3))};
  out[0] = low(even[0], even[1]);
  out[1] = low(odd[0], odd[1]);
  out[2] = high(even[0], even[1]);
  out[3] = high(odd[0], odd[1]);
}

}  // namespace gearbx
