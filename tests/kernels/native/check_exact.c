/* Products over exact weights without Python or MLX, to be built with sanitizers: every form over arrays of exactly the
   size that a matrix needs, against weights that a plain loop decodes and the dense kernel multiplies. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact.h"

static uint64_t state = 1;

static uint32_t random_bits(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 32);
}

static void* random_bytes(int64_t count) {
  uint8_t* bytes = malloc(count ? (size_t)count : 1);
  for (int64_t i = 0; i < count; i++) bytes[i] = (uint8_t)random_bits();
  return bytes;
}

/* bf16 from 2^-7 to 2^-4, either sign. */
static uint16_t* random_scales(int64_t count) {
  uint16_t* scales = malloc((size_t)count * 2);
  for (int64_t i = 0; i < count; i++)
    scales[i] = (uint16_t)((random_bits() & 1) << 15 | (120 + random_bits() % 4) << 7 | (random_bits() & 127));
  return scales;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static float value_of(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* The weight at a place; takes its byte from *next on, or only counts it where there are none. */
static uint16_t weight_at(const gearbx_exact* m, int64_t i, uint32_t* next) {
  const int64_t g = i / m->group;
  const unsigned code = m->codes[i / 2] >> i % 2 * 4 & 15, low = m->low[i];
  const float scale = value_of(m->scales[g]), product = scale * (float)code, v = product + value_of(m->biases[g]);
  const unsigned first = (bits_of(v) >> 16) - 144;
  if (fabsf(v) > fabsf(scale) * 0.5f) return (uint16_t)(first + ((low - first) & 255));
  const unsigned high = m->high ? m->high[*next] : 0;
  *next += 1;
  return (uint16_t)(high << 8 | low);
}

static int failures = 0, products = 0;

static void expect(int right, const char* what, const gearbx_exact* m, int64_t vectors) {
  products++;
  if (right) return;
  failures++;
  printf("%s: group %d, %d x %d, %d vectors\n", what, m->group, (int)m->rows, (int)m->columns, (int)vectors);
}

static void check(int group, int64_t rows, int64_t groups, int64_t vectors, int x_bits) {
  const int64_t columns = groups * group, count = rows * columns;
  gearbx_exact m = {.rows = rows, .columns = columns, .group = group, .x_bits = x_bits};
  m.codes = random_bytes(count / 2);
  m.biases = random_scales(rows * groups);
  uint16_t* scales = random_scales(rows * groups);
  for (int64_t g = 0; g < rows * groups; g++)
    if (random_bits() % 8 == 0) scales[g] = 0;
  m.scales = scales;
  m.low = random_bytes(count);
  uint32_t *offsets = malloc((size_t)(rows + 1) * 4), next = 0;
  for (int64_t i = 0; i < count; i++) {
    if (i % columns == 0) offsets[i / columns] = next;
    weight_at(&m, i, &next);
  }
  offsets[rows] = next;
  m.offsets = offsets;
  m.count = next;
  m.high = random_bytes(next);
  uint16_t *weights = malloc((size_t)count * 2), *found = malloc((size_t)count * 2);
  next = 0;
  for (int64_t i = 0; i < count; i++) weights[i] = weight_at(&m, i, &next);
  gearbx_exact_decode(&m, found);
  expect(memcmp(weights, found, (size_t)count * 2) == 0, "weights", &m, 0);

  float *x = malloc((size_t)(vectors * columns) * 4), *y = malloc((size_t)(vectors * rows) * 4);
  float* exact = malloc((size_t)(vectors * rows) * 4);
  for (int64_t i = 0; i < vectors * columns; i++) x[i] = (float)((int)(random_bits() % 2001) - 1000) / 500.0f;
  const gearbx_dense dense = {rows, columns, weights, GEARBX_BFLOAT16, x_bits};
  gearbx_dense_product(&dense, x, vectors, y);
  gearbx_exact_product(&m, x, vectors, exact);
  int right = 1;
  for (int64_t i = 0; i < vectors * rows; i++)
    right &= bits_of(y[i]) == bits_of(exact[i]) || (isnan(y[i]) && isnan(exact[i]));
  expect(right, "products", &m, vectors);

  const gearbx_exact* const twice[] = {&m, &m};
  float* second = malloc((size_t)(vectors * rows) * 4);
  float* const both[] = {y, second};
  memset(y, 0, (size_t)(vectors * rows) * 4);
  gearbx_exact_products(twice, 2, x, vectors, both);
  for (int64_t i = 0; i < vectors * rows; i++)
    for (int k = 0; k < 2; k++)
      right &= bits_of(both[k][i]) == bits_of(exact[i]) || (isnan(both[k][i]) && isnan(exact[i]));
  expect(right, "several matrices", &m, vectors);
  free(second);

  for (int64_t row = 0; row <= rows; row++) { /* offsets that lie: nothing is read where nothing is */
    const uint32_t kept = offsets[row];
    offsets[row] = random_bits() % 2 ? kept - 1 - random_bits() % 40 : random_bits();
    gearbx_exact_product(&m, x, vectors, exact);
    gearbx_exact_decode(&m, found);
    offsets[row] = kept;
  }
  expect(memcmp(weights, found, (size_t)count * 2) != 0 || next == 0, "spoiled weights", &m, 0);
  free((void*)m.codes), free((void*)m.biases), free(scales), free((void*)m.low), free((void*)m.high), free(offsets);
  free(weights), free(found), free(x), free(y), free(exact);
}

int main(void) {
  static const int64_t vectors[] = {1, 2, 9, 21};
  for (int group = 32; group <= 128; group *= 2)
    for (int64_t groups = 1; groups <= 19; groups += groups < 4 ? 1 : 15)
      for (int v = 0; v < 4; v++)
        for (int x_bits = 0; x_bits < 32; x_bits += 16) check(group, 1 + 3 * v, groups, vectors[v], x_bits);
  check(64, 300, 2, 1, 16); /* several pieces */
  printf("%d products, %d wrong, %d threads\n", products, failures, gearbx_threads());
  return failures != 0;
}
