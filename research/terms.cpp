// The terms of AION's cost model (5.2), each by itself, and the products that consist of them.
//
// Weights are in format `groupwise`, 32 codes with a float scale: of 4 bits, 16 bytes with the first 16 codes in their low
// halves; or in a byte each, below 128, which both kinds of dot product take. Or they are bfloat16, or float32. A term has
// its operands in registers, or reads activations, which are in the first cache, as in the product; so terms do not overlap.
// `hide` keeps the compiler from computing something once for all steps, `keep` from leaving it out; neither is an
// instruction. Marks around each step are for llvm-mca (-DMARKS).

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL _Pragma("unroll")
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include <immintrin.h>
#define COMMENT "# "
using Floats = __m512;  // 16
using Codes = __m128i;  // 16 bytes: a group of 4-bit codes
using Bytes = __m256i;  // 32: a group of 8-bit codes, or 16 bfloat16
using Sums = __m256i;   // of products of bytes
using Few = __m256;     // as many floats
template <typename T> INLINE void keep(T v) { asm volatile("" ::"v"(v)); }
template <typename T> INLINE void hide(T& v) { asm volatile("" : "+v"(v)); }
INLINE Floats zeros() { return _mm512_setzero_ps(); }
INLINE Few few_zeros() { return _mm256_setzero_ps(); }
INLINE Floats floats_at(const float* p) { return _mm512_loadu_ps(p); }
INLINE Codes codes_at(const uint8_t* p) { return _mm_loadu_si128((const Codes*)p); }
INLINE Bytes bytes_at(const void* p) { return _mm256_loadu_si256((const Bytes*)p); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats scaled(Floats a, float s, Floats c) { return fma(a, _mm512_set1_ps(s), c); }
INLINE Floats to_floats(Codes c) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(c)); }
INLINE Codes low(Codes c) { return _mm_and_si128(c, _mm_set1_epi8(15)); }
INLINE Codes high(Codes c) { return low(_mm_srli_epi16(c, 4)); }
INLINE Codes first(Bytes b) { return _mm256_castsi256_si128(b); }
INLINE Codes second(Bytes b) { return _mm256_extracti128_si256(b, 1); }
INLINE Bytes unpack(Codes c) { return _mm256_inserti128_si256(_mm256_castsi128_si256(low(c)), high(c), 1); }
INLINE Floats from_bfloat(Bytes b) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}
INLINE Sums dot(Bytes codes, Bytes x) { return _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, x); }
INLINE Few scaled(Sums a, float s, Few c) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), _mm256_set1_ps(s), c); }
INLINE float total(Floats a) { return _mm512_reduce_add_ps(a); }
INLINE float total(Few a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pairs = _mm_hadd_ps(half, half);
    return _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
}
INLINE Floats larger(Floats most, Floats a) { return _mm512_max_ps(most, _mm512_abs_ps(a)); }
INLINE float most_of(Floats a) { return _mm512_reduce_max_ps(a); }
INLINE void round_to(int8_t* to, Floats x, Floats factor) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, factor))));
}
INLINE Floats all(float s) { return _mm512_set1_ps(s); }

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define COMMENT "// "
using Floats = float32x4x4_t;
using Codes = uint8x16_t;
using Bytes = uint8x16x2_t;
using Sums = int32x4_t;
using Few = float32x4_t;
template <typename T> INLINE void keep(T v) { asm volatile("" ::"w"(v)); }
template <typename T> INLINE void hide(T& v) { asm volatile("" : "+w"(v)); }
INLINE void keep(Floats v) { UNROLL for (int i = 0; i < 4; i++) keep(v.val[i]); }
INLINE void hide(Floats& v) { UNROLL for (int i = 0; i < 4; i++) hide(v.val[i]); }
INLINE void keep(Bytes v) { UNROLL for (int i = 0; i < 2; i++) keep(v.val[i]); }
INLINE void hide(Bytes& v) { UNROLL for (int i = 0; i < 2; i++) hide(v.val[i]); }
INLINE Few few_zeros() { return vdupq_n_f32(0); }
INLINE Floats all(float s) { return {vdupq_n_f32(s), vdupq_n_f32(s), vdupq_n_f32(s), vdupq_n_f32(s)}; }
INLINE Floats zeros() { return all(0); }
INLINE Floats floats_at(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
INLINE Codes codes_at(const uint8_t* p) { return vld1q_u8(p); }
INLINE Bytes bytes_at(const void* p) { return {vld1q_u8((const uint8_t*)p), vld1q_u8((const uint8_t*)p + 16)}; }
INLINE Floats fma(Floats a, Floats b, Floats c) {
    UNROLL for (int i = 0; i < 4; i++) c.val[i] = vfmaq_f32(c.val[i], a.val[i], b.val[i]);
    return c;
}
INLINE Floats times(Floats a, Floats b) {
    UNROLL for (int i = 0; i < 4; i++) a.val[i] = vmulq_f32(a.val[i], b.val[i]);
    return a;
}
INLINE Floats scaled(Floats a, float s, Floats c) { return fma(a, all(s), c); }
INLINE Few four(uint16x4_t c) { return vcvtq_f32_u32(vmovl_u16(c)); }
INLINE Floats to_floats(Codes c) {
    const uint16x8_t a = vmovl_u8(vget_low_u8(c)), b = vmovl_u8(vget_high_u8(c));
    return {four(vget_low_u16(a)), four(vget_high_u16(a)), four(vget_low_u16(b)), four(vget_high_u16(b))};
}
INLINE Codes low(Codes c) { return vandq_u8(c, vdupq_n_u8(15)); }
INLINE Codes high(Codes c) { return vshrq_n_u8(c, 4); }
INLINE Codes first(Bytes b) { return b.val[0]; }
INLINE Codes second(Bytes b) { return b.val[1]; }
INLINE Bytes unpack(Codes c) { return {low(c), high(c)}; }
INLINE Few widened(uint16x4_t b) { return vreinterpretq_f32_u32(vshll_n_u16(b, 16)); }
INLINE Floats from_bfloat(Bytes b) {
    const uint16x8_t p = vreinterpretq_u16_u8(b.val[0]), q = vreinterpretq_u16_u8(b.val[1]);
    return {widened(vget_low_u16(p)), widened(vget_high_u16(p)), widened(vget_low_u16(q)), widened(vget_high_u16(q))};
}
INLINE Sums dot(Bytes codes, Bytes x) {
    const Sums some = vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(codes.val[0]), vreinterpretq_s8_u8(x.val[0]));
    return vdotq_s32(some, vreinterpretq_s8_u8(codes.val[1]), vreinterpretq_s8_u8(x.val[1]));
}
INLINE Few scaled(Sums a, float s, Few c) { return vfmaq_n_f32(c, vcvtq_f32_s32(a), s); }
INLINE float total(Few a) { return vaddvq_f32(a); }
INLINE float total(Floats a) { return total(a.val[0] + a.val[1] + a.val[2] + a.val[3]); }
INLINE Floats larger(Floats most, Floats a) {
    UNROLL for (int i = 0; i < 4; i++) most.val[i] = vmaxq_f32(most.val[i], vabsq_f32(a.val[i]));
    return most;
}
INLINE float most_of(Floats a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.val[0], a.val[1]), vmaxq_f32(a.val[2], a.val[3])));
}
INLINE void round_to(int8_t* to, Floats x, Floats factor) {
    x = times(x, factor);
    int16x4_t part[4];
    UNROLL for (int i = 0; i < 4; i++) part[i] = vqmovn_s32(vcvtnq_s32_f32(x.val[i]));
    const int8x8_t a = vqmovn_s16(vcombine_s16(part[0], part[1])), b = vqmovn_s16(vcombine_s16(part[2], part[3]));
    vst1q_s8(to, vcombine_s8(a, b));
}
#else
#error "AVX-512 with VNNI, or NEON with dot products"
#endif

