// The two matrix products of attention, in tiles of registers: queries by keys, and weights by values.

#pragma once

#include <cstring>

#include "lanes.h"

namespace gearbx {

constexpr int TILE_ROWS = 6;
constexpr int TILE_SUMS = LANES == 8 ? 12 : 24;  // registers that a tile adds up in

// c (R, N * LANES) += a (R, count) times b (count, N * LANES): each number of c by its own multiply-adds, in the order
// of `count`. Strides are in numbers, from row to row.
template <int R, int N>
void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t count, float* c,
                   int64_t c_stride) {
  Floats sums[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sums[r][n] = load(c + r * c_stride + n * LANES);
  for (int64_t i = 0; i < count; i++, b += b_stride) {
    Floats right[N];
    for (int n = 0; n < N; n++) right[n] = hold(load(b + n * LANES));
    for (int r = 0; r < R; r++) {
      const Floats left = all(a[r * a_stride + i]);
      for (int n = 0; n < N; n++) sums[r][n] = multiply_add(left, right[n], sums[r][n]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) store(c + r * c_stride + n * LANES, sums[r][n]);
}

// The same for `columns` of b and c, a multiple of LANES, N vectors of them at a time, then fewer.
template <int R, int N = 8>
void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t count, float* c,
                      int64_t c_stride, int64_t columns) {
  if constexpr (R * N <= TILE_SUMS) {
    for (; columns >= N * LANES; columns -= N * LANES, b += N * LANES, c += N * LANES)
      multiply_tile<R, N>(a, a_stride, b, b_stride, count, c, c_stride);
  }
  if constexpr (N > 1) multiply_columns<R, N / 2>(a, a_stride, b, b_stride, count, c, c_stride, columns);
}

// The same for 1 to TILE_ROWS rows of a and c.
inline void multiply_rows(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          int64_t count, float* c, int64_t c_stride, int64_t columns) {
  static_assert(TILE_ROWS == 6);
  constexpr decltype(&multiply_columns<1>) OF_ROWS[] = {&multiply_columns<1>, &multiply_columns<2>,
                                                        &multiply_columns<3>, &multiply_columns<4>,
                                                        &multiply_columns<5>, &multiply_columns<6>};
  OF_ROWS[rows - 1](a, a_stride, b, b_stride, count, c, c_stride, columns);
}

#ifdef GEARBX_AVX512

// Number i of the result is the sum of a[slot(i)], in the order of sum8.
constexpr int slot(int i) {
  constexpr int FOUR[] = {0, 8, 4, 12}, ONE[] = {0, 2, 1, 3};
  return FOUR[i / 4] + ONE[i % 4];
}
GEARBX_INLINE __m512 sums16(const __m512* a) {
  __m512 b[8], c[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    b[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x44) + _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    c[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88) + _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512d one = _mm512_castps_pd(c[i]), two = _mm512_castps_pd(c[i + 2]);
    b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(one, two)) + _mm512_castpd_ps(_mm512_unpackhi_pd(one, two));
  }
  return _mm512_shuffle_ps(b[0], b[1], 0x88) + _mm512_shuffle_ps(b[0], b[1], 0xdd);
}

// scores (R, 16 / R) = queries (R, width) times keys (16 / R, width).
template <int R>
void score_tile(const float* queries, int64_t width, const float* keys, int64_t stride, float* scores,
                int64_t scores_stride) {
  constexpr int K = 16 / R;
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += 16) {
    __m512 left[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) left[r] = hold(load16(queries + r * width + i));
#pragma GCC unroll 16
    for (int k = 0; k < K; k++) {
      const __m512 right = hold(load16(keys + k * stride + i));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[slot(r * K + k)] = multiply_add16(left[r], right, sums[slot(r * K + k)]);
    }
  }
  float all[16];
  _mm512_storeu_ps(all, sums16(sums));
  for (int r = 0; r < R; r++) std::memcpy(scores + r * scores_stride, all + r * K, K * sizeof(float));
}

template <int R>
int64_t score_rows(int64_t row, int64_t rows, const float* queries, int64_t width, const float* keys, int64_t stride,
                   float* scores, int64_t scores_stride) {
  for (; row + R <= rows; row += R)
    for (int k = 0; k < 16; k += 16 / R)
      score_tile<R>(queries + row * width, width, keys + k * stride, stride, scores + row * scores_stride + k,
                    scores_stride);
  return row;
}

// scores (rows, 16) = queries (rows, width) times keys (16, width). width: a multiple of 16.
inline void score16(int64_t rows, const float* queries, int64_t width, const float* keys, int64_t stride, float* scores,
                    int64_t scores_stride) {
  int64_t row = score_rows<4>(0, rows, queries, width, keys, stride, scores, scores_stride);
  row = score_rows<2>(row, rows, queries, width, keys, stride, scores, scores_stride);
  score_rows<1>(row, rows, queries, width, keys, stride, scores, scores_stride);
}

#else

// The sums of four vectors, in the order of sum8.
inline void sums4(const F8* a, float* to) {
#ifdef GEARBX_AVX2
  const __m256 b = _mm256_permute2f128_ps(a[0], a[1], 0x20) + _mm256_permute2f128_ps(a[0], a[1], 0x31);
  const __m256 c = _mm256_permute2f128_ps(a[2], a[3], 0x20) + _mm256_permute2f128_ps(a[2], a[3], 0x31);
  const __m256d one = _mm256_castps_pd(b), two = _mm256_castps_pd(c);
  const __m256 d = _mm256_castpd_ps(_mm256_unpacklo_pd(one, two)) + _mm256_castpd_ps(_mm256_unpackhi_pd(one, two));
  const __m256 e = _mm256_shuffle_ps(d, d, 0x88) + _mm256_shuffle_ps(d, d, 0xdd);
  _mm_storeu_ps(to, _mm_unpacklo_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1)));
#elif defined(GEARBX_NEON)
  vst1q_f32(to, sums4(a[0], a[1], a[2], a[3]));
#else
  for (int i = 0; i < 4; i++) to[i] = sum8(a[i]);
#endif
}

// scores (rows, 16) = queries (rows, width) times keys (16, width). width: a multiple of 16.
inline void score16(int64_t rows, const float* queries, int64_t width, const float* keys, int64_t stride, float* scores,
                    int64_t scores_stride) {
  for (int64_t row = 0; row < rows; row++, queries += width, scores += scores_stride)
    for (int k = 0; k < 16; k += 4) {
      F16 sums[4];
      for (F16& sum : sums) sum = {zero8(), zero8()};
      for (int64_t i = 0; i < width; i += 16) {
        const F16 left = load16(queries + i);
        for (int j = 0; j < 4; j++) sums[j] = multiply_add16(left, load16(keys + (k + j) * stride + i), sums[j]);
      }
      F8 both[4];
      for (int j = 0; j < 4; j++) both[j] = add8(sums[j].even, sums[j].odd);
      sums4(both, scores + k);
    }
}

#endif

}  // namespace gearbx
