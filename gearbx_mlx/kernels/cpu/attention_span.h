// The contribution of one span of keys and values to some queries.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "buffer.h"
#include "kv_planes.h"
#include "lanes.h"

namespace gearbx {

// The two matmuls of attention, in tiles of registers: queries by keys, and weights by values.

constexpr int TILE_ROWS = 6;
constexpr int TILE_SUMS = LANES == 8 ? 12 : 24;  // registers of sums in a tile

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

// Multiplies `columns` of b and c, a multiple of LANES, N vectors of them at a time, then fewer.
template <int R, int N = 8>
void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t count, float* c,
                      int64_t c_stride, int64_t columns) {
  if constexpr (R * N <= TILE_SUMS) {
    for (; columns >= N * LANES; columns -= N * LANES, b += N * LANES, c += N * LANES)
      multiply_tile<R, N>(a, a_stride, b, b_stride, count, c, c_stride);
  }
  if constexpr (N > 1) multiply_columns<R, N / 2>(a, a_stride, b, b_stride, count, c, c_stride, columns);
}

// Multiplies 1 to TILE_ROWS rows of a and c.
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

constexpr int64_t SPAN = 256;   // keys; spans start at multiples of it behind the padding, in every call
constexpr int64_t AHEAD = 32;   // keys fetched early, because processors do not predict the order of a tile
constexpr int64_t COPIED = 32;  // values copied or unpacked at a time, into the fastest cache
constexpr int64_t BLOCK = 96;   // queries per piece of work
constexpr int64_t PARTS = 16;   // partial sums of weights: of keys i, i + 16, ...

inline int64_t round_up(int64_t count) { return (count + PARTS - 1) / PARTS * PARTS; }

// The softmax of a query over some keys, before the division by the sum of its weights.
struct Softmax {
  float sums[PARTS] = {};      // of exp(score - highest)
  float highest = -INFINITY;   // score
  bool any = false;            // whether it has seen a key
};

// For several queries: their softmax, and the sums of values times weights, (queries, round_up(width)).
struct Sums {
  Softmax* softmax;
  float* values;
};

// At most BLOCK queries of heads that share their keys and values. Query i has position i / shared. Keys and values are
// those behind the padding, `count_keys` of them.
struct Block {
  const gearbx_attention& form;
  int64_t batch, key_head, first, count, padding, count_keys;
  const float *queries, *keys, *values;

  int64_t packed(int64_t key, int64_t count) const { return std::clamp<int64_t>(form.packed - key, 0, count); }
  int64_t planes_of() const { return batch * (form.heads / form.shared) + key_head; }
  int64_t head(int64_t row) const { return key_head * form.shared + (first + row) % form.shared; }
  int64_t position(int64_t row) const { return (first + row) / form.shared; }
  int64_t place(const int64_t* strides, int64_t row) const {
    return batch * strides[0] + head(row) * strides[1] + position(row) * strides[2];
  }
  const uint8_t* mask(int64_t row, int64_t key) const {
    return form.mask + place(form.mask_strides, row) + (padding + key) * form.mask_strides[3];
  }
};

// Work space of one thread. scores: (BLOCK, SPAN); they become weights.
struct Space {
  float *queries, *scores, *padded;
  int64_t seen[BLOCK];  // per query, the number of keys of the span up to the last visible one
  Buffer<float> memory;

  void prepare(int64_t wide) {
    queries = memory.room_for(BLOCK * wide + BLOCK * SPAN + SPAN * wide);
    scores = queries + BLOCK * wide;
    padded = scores + BLOCK * SPAN;
  }
};

// Copies vectors of `width` numbers, `stride` apart, into rows of round_up(width) numbers, with zeros at the end.
inline void copy_rows(const float* from, int64_t stride, int64_t count, int64_t width, float* to) {
  for (int64_t i = 0; i < count; i++, to += round_up(width)) {
    std::copy_n(from + i * stride, width, to);
    std::fill_n(to + width, round_up(width) - width, 0.0f);
  }
}

// `count` keys or values from `key` on, packed ones from their planes, as rows of round_up(width) numbers.
inline void read_rows(const Block& block, const gearbx_kv_planes& planes, const float* from, int64_t stride,
                      int64_t key, int64_t count, float* to) {
  const int64_t width = block.form.width, wide = round_up(width), packed = block.packed(key, count);
  if (packed > 0) unpack_vectors(planes, block.planes_of(), key, packed, width, wide, to);
  if (packed < count) copy_rows(from + (key + packed) * stride, stride, count - packed, width, to + packed * wide);
}

// Copies strided queries into rows, times the scale.
inline void scale_queries(const Block& block, Space& space) {
  const int64_t width = block.form.width, wide = round_up(width);
  for (int64_t row = 0; row < block.count; row++) {
    float* to = space.queries + row * wide;
    copy_rows(block.queries + block.place(block.form.query_strides, row), 0, 1, width, to);
    for (int64_t i = 0; i < width; i++) to[i] *= block.form.scale;
  }
}

