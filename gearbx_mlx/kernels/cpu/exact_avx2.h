// Decodes rows with AVX2, 32 weights at a time. Lookups are byte shuffles; so is the distribution of the zero cell's
// bytes, by the number of the cell's weights up to each position.

#pragma once

#include "codes.h"
#include "exact_row.h"

namespace gearbx {

// Eight groups at a time: their scales and biases as floats, and the bound of the zero cell.
struct Groups8 {
  alignas(32) float scales[8], biases[8], bounds[8];

  GEARBX_INLINE void read(const uint16_t* s, const uint16_t* b) {
    const F8 scale = load8_bf16(s);
    store8(scales, scale);
    store8(biases, load8_bf16(b));
    store8(bounds, multiply8(_mm256_andnot_ps(all8(-0.0f), scale), all8(0.5f)));
  }
};

// The prediction of a group's codes, twice 16 bytes each: the low byte of the first neighbor; its high byte plus one;
// and 255 in the zero cell.
struct Meanings {
  __m256i low, high, zero;
};

template <int GROUP>
struct Decoder {
  ExactRow& row;
  explicit Decoder(ExactRow& r) : row(r) {}

  static GEARBX_INLINE Meanings meanings(const Groups8& groups, int64_t g) {
    const F8 scale = _mm256_broadcast_ss(groups.scales + g), bias = _mm256_broadcast_ss(groups.biases + g);
    const F8 bound = _mm256_broadcast_ss(groups.bounds + g), sign = all8(-0.0f);
    const __m256i below = _mm256_set1_epi32((256 - WINDOW) << 16);  // subtracts the window, and adds one to the high byte
    const __m256i bytes = _mm256_setr_epi8(2, 6, 10, 14, 3, 7, 11, 15, 0, 0, 0, 0, 0, 0, 0, 0,  //
                                           2, 6, 10, 14, 3, 7, 11, 15, 0, 0, 0, 0, 0, 0, 0, 0);
    // In an order for which packing within lanes puts codes 0 to 7 into the first lane.
    const F8 codes[2] = {_mm256_setr_ps(0, 1, 2, 3, 8, 9, 10, 11), _mm256_setr_ps(4, 5, 6, 7, 12, 13, 14, 15)};
    __m256i first[2], cell[2];
    for (int i = 0; i < 2; i++) {
      const F8 v = multiply_add8(scale, codes[i], bias);  // scale * code is exact
      cell[i] = _mm256_castps_si256(_mm256_cmp_ps(_mm256_andnot_ps(sign, v), bound, _CMP_NGT_UQ));
      first[i] = _mm256_shuffle_epi8(_mm256_add_epi32(_mm256_castps_si256(v), below), bytes);
    }
    const __m256i both = _mm256_unpacklo_epi32(first[0], first[1]);
    const __m256i words = _mm256_packs_epi32(cell[0], cell[1]), cells = _mm256_packs_epi16(words, words);
    return {_mm256_permute4x64_epi64(both, 0x88), _mm256_permute4x64_epi64(both, 0xdd),
            _mm256_permute4x64_epi64(cells, 0x88)};
  }

  // A row's next bytes of `high`, at the positions of two times 16 that are 255; other positions are arbitrary.
  template <bool ALL_THERE>
  static GEARBX_INLINE __m256i deal_high(HighBytes& high, __m256i places) {
    uint8_t copy[32];
    const uint8_t* next = ALL_THERE ? high.bytes + high.at : next_high(high, copy);
    const auto sets = static_cast<uint32_t>(_mm256_movemask_epi8(places));
    const __m128i second = load16(next + __builtin_popcount(sets & 0xffff));
    high.at += __builtin_popcount(sets);
    // Each place counts itself and those before it, downwards: in eight, then in sixteen.
    const __m256i last = _mm256_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 7, 7, 7, 7, 7, 7, 7, 7,  //
                                          -1, -1, -1, -1, -1, -1, -1, -1, 7, 7, 7, 7, 7, 7, 7, 7);
    __m256i count = _mm256_add_epi8(places, _mm256_slli_epi64(places, 8));
    count = _mm256_add_epi8(count, _mm256_slli_epi64(count, 16));
    count = _mm256_add_epi8(count, _mm256_slli_epi64(count, 32));
    count = _mm256_add_epi8(count, _mm256_shuffle_epi8(count, last));
    const __m256i numbers = _mm256_xor_si256(count, _mm256_set1_epi8(-1));  // -1 for the first, so that it is 0
    return _mm256_shuffle_epi8(_mm256_set_m128i(second, load16(next)), numbers);
  }

  template <bool ALL_THERE>
  static GEARBX_INLINE Weights32 weights(const Meanings& m, const uint8_t* codes, const uint8_t* stored,
                                         HighBytes& high) {
    const __m256i each = unpack<4>(codes), low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stored));
    const __m256i first = _mm256_shuffle_epi8(m.low, each), zero = _mm256_shuffle_epi8(m.zero, each);
    const __m256i stays = _mm256_cmpeq_epi8(_mm256_max_epu8(low, first), low);
    const __m256i far = _mm256_add_epi8(_mm256_shuffle_epi8(m.high, each), stays);
    const __m256i upper = _mm256_blendv_epi8(far, deal_high<ALL_THERE>(high, zero), zero);
    const __m256i some = _mm256_unpacklo_epi8(low, upper), others = _mm256_unpackhi_epi8(low, upper);
    return {_mm256_permute2x128_si256(some, others, 0x20), _mm256_permute2x128_si256(some, others, 0x31)};
  }

  // Calls use(column, weights) for each 32 weights of the row, in order.
  template <class Use>
  GEARBX_INLINE void each32(Use use) {
    if (row.high.at + row.columns + BLOCK <= row.high.count)
      each32_of<true>(use);
    else
      each32_of<false>(use);
  }

 private:
  // ALL_THERE: whether `high` has enough bytes from the row's on for any row.
  template <bool ALL_THERE, class Use>
  GEARBX_INLINE void each32_of(Use use) {
    const int64_t groups = row.columns / GROUP;
    const uint8_t *codes = row.codes, *low = row.low, *ahead = row.ahead;
    const uint16_t *scales = row.scales, *biases = row.biases;
    uint16_t few[2][8] = {};
    if (groups < 8) {  // no byte beyond a row is read
      for (int64_t g = 0; g < groups; g++) few[0][g] = scales[g], few[1][g] = biases[g];
      scales = few[0], biases = few[1];
    }
    HighBytes high = row.high;  // in registers
    Groups8 some;
    for (int64_t segment = 0; segment < groups; segment += 8) {
      const int64_t first = segment + 8 <= groups || groups < 8 ? segment : groups - 8;  // read some again
      some.read(scales + first, biases + first);
      const int64_t end = groups - first < 8 ? groups - first : 8;
      for (int64_t g = segment - first; g < end; g++) {
        const Meanings m = meanings(some, g);
        const int64_t column = (first + g) * GROUP;
        __builtin_prefetch(ahead + column / 2);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i += BLOCK) {
          const int64_t at = column + i;
          if (i % 64 == 0) __builtin_prefetch(low + at + AHEAD_OF_ROW);
          use(at, weights<ALL_THERE>(m, codes + at / 2, low + at, high));
        }
      }
    }
    row.high = high;
  }
};

}  // namespace gearbx
