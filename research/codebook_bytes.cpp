// Products of 4-bit codes, one codebook for each row (XFP V2), with activations of 8 bits: the 16 entries of a row become
// int8 with one scale, a byte shuffle looks 32 of them up, and bytes are multiplied. AVX2, one thread. A study, which
// research/codebook.py times beside the kernel that takes activations as they are.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr float MOST = 127.0f;

float largest_of(const float* x, int64_t count) {
  float most = 0.0f;
  for (int64_t i = 0; i < count; i++) most = std::max(most, std::fabs(x[i]));
  return most;
}

// Integers and their step. Of 64 columns the even ones come first, as the low halves of bytes do.
float round_vector(const float* x, int64_t columns, int8_t* out) {
  const float step = largest_of(x, columns) / MOST, inverse = step > 0.0f ? 1.0f / step : 0.0f;
  for (int64_t i = 0; i < columns; i++)
    out[i / 64 * 64 + i % 2 * 32 + i % 64 / 2] = static_cast<int8_t>(std::lrintf(x[i] * inverse));
  return step;
}

int32_t sum_of(__m256i v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// Sixteen fp16 entries as int8, twice; and their step.
__m256i round_entries(const uint16_t* halves, float* step, float values[16]) {
  _mm256_storeu_ps(values, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))));
  _mm256_storeu_ps(values + 8, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 8))));
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 low = _mm256_loadu_ps(values), high = _mm256_loadu_ps(values + 8);
  float sizes[8];
  _mm256_storeu_ps(sizes, _mm256_max_ps(_mm256_andnot_ps(sign, low), _mm256_andnot_ps(sign, high)));
  *step = *std::max_element(sizes, sizes + 8) / MOST;
  const __m256 inverse = _mm256_set1_ps(*step > 0.0f ? 1.0f / *step : 0.0f);
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(low, inverse)), b = _mm256_cvtps_epi32(_mm256_mul_ps(high, inverse));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  return _mm256_broadcastsi128_si256(_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

}  // namespace

// y (vectors, rows) = x (vectors, columns) times the transposed matrix. columns: a multiple of 64.
extern "C" void codebook_bytes(const uint8_t* weights, const uint16_t* codebook, const uint32_t* offsets,
                               const uint16_t* outliers, const uint16_t* places, const float* x, int64_t vectors,
                               int64_t columns, int64_t rows, float* y) {
  std::vector<int8_t> rounded(static_cast<size_t>(vectors * columns));
  std::vector<float> steps(static_cast<size_t>(vectors));
  for (int64_t v = 0; v < vectors; v++) steps[v] = round_vector(x + v * columns, columns, rounded.data() + v * columns);
  std::vector<int8_t> entries(static_cast<size_t>(columns));  // of a row, in the order of the activations
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int64_t r = 0; r < rows; r++) {
    float step, values[16];
    const __m256i table = round_entries(codebook + 16 * r, &step, values);
    const uint8_t* row = weights + r * columns / 2;
    for (int64_t k = 0; k < columns; k += 64) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k / 2));
      const __m256i low = _mm256_and_si256(codes, mask), high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(entries.data() + k), _mm256_shuffle_epi8(table, low));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(entries.data() + k + 32), _mm256_shuffle_epi8(table, high));
    }
    float below = 0.0f;  // what the code in the places of outliers stands for
    if (offsets[r] < offsets[r + 1]) {
      const int64_t column = places[offsets[r]];
      below = std::nearbyintf(values[row[column / 2] >> column % 2 * 4 & 15] / step) * step;
    }
    for (int64_t v = 0; v < vectors; v++) {
      const int8_t* xs = rounded.data() + v * columns;
      __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
      for (int64_t k = 0; k < columns; k += 64)
        for (int half = 0; half < 2; half++) {  // the sign of an entry goes to the activation: 127 * 127 * 2 < 2^15
          const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries.data() + k + 32 * half));
          const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(xs + k + 32 * half));
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
          sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(pairs, ones));
        }
      float total = static_cast<float>(sum_of(_mm256_add_epi32(sums[0], sums[1]))) * step * steps[v];
      for (uint32_t i = offsets[r]; i < offsets[r + 1]; i++)
        total += (_cvtsh_ss(outliers[i]) - below) * x[v * columns + places[i]];
      y[v * rows + r] = total;
    }
  }
}