// Fills in `seen` for the span from key `start` on, and returns the largest.
inline int64_t find_seen(const Block& block, int64_t start, Space& space) {
  const gearbx_attention& f = block.form;
  int64_t most = 0;
  for (int64_t row = 0; row < block.count; row++) {
    const int64_t end = f.causal ? block.count_keys - f.length + block.position(row) + 1 : block.count_keys;
    int64_t seen = std::clamp<int64_t>(end - start, 0, SPAN);
    while (f.mask && seen > 0 && !*block.mask(row, start + seen - 1)) seen--;
    space.seen[row] = seen;
    most = std::max(most, seen);
  }
  return most;
}

// scores = queries times the first `most` keys of the span, followed by arbitrary numbers up to a multiple of 16.
inline void score(const Block& block, int64_t start, int64_t most, Space& space) {
  const int64_t width = block.form.width, wide = round_up(width), stride = block.form.key_strides[2];
  for (int64_t key = 0; key < most; key += PARTS) {
    const bool packed = block.packed(start + key, 1) > 0, whole = width == wide && key + PARTS <= most && !packed;
    const float* keys = block.keys + (start + key) * stride;
    for (int64_t i = AHEAD; i < AHEAD + PARTS && !packed; i++)
      for (int64_t line = 0; line < width; line += 16) __builtin_prefetch(keys + i * stride + line, 0, 2);
    int64_t first = 0;  // query that sees any of these keys
    while (space.seen[first] <= key) first++;
    if (!whole)
      read_rows(block, block.form.key_planes, block.keys, stride, start + key, std::min(PARTS, most - key),
                space.padded);
    score16(block.count - first, space.queries + first * wide, wide, whole ? keys : space.padded, whole ? stride : wide,
            space.scores + first * SPAN + key, SPAN);
  }
}

// Replaces the scores of the first `seen` keys by exp(score - highest), or 0 if they are masked. NaN stays NaN.
inline Softmax weigh(const Block& block, int64_t start, int64_t row, int64_t seen, float* scores) {
  Softmax made;
  const int64_t count = round_up(seen);
  std::fill(scores + seen, scores + count, -INFINITY);
  if (block.form.mask) {
    const uint8_t* mask = block.mask(row, start);
    for (int64_t i = 0; i < seen; i++)
      if (!mask[i * block.form.mask_strides[3]]) scores[i] = -INFINITY;
  }
  Floats highest = all(-INFINITY), sums[PARTS / LANES] = {};
  for (int64_t i = 0; i < count; i += LANES) highest = larger(load(scores + i), highest);
  made.highest = largest(highest);
  made.any = true;
  for (int64_t i = 0; i < count; i += PARTS)
    for (int64_t part = 0; part < PARTS / LANES; part++) {
      float* some = scores + i + part * LANES;
      const Floats weights = exponential(load(some) - all(made.highest));
      store(some, weights);
      sums[part] = sums[part] + weights;
    }
  for (int64_t part = 0; part < PARTS / LANES; part++) store(made.sums + part * LANES, sums[part]);
  return made;
}

// sums.values += weights times `count` values, those from key `first` of the span on.
inline void add_some_values(const Block& block, int64_t first, int64_t count, const float* values, int64_t stride,
                            const Space& space, const Sums& sums) {
  const int64_t wide = round_up(block.form.width);
  for (int64_t row = 0; row < block.count; row += TILE_ROWS) {
    const int64_t rows = std::min<int64_t>(TILE_ROWS, block.count - row), end = first + count;
    const auto seen = [&](int64_t all) { return std::clamp(all, first, end) - first; };
    const int64_t least = seen(*std::min_element(space.seen + row, space.seen + row + rows));
    const float* weights = space.scores + row * SPAN + first;
    multiply_rows(rows, weights, SPAN, values, stride, least, sums.values + row * wide, wide, wide);
    for (int64_t r = 0; r < rows; r++)
      multiply_rows(1, weights + r * SPAN + least, SPAN, values + least * stride, stride,
                    seen(space.seen[row + r]) - least, sums.values + (row + r) * wide, wide, wide);
  }
}

// sums.values = weights times values. No query uses a value after its last visible key, even if the value is NaN.
inline void add_values(const Block& block, int64_t start, int64_t most, Space& space, const Sums& sums) {
  const int64_t width = block.form.width, wide = round_up(width);
  const int64_t stride = block.form.value_strides[2];
  const bool copied = width < wide || block.packed(start, most) > 0;
  std::fill_n(sums.values, block.count * wide, 0.0f);
  for (int64_t first = 0, few = copied ? COPIED : SPAN; first < most; first += few) {
    const int64_t count = std::min(few, most - first);
    if (copied) read_rows(block, block.form.value_planes, block.values, stride, start + first, count, space.padded);
    const float* values = copied ? space.padded : block.values + (start + first) * stride;
    add_some_values(block, first, count, values, copied ? wide : stride, space, sums);
  }
}

// The sums of a block of queries over the span from key `start` on.
inline void attend_span(const Block& block, int64_t start, Space& space, const Sums& sums) {
  const int64_t most = find_seen(block, start, space);
  if (most > 0) score(block, start, most, space);
  for (int64_t row = 0; row < block.count; row++) {
    const int64_t seen = space.seen[row];
    sums.softmax[row] = seen > 0 ? weigh(block, start, row, seen, space.scores + row * SPAN) : Softmax();
  }
  if (most > 0) add_values(block, start, most, space, sums);
}

}  // namespace gearbx
