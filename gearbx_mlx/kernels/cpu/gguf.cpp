// Eight codes are one 64-bit word here, with a code in each byte, so that no processor needs instructions of its own.

#include "gguf.h"

#include <bit>
#include <cstring>

#include "simd.h"

namespace gearbx {
namespace {

constexpr uint64_t ONES = 0x0101010101010101u, NIBBLES = 0x0f0f0f0f0f0f0f0fu;

template <class T>
T loaded(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

#ifdef GEARBX_AVX2
float half_at(const uint8_t* from) { return _cvtsh_ss(loaded<uint16_t>(from)); }
uint16_t fp16_of(float value) { return _cvtss_sh(value, 0); }
#else
float half_at(const uint8_t* from) { return fp16_to_float(loaded<uint16_t>(from)); }

uint16_t fp16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) return static_cast<uint16_t>(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (size < 0x38800000)  // subnormal: next to 0.5, floats are as far apart as these
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}
#endif

uint16_t bf16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The codes of a block in groups of 32, with the scale and the bias of each group.
template <int GROUPS>
struct Codes {
  uint64_t eights[GROUPS][4];
  float scales[GROUPS], biases[GROUPS];
};

// The bits of a byte, one in each byte of a word.
uint64_t spread(uint8_t bits) {
  const uint64_t own = (bits * ONES) & 0x8040201008040201u;
  return (own + 0x7f7f7f7f7f7f7f7fu) >> 7 & ONES;
}

// Q4_0, Q5_0, Q8_0; with LEAST, the smallest weight of a block is stored: Q4_1, Q5_1.
template <int BITS, bool LEAST>
struct Of32 {
  static constexpr int GROUPS = 1, BITS_OF_CODES = BITS;

  static void find(const uint8_t* block, Codes<1>& codes) {
    codes.scales[0] = half_at(block);
    codes.biases[0] = LEAST ? half_at(block + 2) : -static_cast<float>(1 << (BITS - 1)) * codes.scales[0];
    const uint8_t *high = block + (LEAST ? 4 : 2), *low = high + (BITS == 5 ? 4 : 0);
    for (int e = 0; e < 4; e++) {
      uint64_t& eight = codes.eights[0][e];
      if (BITS == 8)
        eight = loaded<uint64_t>(low + 8 * e) ^ (ONES << 7);
      else
        eight = loaded<uint64_t>(low + e % 2 * 8) >> e / 2 * 4 & NIBBLES;
      if (BITS == 5) eight |= spread(high[e]) << 4;
    }
  }
};

// Q4_K, Q5_K.
template <int BITS>
struct OfK {
  static constexpr int GROUPS = 8, BITS_OF_CODES = BITS;