#ifdef MARKS
#define STEP(name, ...)                                   \
    asm volatile(COMMENT "LLVM-MCA-BEGIN " #name ::: "memory"); \
    __VA_ARGS__                                           \
    asm volatile(COMMENT "LLVM-MCA-END " #name ::: "memory");
#else
#define STEP(name, ...) __VA_ARGS__
#endif

constexpr int GROUP = 32, AT_ONCE = 4;  // groups in a step

// Rows of weights, and what they are multiplied with. Rows that lie at a distance of 0 are one row, again and again.
struct Matrix {
    const uint8_t* weights;
    const float* scales;
    const float* x;        // columns
    int8_t* bytes;         // x, rounded
    const float* x_sums;   // of each group, times what a code is off: 8 or 64
    const float* b_sums;   // the same of the bytes
    float* out;            // rows
    int64_t rows, columns, row_bytes, row_scales;
};

// For each step of each row: UNROLL over its groups, whose number in the row is g.
#define ROWS(name, before, of_a_group, after)                                   \
    extern "C" void name(const Matrix* m) {                                     \
        const int64_t groups = m->columns / GROUP;                              \
        for (int64_t row = 0; row < m->rows; row++) {                           \
            const uint8_t* w = m->weights + row * m->row_bytes;                 \
            const float* scales = m->scales + row * m->row_scales;              \
            const float* x = m->x;                                              \
            const int8_t* bytes = m->bytes;                                     \
            (void)w, (void)scales, (void)x, (void)bytes;                        \
            before;                                                             \
            for (int64_t at = 0; at < groups; at += AT_ONCE) {                  \
                STEP(name, UNROLL for (int u = 0; u < AT_ONCE; u++) {           \
                    const int64_t g = at + u;                                   \
                    (void)g;                                                    \
                    of_a_group;                                                 \
                })                                                              \
            }                                                                   \
            after;                                                              \
        }                                                                       \
    }

#define SUMS_OF(TYPE, ZEROS) \
    TYPE sums[AT_ONCE];      \
    UNROLL for (int u = 0; u < AT_ONCE; u++) sums[u] = ZEROS()
#define KEEP_SUMS UNROLL for (int u = 0; u < AT_ONCE; u++) keep(sums[u])
#define X(half) floats_at(x + g * GROUP + (half) * GROUP / 2)

// The sum of a row, less what its codes are off.
INLINE float off(const Matrix* m, const float* scales, const float* sums) {
    Floats found = zeros();
    for (int64_t g = 0; g < m->columns / GROUP; g += 16) found = fma(floats_at(scales + g), floats_at(sums + g), found);
    return total(found);
}
template <typename T> INLINE float all_of(const T* sums) {
    float found = 0;
    UNROLL for (int u = 0; u < AT_ONCE; u++) found += total(sums[u]);
    return found;
}

// Terms: reading
ROWS(read_4, , keep(codes_at(w + g * 16)); keep(scales[g]), )
ROWS(read_8, , keep(bytes_at(w + g * 32)); keep(scales[g]), )
ROWS(read_16, , keep(bytes_at(w + g * 64)); keep(bytes_at(w + g * 64 + 32)), )
ROWS(read_32, , keep(floats_at((const float*)w + g * 32)); keep(floats_at((const float*)w + g * 32 + 16)), )
// making floats of weights
ROWS(dequant_4, Codes c = codes_at(w), hide(c); keep(to_floats(low(c))); keep(to_floats(high(c))), )
ROWS(dequant_8, Bytes b = bytes_at(w), hide(b); keep(to_floats(first(b))); keep(to_floats(second(b))), )
ROWS(dequant_16, Bytes b = bytes_at(w), hide(b); keep(from_bfloat(b)); hide(b); keep(from_bfloat(b)), )
// making bytes of them
ROWS(unpack_4, Codes c = codes_at(w), hide(c); keep(unpack(c)), )
// arithmetic, with activations from the first cache
ROWS(fma_x, SUMS_OF(Floats, zeros); Floats c = floats_at(x); hide(c),
     sums[u] = fma(c, X(0), sums[u]); sums[u] = fma(c, X(1), sums[u]), KEEP_SUMS)
ROWS(sdot_x, Bytes c = bytes_at(w); hide(c), keep(dot(c, bytes_at(bytes + g * GROUP))), )
// scales
ROWS(scale_floats, SUMS_OF(Floats, zeros); Floats c = floats_at(x), hide(c); sums[u] = scaled(c, scales[g], sums[u]),
     KEEP_SUMS; keep(off(m, scales, m->x_sums)))
ROWS(scale_sums, SUMS_OF(Few, few_zeros); Sums c = dot(bytes_at(w), bytes_at(w)), hide(c); sums[u] = scaled(c, scales[g], sums[u]),
     KEEP_SUMS; keep(off(m, scales, m->b_sums)))

// Rounding the activations (Listing 5), once for each of the rows
extern "C" void quant_act(const Matrix* m) {
    for (int64_t row = 0; row < m->rows; row++) {
        Floats most = zeros();
        for (int64_t at = 0; at < m->columns; at += GROUP) {
            STEP(quant_act_most, most = larger(larger(most, floats_at(m->x + at)), floats_at(m->x + at + 16));)
        }
        Floats factor = all(127.0f / most_of(most));
        for (int64_t at = 0; at < m->columns; at += GROUP) {
            STEP(quant_act_round, round_to(m->bytes + at, floats_at(m->x + at), factor);
                 round_to(m->bytes + at + 16, floats_at(m->x + at + 16), factor);)
        }
    }
}

// Products
#define STORE(found) m->out[row] = found
ROWS(int4_floats, SUMS_OF(Floats, zeros), Codes c = codes_at(w + g * 16);
     sums[u] = scaled(fma(to_floats(high(c)), X(1), times(to_floats(low(c)), X(0))), scales[g], sums[u]),
     STORE(all_of(sums) - off(m, scales, m->x_sums)))
ROWS(int8_floats, SUMS_OF(Floats, zeros), Bytes b = bytes_at(w + g * 32);
     sums[u] = scaled(fma(to_floats(second(b)), X(1), times(to_floats(first(b)), X(0))), scales[g], sums[u]),
     STORE(all_of(sums) - off(m, scales, m->x_sums)))
ROWS(w4a8, SUMS_OF(Few, few_zeros),
     sums[u] = scaled(dot(unpack(codes_at(w + g * 16)), bytes_at(bytes + g * GROUP)), scales[g], sums[u]),
     STORE(all_of(sums) - off(m, scales, m->b_sums)))
ROWS(w8a8, SUMS_OF(Few, few_zeros),
     sums[u] = scaled(dot(bytes_at(w + g * 32), bytes_at(bytes + g * GROUP)), scales[g], sums[u]),
     STORE(all_of(sums) - off(m, scales, m->b_sums)))
ROWS(bfloat16, SUMS_OF(Floats, zeros), sums[u] = fma(from_bfloat(bytes_at(w + g * 64)), X(0), sums[u]);
     sums[u] = fma(from_bfloat(bytes_at(w + g * 64 + 32)), X(1), sums[u]), STORE(all_of(sums)))
ROWS(float32, SUMS_OF(Floats, zeros), sums[u] = fma(floats_at((const float*)w + g * 32), X(0), sums[u]);
     sums[u] = fma(floats_at((const float*)w + g * 32 + 16), X(1), sums[u]), STORE(all_of(sums)))
