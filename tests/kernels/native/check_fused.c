/* Norms, rotary positions, attention and SwiGLU without Python or MLX, to be built with sanitizers: over buffers of
   exactly the size that is needed, against plain loops in double precision. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "fused.h"
#include "matvec.h"

static uint64_t state = 1;

static float random_float(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)(int32_t)(state >> 32) / 1073741824.0f;
}

static float* random_floats(int64_t count) {
  float* values = malloc((size_t)count * 4);
  for (int64_t i = 0; i < count; i++) values[i] = random_float();
  return values;
}

static int failures = 0, results = 0;

static void compare(double found, double expected) {
  results++;
  if (!(fabs(found - expected) <= 1e-5 * (1 + fabs(expected)))) failures++;
}

static void check_norm(int64_t rows, int64_t columns, int type) {
  float *x = random_floats(rows * columns), *weight = random_floats(columns), *y = malloc((size_t)(rows * columns) * 4);
  uint16_t* halves = malloc((size_t)columns * 2);
  for (int64_t i = 0; i < columns; i++) {
    halves[i] = type == GEARBX_BFLOAT16 ? 0x3f80 + i % 128 : 0x3c00 + i % 1024; /* 1 to 2 */
    if (type == GEARBX_BFLOAT16) weight[i] = 1 + (float)(i % 128) / 128;
    if (type == GEARBX_FLOAT16) weight[i] = 1 + (float)(i % 1024) / 1024;
  }
  gearbx_rms_norm(x, rows, columns, type == GEARBX_FLOAT32 ? (const void*)weight : halves, type, 1e-5f, y);
  for (int64_t r = 0; r < rows; r++) {
    double squares = 0;
    for (int64_t i = 0; i < columns; i++) squares += (double)x[r * columns + i] * x[r * columns + i];
    const double factor = 1 / sqrt(squares / (double)columns + 1e-5);
    for (int64_t i = 0; i < columns; i++) compare(y[r * columns + i], x[r * columns + i] * factor * weight[i]);
  }
  free(x), free(weight), free(halves), free(y);
}

/* x is (batch, length, heads, width) in memory, as a projection leaves it. */
static void check_rope(int64_t heads, int64_t length, int64_t width, int dims, int traditional, const int32_t* padding) {
  const int64_t batch = 2, offset = 3;
  const int half = dims / 2;
  float *x = random_floats(batch * length * heads * width), *frequencies = random_floats(half);
  float* y = malloc((size_t)(batch * length * heads * width) * 4);
  const gearbx_rotation rotation = {.shape = {batch, heads, length, width},
                                    .strides = {length * heads * width, width, heads * width, 1},
                                    .frequencies = frequencies,
                                    .dims = dims,
                                    .traditional = traditional,
                                    .scale = 0.5f,
                                    .offset = offset,
                                    .padding = padding};
  gearbx_rope(&rotation, x, y);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t t = 0; t < length; t++) {
        const float *from = x + ((b * length + t) * heads + h) * width, *to = y + ((b * heads + h) * length + t) * width;
        for (int i = 0; i < half; i++) {
          const int one = traditional ? 2 * i : i, two = traditional ? 2 * i + 1 : i + half;
          const double angle = (double)(t + offset - (padding ? padding[b] : 0)) * 0.5 * frequencies[i];
          compare(to[one], from[one] * cos(angle) - from[two] * sin(angle));
          compare(to[two], from[one] * sin(angle) + from[two] * cos(angle));
        }
        for (int64_t i = dims; i < width; i++) compare(to[i], from[i]);
      }
  free(x), free(frequencies), free(y);
}

static void check_swiglu(int64_t count) {
  float *gate = random_floats(count), *up = random_floats(count), *y = malloc((size_t)count * 4);
  for (int64_t i = 0; i < count; i++) gate[i] *= 10;
  gearbx_swiglu(gate, up, count, y);
  for (int64_t i = 0; i < count; i++) compare(y[i], gate[i] / (1 + exp(-(double)gate[i])) * up[i]);
  free(gate), free(up), free(y);
}

/* Keys and values in a cache with room for two more. */
static void check_attention(int64_t heads, int64_t shared, int64_t length, int64_t keys, int64_t width, int causal) {
  const int64_t held = keys + 2;
  float *q = random_floats(heads * length * width), *k = random_floats(heads / shared * held * width);
  float *v = random_floats(heads / shared * held * width), *y = malloc((size_t)(heads * length * width) * 4);
  const gearbx_attention form = {.batch = 1,
                                 .heads = heads,
                                 .shared = shared,
                                 .length = length,
                                 .keys = keys,
                                 .width = width,
                                 .query_strides = {0, width, heads * width},
                                 .key_strides = {0, held * width, width},
                                 .value_strides = {0, held * width, width},
                                 .scale = 0.25f,
                                 .causal = causal};
  gearbx_attend(&form, q, k, v, y);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < length; i++) {
      const int64_t seen = causal ? keys - length + i + 1 : keys;
      double* sums = calloc((size_t)width, sizeof(double));
      double total = 0;
      for (int64_t j = 0; j < seen; j++) {
        const float *key = k + (h / shared * held + j) * width, *value = v + (h / shared * held + j) * width;
        double score = 0;
        for (int64_t d = 0; d < width; d++) score += 0.25 * q[(i * heads + h) * width + d] * key[d];
        total += exp(score);
        for (int64_t d = 0; d < width; d++) sums[d] += exp(score) * value[d];
      }
      for (int64_t d = 0; d < width; d++) compare(y[(h * length + i) * width + d], sums[d] / total);
      free(sums);
    }
  free(q), free(k), free(v), free(y);
}

