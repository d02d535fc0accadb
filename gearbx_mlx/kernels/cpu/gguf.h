// Blocks of quantized weights of GGUF files (block structures in ggml-common.h), unpacked into 16 bits or affine codes.

#pragma once

#include <cstdint>

namespace gearbx {

// A type of weights. weights: in a block of `bytes`. bits: of affine codes in groups of 32; 0: the type has none.
struct GgufType {
  const char* name;
  int weights, bytes, bits;
  void (*codes)(const uint8_t* block, uint8_t* words, uint16_t* scales, uint16_t* biases);
  void (*numbers)(const uint8_t* block, float* out);
};

// The type of a name, or null.
const GgufType* find_gguf_type(const char* name);

// Writes the codes of blocks as MLX packs them, and the float16 scale and bias of each group.
void unpack_gguf_codes(const GgufType& type, const uint8_t* blocks, int64_t count, uint8_t* words, uint16_t* scales,
                       uint16_t* biases);

// Writes the weights of blocks in bfloat16 or float16, rounded to nearest even.
void unpack_gguf_weights(const GgufType& type, const uint8_t* blocks, int64_t count, bool bf16, uint16_t* out);

}  // namespace gearbx