  static void find(const uint8_t* block, Codes<8>& codes) {
    const uint8_t *low = block + 4, *middle = block + 8, *high = block + 12, *fifth = block + 16;
    const uint8_t* nibbles = fifth + (BITS == 5 ? 32 : 0);
    const float scale = half_at(block), least = half_at(block + 2);
    for (int g = 0; g < 8; g++) {
      const int i = g % 4;
      const int of_scale = g < 4 ? low[i] & 63 : (high[i] & 15) | low[i] >> 6 << 4;
      const int of_least = g < 4 ? middle[i] & 63 : high[i] >> 4 | middle[i] >> 6 << 4;
      codes.scales[g] = scale * static_cast<float>(of_scale);
      codes.biases[g] = -least * static_cast<float>(of_least);
      for (int e = 0; e < 4; e++) {
        codes.eights[g][e] = loaded<uint64_t>(nibbles + g / 2 * 32 + 8 * e) >> g % 2 * 4 & NIBBLES;
        if (BITS == 5) codes.eights[g][e] |= (loaded<uint64_t>(fifth + 8 * e) >> g & ONES) << 4;
      }
    }
  }
};

// The lowest bits of eight bytes, side by side.
template <int BITS>
uint64_t side_by_side(uint64_t eight) {
  constexpr uint64_t ONE = (1u << BITS) - 1, TWO = (1u << 2 * BITS) - 1, FOUR = (uint64_t{1} << 4 * BITS) - 1;
  if (BITS == 8) return eight;
  constexpr uint64_t FIRST = ONE * 0x0001000100010001u, SECOND = TWO * 0x0000000100000001u;
  eight = (eight & FIRST) | (eight >> (8 - BITS) & FIRST << BITS);
  eight = (eight & SECOND) | (eight >> 2 * (8 - BITS) & SECOND << 2 * BITS);
  return (eight & FOUR) | (eight >> 4 * (8 - BITS) & FOUR << 4 * BITS);
}

template <class Type>
void write_codes(const uint8_t* block, uint8_t* words, uint16_t* scales, uint16_t* biases) {
  constexpr int BITS = Type::BITS_OF_CODES;
  Codes<Type::GROUPS> codes;
  Type::find(block, codes);
  for (int g = 0; g < Type::GROUPS; g++) {
    scales[g] = fp16_of(codes.scales[g]);
    biases[g] = fp16_of(codes.biases[g]);
    uint64_t packed[4];
    for (int e = 0; e < 4; e++) packed[e] = side_by_side<BITS>(codes.eights[g][e]);
    for (int e = 0; e < 4; e++) std::memcpy(words + (4 * g + e) * BITS, &packed[e], BITS);
  }
}

template <class Type>
void write_numbers(const uint8_t* block, float* out) {
  Codes<Type::GROUPS> codes;
  Type::find(block, codes);
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes.eights);
  for (int g = 0; g < Type::GROUPS; g++)
    for (int i = 0; i < 32; i++)
      out[32 * g + i] = static_cast<float>(bytes[32 * g + i]) * codes.scales[g] + codes.biases[g];
}

void write_numbers_of_q6(const uint8_t* block, float* out) {
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192);
  const float scale = half_at(block + 208);
  for (int row = 0; row < 8; row++) {  // of 32 weights
    const uint8_t *low = block + row / 4 * 64 + row % 2 * 32, *high = block + 128 + row / 4 * 32;
    for (int half = 0; half < 2; half++) {
      const float own = scale * static_cast<float>(scales[2 * row + half]);
      for (int i = 16 * half; i < 16 * half + 16; i++) {
        const int code = (low[i] >> row % 4 / 2 * 4 & 15) | (high[i] >> row % 4 * 2 & 3) << 4;
        out[32 * row + i] = own * static_cast<float>(code - 32);
      }
    }
  }
}

void round_all(const float* from, int count, bool bf16, uint16_t* out) {
  if (bf16) {
    for (int i = 0; i < count; i++) out[i] = bf16_of(from[i]);
    return;
  }
#ifdef GEARBX_AVX2
  for (int i = 0; i < count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#else
  for (int i = 0; i < count; i++) out[i] = fp16_of(from[i]);
#endif
}

template <class Type>
constexpr GgufType type_of_codes(const char* name, int bytes) {
  return {name, 32 * Type::GROUPS, bytes, Type::BITS_OF_CODES, write_codes<Type>, write_numbers<Type>};
}

constexpr GgufType TYPES[] = {
    type_of_codes<Of32<4, false>>("Q4_0", 18), type_of_codes<Of32<4, true>>("Q4_1", 20),
    type_of_codes<Of32<5, false>>("Q5_0", 22), type_of_codes<Of32<5, true>>("Q5_1", 24),
    type_of_codes<Of32<8, false>>("Q8_0", 34), type_of_codes<OfK<4>>("Q4_K", 144),
    type_of_codes<OfK<5>>("Q5_K", 176),        {"Q6_K", 256, 210, 0, nullptr, write_numbers_of_q6},
};

}  // namespace

const GgufType* find_gguf_type(const char* name) {
  for (const GgufType& type : TYPES)
    if (!std::strcmp(type.name, name)) return &type;
  return nullptr;
}

void unpack_gguf_codes(const GgufType& type, const uint8_t* blocks, int64_t count, uint8_t* words, uint16_t* scales,
                       uint16_t* biases) {
  const int groups = type.weights / 32;
  for (int64_t b = 0; b < count; b++)
    type.codes(blocks + b * type.bytes, words + b * type.weights * type.bits / 8, scales + b * groups, biases + b * groups);
}

void unpack_gguf_weights(const GgufType& type, const uint8_t* blocks, int64_t count, bool bf16, uint16_t* out) {
  float numbers[256];
  for (int64_t b = 0; b < count; b++) {
    type.numbers(blocks + b * type.bytes, numbers);
    round_all(numbers, type.weights, bf16, out + b * type.weights);
  }
}

}  // namespace gearbx