/* A query of a prompt and the same query alone, over the keys that it sees, must have the same bits. */
static void check_company(int64_t heads, int64_t shared, int64_t length, int64_t keys, int64_t width) {
  const int64_t vectors = heads / shared * keys * width;
  float *q = random_floats(heads * length * width), *k = random_floats(vectors), *v = random_floats(vectors);
  float *together = malloc((size_t)(heads * length * width) * 4), *alone = malloc((size_t)(heads * width) * 4);
  gearbx_attention form = {.batch = 1,
                           .heads = heads,
                           .shared = shared,
                           .length = length,
                           .keys = keys,
                           .width = width,
                           .query_strides = {0, length * width, width},
                           .key_strides = {0, keys * width, width},
                           .value_strides = {0, keys * width, width},
                           .scale = 0.3f,
                           .causal = 1};
  gearbx_attend(&form, q, k, v, together);
  form.length = 1;
  for (int64_t i = 0; i < length; i += 7) {
    form.keys = keys - length + i + 1;
    gearbx_attend(&form, q + i * width, k, v, alone);
    for (int64_t h = 0; h < heads; h++, results++)
      if (memcmp(alone + h * width, together + (h * length + i) * width, (size_t)width * 4)) failures++;
  }
  free(q), free(k), free(v), free(together), free(alone);
}

/* Sequences of a batch, some behind padding that is not to be read, must have the bits that they have alone. */
static void check_padding(int64_t heads, int64_t shared, int64_t length, int64_t keys, int64_t width, int with_mask) {
  const int64_t batch = 3, each = heads / shared * keys * width, queries = heads * length * width;
  const int32_t padding[] = {0, 3, (int32_t)(keys - length)};
  float *q = random_floats(batch * queries), *k = random_floats(batch * each), *v = random_floats(batch * each);
  float *together = malloc((size_t)(batch * queries) * 4), *alone = malloc((size_t)queries * 4);
  uint8_t* mask = malloc((size_t)(batch * length * keys));
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t h = 0; h < heads / shared; h++)
      for (int64_t i = 0; i < padding[b] * width; i++) k[b * each + h * keys * width + i] = NAN;
    for (int64_t i = 0; i < length; i++)
      for (int64_t j = 0; j < keys; j++)
        mask[(b * length + i) * keys + j] = j >= padding[b] && j <= keys - length + i;
  }
  gearbx_attention form = {.batch = batch,
                           .heads = heads,
                           .shared = shared,
                           .length = length,
                           .keys = keys,
                           .width = width,
                           .query_strides = {queries, length * width, width},
                           .key_strides = {each, keys * width, width},
                           .value_strides = {each, keys * width, width},
                           .scale = 0.3f,
                           .causal = !with_mask,
                           .mask = with_mask ? mask : NULL,
                           .mask_strides = {length * keys, 0, keys, 1},
                           .padding = padding};
  gearbx_attend(&form, q, k, v, together);
  form.batch = 1, form.causal = 1, form.mask = NULL, form.padding = NULL;
  for (int64_t b = 0; b < batch; b++, results++) {
    const int64_t first = b * each + padding[b] * width;
    form.keys = keys - padding[b];
    gearbx_attend(&form, q + b * queries, k + first, v + first, alone);
    if (memcmp(alone, together + b * queries, (size_t)queries * 4)) failures++;
  }
  free(q), free(k), free(v), free(together), free(alone), free(mask);
}

int main(void) {
  const int32_t padding[] = {3, 1};
  const int64_t widths[] = {1, 7, 8, 9, 64, 203};
  for (int type = GEARBX_FLOAT32; type <= GEARBX_FLOAT16; type++)
    for (int w = 0; w < 6; w++) check_norm(3, widths[w], type);
  for (int traditional = 0; traditional < 2; traditional++)
    for (int dims = 2; dims <= 16; dims += 14) {
      check_rope(3, 4, 16, dims, traditional, NULL);
      check_rope(3, 4, 16, dims, traditional, padding);
      check_rope(1, 1, 21, dims, traditional, NULL);
    }
  for (int w = 0; w < 6; w++) check_swiglu(widths[w]);
  for (int causal = 0; causal < 2; causal++) {
    check_attention(4, 2, 3, 11, 20, causal);
    check_attention(2, 1, 1, 1, 64, causal);
    check_attention(8, 4, 40, 50, 72, causal); /* on several threads */
    check_attention(2, 2, 5, 600, 64, causal); /* threads share the keys */
  }
  check_company(4, 2, 150, 700, 64);
  check_company(3, 3, 40, 300, 20);
  check_company(1, 1, 100, 100, 128);
  for (int with_mask = 0; with_mask < 2; with_mask++) {
    check_padding(4, 2, 1, 300, 64, with_mask);
    check_padding(3, 3, 16, 40, 20, with_mask);
    check_padding(1, 1, 5, 600, 128, with_mask); /* threads share the keys */
  }
  printf("%d numbers, %d wrong, %d threads\n", results, failures, gearbx_threads());
  return failures != 0;
}
