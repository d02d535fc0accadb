// Registers in which each lane is a different row of a matrix, so that no sum crosses lanes: sixteen rows with AVX-512,
// four with NEON, otherwise eight. A lane of Ints has an integer or four codes, a lane of Floats a number of that row.
//
// Matmuls multiply codes and activations as bytes, four at a time, by the processor's instruction if it has one. NARROW
// codes have at most four bits. Every operation on floats is the same in each lane of every form.

#pragma once

#include "simd.h"

#if defined(GEARBX_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define GEARBX_AVX512_VNNI 1
#elif defined(GEARBX_AVX2) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define GEARBX_VNNI 1
#define GEARBX_DPBUSD _mm256_dpbusd_epi32
#elif defined(GEARBX_AVX2) && defined(__AVXVNNI__)
#define GEARBX_VNNI 1
#define GEARBX_DPBUSD _mm256_dpbusd_avx_epi32
#endif

#ifdef GEARBX_NEON

// Registers whose lanes are rows (row_lanes.h), of a 64-bit ARM: four rows.
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

// Additions of neighbors keep groups in order.
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

#endif

namespace gearbx {

#if defined(GEARBX_AVX512_VNNI)

constexpr int LANES = 16;
constexpr int DWORDS = 16;  // of a row that are read at once if there are enough; otherwise 4
constexpr int TILE = 8;  // vectors at a time: their sums stay in registers
typedef __m512i Ints;
typedef __m512 Floats;

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints all_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints multiply_ints(Ints a, int32_t b) { return _mm512_mullo_epi32(a, all_ints(b)); }
inline Ints or_ints(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints and_ints(Ints a, uint32_t mask) { return _mm512_and_si512(a, all_ints(static_cast<int32_t>(mask))); }
inline Ints flip_ints(Ints a, uint32_t mask) { return _mm512_xor_si512(a, all_ints(static_cast<int32_t>(mask))); }
template <int UP>
inline Ints shift_ints(Ints a) {
  return UP > 0 ? _mm512_slli_epi32(a, UP > 0 ? UP : 0) : UP < 0 ? _mm512_srli_epi32(a, UP < 0 ? -UP : 0) : a;
}

inline Floats all_floats(float value) { return _mm512_set1_ps(value); }
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats add_floats(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply_floats(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add_floats(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats low_halves(Ints a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }

inline Floats load_values(const float* p) { return load_floats(p); }
inline Floats load_values(const Bf16* p) {
  return as_floats(shift_ints<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
inline Floats load_values(const Fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Two registers, with groups of R lanes, become one with groups of R / 2 lanes, by additions.
template <int R>
GEARBX_INLINE Ints fold(Ints a, Ints b) {
  if constexpr (R == 16) return add_ints(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
  if constexpr (R == 8) return add_ints(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  if constexpr (R == 4) return add_ints(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const Floats c = as_floats(a), d = as_floats(b);
  const Floats even = _mm512_shuffle_ps(c, d, 0x88), odd = _mm512_shuffle_ps(c, d, 0xdd);
  return add_ints(_mm512_castps_si512(even), _mm512_castps_si512(odd));
}
// Adds the second half of a register to the first, and writes the sum.
inline void store_sum_of_halves(int32_t* p, Ints a) {
  const __m256i sum = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), sum);
}
inline Ints permute(Ints a, const int32_t* index) { return _mm512_permutexvar_epi32(load_ints(index), a); }

// The 128 bits of four registers, as a matrix of four by four, transposed.
GEARBX_INLINE void transpose_quarters(Ints* a) {
  const Ints p = _mm512_shuffle_i32x4(a[0], a[1], 0x44), q = _mm512_shuffle_i32x4(a[0], a[1], 0xee);
  const Ints r = _mm512_shuffle_i32x4(a[2], a[3], 0x44), s = _mm512_shuffle_i32x4(a[2], a[3], 0xee);
  a[0] = _mm512_shuffle_i32x4(p, r, 0x88);
  a[1] = _mm512_shuffle_i32x4(p, r, 0xdd);
  a[2] = _mm512_shuffle_i32x4(q, s, 0x88);
  a[3] = _mm512_shuffle_i32x4(q, s, 0xdd);
}

// Dword j of register i, of each 128 bits, becomes dword i of register j.
GEARBX_INLINE void transpose_dwords(Ints a, Ints b, Ints c, Ints d, Ints* out) {
  const Ints p = _mm512_unpacklo_epi32(a, b), q = _mm512_unpackhi_epi32(a, b);
  const Ints r = _mm512_unpacklo_epi32(c, d), s = _mm512_unpackhi_epi32(c, d);
  out[0] = _mm512_unpacklo_epi64(p, r);
  out[1] = _mm512_unpackhi_epi64(p, r);
  out[2] = _mm512_unpacklo_epi64(q, s);
  out[3] = _mm512_unpackhi_epi64(q, s);
}

// 4 * D bytes of each row, `stride` bytes apart: register j has dword j of every row. Whole cache lines are read at
// once, because rows a power of two apart compete for the same few lines.
template <int D>
GEARBX_INLINE void transpose(const uint8_t* p, int64_t stride, Ints* out) {
  Ints rows[4][4];  // row i: rows i, i + 4, i + 8 and i + 12, whose quarters become adjacent
  for (int i = 0; i < 4; i++) {
    if constexpr (D == 16) {
      for (int k = 0; k < 4; k++) rows[i][k] = load_ints(p + (i + 4 * k) * stride);
      transpose_quarters(rows[i]);
    } else {
      const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * stride)); };
      rows[i][0] = _mm512_castsi128_si512(row(i));
      for (int k = 1; k < 4; k++)
        rows[i][0] = _mm512_mask_broadcast_i32x4(rows[i][0], static_cast<__mmask16>(0xf << 4 * k), row(i + 4 * k));
    }
  }
  for (int k = 0; k < D / 4; k++) transpose_dwords(rows[0][k], rows[1][k], rows[2][k], rows[3][k], out + 4 * k);
}

#elif defined(GEARBX_AVX2)

constexpr int LANES = 8;
constexpr int DWORDS = 4;
constexpr int TILE = 8;
typedef __m256i Ints;
typedef __m256 Floats;

inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Ints all_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_ints(void* p, Ints a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints multiply_ints(Ints a, int32_t b) { return _mm256_mullo_epi32(a, all_ints(b)); }
inline Ints or_ints(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints and_ints(Ints a, uint32_t mask) { return _mm256_and_si256(a, all_ints(static_cast<int32_t>(mask))); }
inline Ints flip_ints(Ints a, uint32_t mask) { return _mm256_xor_si256(a, all_ints(static_cast<int32_t>(mask))); }
template <int UP>
inline Ints shift_ints(Ints a) {
  return UP > 0 ? _mm256_slli_epi32(a, UP > 0 ? UP : 0) : UP < 0 ? _mm256_srli_epi32(a, UP < 0 ? -UP : 0) : a;
}

inline Floats all_floats(float value) { return all8(value); }
inline Floats load_floats(const float* p) { return load8(p); }
inline void store_floats(float* p, Floats a) { store8(p, a); }
inline Floats add_floats(Floats a, Floats b) { return add8(a, b); }
inline Floats multiply_floats(Floats a, Floats b) { return multiply8(a, b); }
inline Floats multiply_add_floats(Floats a, Floats b, Floats c) { return multiply_add8(a, b, c); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
inline Floats low_halves(Ints a) {
  const Ints low = and_ints(a, 0xffff), packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

template <class T>
Floats load_values(const T* p) {
  return load8(p);
}

template <int R>
GEARBX_INLINE Ints fold(Ints a, Ints b) {
  if constexpr (R == 8) return add_ints(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  if constexpr (R == 4) return add_ints(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  const Floats c = as_floats(a), d = as_floats(b);
  const Floats even = _mm256_shuffle_ps(c, d, 0x88), odd = _mm256_shuffle_ps(c, d, 0xdd);
  return add_ints(_mm256_castps_si256(even), _mm256_castps_si256(odd));
}
inline void store_sum_of_halves(int32_t* p, Ints a) {
  const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), sum);
}
inline Ints permute(Ints a, const int32_t* index) { return _mm256_permutevar8x32_epi32(a, load_ints(index)); }

template <int D>
GEARBX_INLINE void transpose(const uint8_t* p, int64_t stride, Ints* out) {
  const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * stride)); };
  Ints rows[4];  // i and i + 4
  for (int i = 0; i < 4; i++) rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(i + 4), 1);
  const Ints a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]);
  const Ints c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
  out[0] = _mm256_unpacklo_epi64(a, c);
  out[1] = _mm256_unpackhi_epi64(a, c);
  out[2] = _mm256_unpacklo_epi64(b, d);
  out[3] = _mm256_unpackhi_epi64(b, d);
}

#elif !defined(GEARBX_NEON)

constexpr int LANES = 8;
constexpr int DWORDS = 4;
constexpr int TILE = 4;
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef F8 Floats;

inline Ints zero_ints() { return Ints{}; }
inline Ints all_ints(int32_t value) { return Ints{} + value; }
inline Ints load_ints(const void* p) {
  Ints a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline void store_ints(void* p, Ints a) { std::memcpy(p, &a, sizeof a); }
inline Ints add_ints(Ints a, Ints b) { return a + b; }
inline Ints multiply_ints(Ints a, int32_t b) { return a * b; }
inline Ints or_ints(Ints a, Ints b) { return a | b; }
inline Ints and_ints(Ints a, uint32_t mask) { return a & all_ints(static_cast<int32_t>(mask)); }
inline Ints flip_ints(Ints a, uint32_t mask) { return a ^ all_ints(static_cast<int32_t>(mask)); }
template <int UP>
inline Ints shift_ints(Ints a) {
  const Words words = reinterpret_cast<Words>(a);
  return reinterpret_cast<Ints>(UP > 0 ? words << (UP > 0 ? UP : 0) : words >> (UP < 0 ? -UP : 0));
}

inline Floats all_floats(float value) { return all8(value); }
inline Floats load_floats(const float* p) { return load8(p); }
inline void store_floats(float* p, Floats a) { store8(p, a); }
inline Floats add_floats(Floats a, Floats b) { return add8(a, b); }
inline Floats multiply_floats(Floats a, Floats b) { return multiply8(a, b); }
inline Floats multiply_add_floats(Floats a, Floats b, Floats c) { return multiply_add8(a, b, c); }
inline Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }
inline Floats as_floats(Ints a) { return reinterpret_cast<Floats>(a); }
template <class T>
Floats load_values(const T* p) {
  return load8(p);
}
inline Floats low_halves(Ints a) {
  Floats out;
  for (int l = 0; l < LANES; l++) out[l] = fp16_to_float(static_cast<uint16_t>(a[l]));
  return out;
}

template <int D>
GEARBX_INLINE void transpose(const uint8_t* p, int64_t stride, Ints* out) {
  for (int l = 0; l < LANES; l++) {
    int32_t dwords[4];
    std::memcpy(dwords, p + l * stride, sizeof dwords);
    for (int j = 0; j < 4; j++) out[j][l] = dwords[j];
  }
}

#endif

}  // namespace gearbx
