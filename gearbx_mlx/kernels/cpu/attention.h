// Attention of a few queries or many over the keys and values of a cache. Plain C.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// queries, y (batch, heads, length, width); keys, values (batch, heads / shared, keys, width). Numbers of a vector lie one
// after the other; y lies row after row.
typedef struct {
  int64_t batch, heads, shared, length, keys, width;
  int64_t query_strides[3], key_strides[3], value_strides[3];  // of batch, head, position, in numbers
  float scale;
  int causal;           // query i of n sees the keys but for the last n - 1 - i; else all
  const uint8_t* mask;  // of those, the keys where it is not 0; all where it is NULL
  int64_t mask_strides[4];  // of batch, head, query, key
} gearbx_attention;

// y = softmax(scale * queries keys^T) values; a query that sees no key has the mean of all values. A query has the same
// bits whatever the others are, whatever is said of keys behind the last that it sees, and on however many threads.
void gearbx_attend(const gearbx_attention* form, const float* queries, const float* keys, const float* values, float* y);

#ifdef __cplusplus
}
#endif
