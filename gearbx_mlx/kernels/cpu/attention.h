// Attention of queries over the keys and values of a cache. Plain C, so that a test can call it without Python.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Keys or values as nested 4-bit planes (formats/kv_planes.py), all of them contiguous:
// (batch, heads / shared, capacity, ...).
typedef struct {
  const uint32_t *coarse, *fine;  // width / 8 words per position; `fine` is NULL if only the coarse plane is read
  const float *scales, *offsets;  // width / group per position
  int64_t capacity, group;
} gearbx_kv_planes;

// queries, y: (batch, heads, length, width). keys, values: (batch, heads / shared, keys, width). The numbers of a
// vector are contiguous, and y is contiguous.
typedef struct {
  int64_t batch, heads, shared, length, keys, width;
  int64_t query_strides[3], key_strides[3], value_strides[3];  // of batch, head, position, in numbers
  float scale;
  int causal;           // query i of n sees all keys except the last n - 1 - i; if 0, all keys
  const uint8_t* mask;  // 0 hides a key; NULL hides none
  int64_t mask_strides[4];  // of batch, head, query, key
  const int32_t* padding;   // (batch): number of hidden first keys of each sequence; NULL: none
  int64_t packed;  // number of first keys and values that are read from these planes: all, or a multiple of 16
  gearbx_kv_planes key_planes, value_planes;
} gearbx_attention;

// y = softmax(scale * queries keys^T) values; a query that sees no key gets the mean of all values. A query's result is
// bit-identical for any other queries, padding, keys after the last one that it sees, and number of threads.
void gearbx_attend(const gearbx_attention* form, const float* queries, const float* keys, const float* values,
                   float* y);

#ifdef __cplusplus
}
#endif
