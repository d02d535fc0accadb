/* The CPU kernels without Python or MLX, to be built with sanitizers: every width, group, type and number of vectors,
   over buffers of exactly the size that a matrix needs, against a plain loop in double precision. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "matvec.h"
#include "products.h"
#include "split_codes.h"

static uint64_t state = 1;

static uint32_t random_bits(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 32);
}

static float random_float(void) { return (float)((int)(random_bits() % 2001) - 1000) / 500.0f; }

static int size_of(int type) { return type == GEARBX_FLOAT32 ? 4 : 2; }

/* Random values of a type, and what they are as doubles. */
static void* random_values(size_t count, int type, double* values) {
  char* held = malloc(count * (size_t)size_of(type));
  for (size_t i = 0; i < count; i++) {
    float value = random_float();
    uint32_t bits;
    if (type == GEARBX_FLOAT32) {
      memcpy(held + 4 * i, &value, 4);
    } else {
      uint16_t half;
      if (type == GEARBX_BFLOAT16) {
        memcpy(&bits, &value, 4);
        half = (uint16_t)(bits >> 16);
        bits = (uint32_t)half << 16;
        memcpy(&value, &bits, 4);
      } else { /* 1 to 2, or a subnormal */
        const uint32_t mantissa = random_bits() & 1023, sign = random_bits() & 1, tiny = random_bits() % 8 == 0;
        half = (uint16_t)(sign << 15 | (tiny ? 0u : 15u << 10) | mantissa);
        value = (tiny ? (float)mantissa * 0x1p-24f : 1.0f + (float)mantissa / 1024.0f) * (sign ? -1.0f : 1.0f);
      }
      memcpy(held + 2 * i, &half, 2);
    }
    values[i] = value;
  }
  return held;
}

static int failures = 0, products = 0;

static void compare(const char* what, int64_t rows, int64_t columns, int vectors, const float* x, const double* weights,
                    const double* sizes, const float* y) {
  products++;
  for (int v = 0; v < vectors; v++)
    for (int64_t r = 0; r < rows; r++) {
      double exact = 0, bound = 0;
      for (int64_t i = 0; i < columns; i++) {
        exact += weights[r * columns + i] * x[v * columns + i];
        bound += sizes[r * columns + i] * fabs((double)x[v * columns + i]);
      }
      const double error = fabs(y[v * rows + r] - exact);
      if (!(error <= ((double)columns / 8 + 16) * 0x1p-24 * bound + 1e-30)) {
        failures++;
        printf("%s rows %d columns %d vectors %d: row %d of vector %d is %g off\n", what, (int)rows, (int)columns,
               vectors, (int)r, v, error);
        return;
      }
    }
}

static float* random_x(int64_t count) {
  float* x = malloc((size_t)count * 4);
  for (int64_t i = 0; i < count; i++) x[i] = random_float();
  return x;
}

/* x as activations of 8 or 16 bits stand for it: 127 or 32384 steps of the largest of each group. */
static void round_activations(float* x, int64_t columns, int group, int bits) {
  for (int64_t from = 0; from < columns; from += group) {
    const int64_t end = from + group < columns ? from + group : columns;
    float largest = 0;
    for (int64_t i = from; i < end; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    const float step = largest / (bits == 8 ? 127.0f : 32384.0f), inverse = 1.0f / step;
    for (int64_t i = from; i < end; i++) x[i] = largest > 0 ? nearbyintf(x[i] * inverse) * step : 0;
  }
}

/* The numbers of each panel's rows, `count` of `size` bytes to a row, side by side. */
static void* in_panels(const void* from, int64_t rows, int64_t count, size_t size) {
  const int64_t height = gearbx_panel_rows();
  char* to = malloc((size_t)(rows * count) * size);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i++)
      memcpy(to + (size_t)((r / height * count + i) * height + r % height) * size,
             (const char*)from + (size_t)(r * count + i) * size, size);
  return to;
}

/* The same product with rows side by side has the same bits. */
static void check_panels(const gearbx_stack* rows, const float* x, int vectors, const float* y) {
  gearbx_stack m = *rows;
  const int four = m.widths[0] == 4 && (m.planes == 1 || (m.planes == 2 && m.widths[1] != 3));
  if (!m.x_bits || m.rows % gearbx_panel_rows() || !(four || (m.planes == 1 && m.widths[0] == 8))) return;
  const int64_t groups = m.columns / m.group;
  m.panel_rows = gearbx_panel_rows();
  m.scales = in_panels(rows->scales, m.rows, groups, (size_t)size_of(m.scale_type));
  for (int p = 0; p < m.planes; p++) {
    m.biases[p] = in_panels(rows->biases[p], m.rows, groups, (size_t)size_of(m.scale_type));
    m.weights[p] = in_panels(rows->weights[p], m.rows, m.columns / 32 * m.widths[p], 4);
  }
  float* z = malloc((size_t)(vectors * m.rows) * 4);
  gearbx_stack_matvec(&m, x, vectors, z);
  products++;
  if (memcmp(y, z, (size_t)(vectors * m.rows) * 4)) {
    failures++;
    printf("panels of %d planes, group %d, %d rows, %d vectors: other bits\n", m.planes, m.group, (int)m.rows, vectors);
  }
  for (int p = 0; p < m.planes; p++) {
    free((void*)m.weights[p]);
    free((void*)m.biases[p]);
  }
  free((void*)m.scales);
  free(z);
}

static void check_stack(int planes, const int* widths, int group, int type, int64_t rows, int64_t groups, int vectors,
                        int x_bits) {
  const int64_t columns = groups * group;
  gearbx_stack m = {.rows = rows, .columns = columns, .group = group, .planes = planes, .scale_type = type,
                    .x_bits = x_bits};
  double* scales = malloc((size_t)(rows * groups) * 8);
  double* weights = calloc((size_t)(rows * columns), 8);
  double* sizes = calloc((size_t)(rows * columns), 8);
  m.scales = random_values((size_t)(rows * groups), type, scales);
  double factor = 1;
  for (int p = 0; p < planes; p++) {
    const int width = widths[p];
    const size_t bytes = (size_t)(rows * columns / 8 * width);
    uint8_t* packed = malloc(bytes);
    double* biases = malloc((size_t)(rows * groups) * 8);
    for (size_t i = 0; i < bytes; i++) packed[i] = (uint8_t)random_bits();
    if (p) factor /= 1 << width;
    m.widths[p] = width;
    m.weights[p] = packed;
    m.biases[p] = random_values((size_t)(rows * groups), type, biases);
    for (int64_t i = 0; i < rows * columns; i++) {
      unsigned code = 0;
      for (int b = 0; b < width; b++) {
        const size_t bit = (size_t)i * (size_t)width + (size_t)b;
        code |= (unsigned)(packed[bit / 8] >> bit % 8 & 1) << b;
      }
      weights[i] += factor * (scales[i / group] * code + biases[i / group]);
      sizes[i] += factor * (fabs(scales[i / group]) * code + fabs(biases[i / group]));
    }
    free(biases);
  }
  float* x = random_x(vectors * columns);
  float* y = malloc((size_t)(vectors * rows) * 4);
  gearbx_stack_matvec(&m, x, vectors, y);
  check_panels(&m, x, vectors, y);
  for (int v = 0; x_bits && v < vectors; v++) round_activations(x + v * columns, columns, group, x_bits);
  char what[80];
  snprintf(what, sizeof what, "%d planes, first of %d bits, group %d, type %d, x_bits %d,", planes, widths[0], group, type,
           x_bits);
  compare(what, rows, columns, vectors, x, weights, sizes, y);
  for (int p = 0; p < planes; p++) {
    free((void*)m.weights[p]);
    free((void*)m.biases[p]);
  }
  free((void*)m.scales);
  free(scales);
  free(weights);
  free(sizes);
  free(x);
  free(y);
}

/* Symmetric codes with a scale for each row or group, in rows that are padded, and end anywhere. */
static void check_symmetric(int bits, int by_row, int type, int64_t rows, int64_t inputs, int vectors, int x_bits) {
  const int group = by_row ? 64 : 32;
  const int64_t groups = (inputs + group - 1) / group, row_bytes = ((inputs * bits + 7) / 8 + 15) / 16 * 16;
  const int64_t count = by_row ? rows : rows * groups;
  uint8_t* packed = malloc((size_t)(rows * row_bytes));
  double* scales = malloc((size_t)count * 8);
  double* weights = malloc((size_t)(rows * inputs) * 8);
  double* sizes = malloc((size_t)(rows * inputs) * 8);
  void* held = random_values((size_t)count, type, scales);
  for (int64_t i = 0; i < rows * row_bytes; i++) packed[i] = (uint8_t)random_bits();
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < inputs; i++) {
      int code = 0;
      for (int b = 0; b < bits; b++) code |= (packed[r * row_bytes + (i * bits + b) / 8] >> (i * bits + b) % 8 & 1) << b;
      code = bits == 8 ? (int8_t)code : code - (1 << (bits - 1));
      const double scale = scales[by_row ? r : r * groups + i / group];
      weights[r * inputs + i] = scale * code;
      sizes[r * inputs + i] = fabs(scale) * (1 << bits);
    }
  gearbx_stack m = {.rows = rows, .columns = groups * group, .group = group, .planes = 1, .widths = {bits},
                    .weights = {packed}, .scales = held, .scale_type = type, .inputs = inputs, .row_bytes = row_bytes,
                    .kind = by_row ? GEARBX_SYMMETRIC_ROWS : GEARBX_SYMMETRIC_GROUPS, .x_bits = x_bits};
  float* x = random_x(vectors * inputs);
  float* y = malloc((size_t)(vectors * rows) * 4);
  gearbx_stack_matvec(&m, x, vectors, y);
  for (int v = 0; x_bits && v < vectors; v++) round_activations(x + v * inputs, inputs, group, x_bits);
  char what[64];
  snprintf(what, sizeof what, "symmetric, %d bits, by row %d, x_bits %d,", bits, by_row, x_bits);
  compare(what, rows, inputs, vectors, x, weights, sizes, y);
  free(packed);
  free(held);
  free(scales);
  free(weights);
  free(sizes);
  free(x);
  free(y);
}

/* x as bf16 holds it; the lower bits go. */
static void cut_to_bf16(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0xffff0000;
    memcpy(x + i, &bits, 4);
  }
}

static void check_dense(int type, int64_t rows, int64_t columns, int vectors, int x_bits) {
  double* weights = malloc((size_t)(rows * columns) * 8);
  double* sizes = malloc((size_t)(rows * columns) * 8);
  void* held = random_values((size_t)(rows * columns), type, weights);
  for (int64_t i = 0; i < rows * columns; i++) sizes[i] = fabs(weights[i]);
  float* x = random_x(vectors * columns);
  float* y = malloc((size_t)(vectors * rows) * 4);
  if (x_bits) cut_to_bf16(x, vectors * columns); /* which rounding leaves as it is */
  const gearbx_dense m = {rows, columns, held, type, x_bits};
  gearbx_dense_product(&m, x, vectors, y);
  char what[40];
  snprintf(what, sizeof what, "dense, type %d, x_bits %d,", type, x_bits);
  compare(what, rows, columns, vectors, x, weights, sizes, y);
  free(weights);
  free(sizes);
  free(held);
  free(x);
  free(y);
}

static void same_bits(const char* what, const float* a, const float* b, int64_t count) {
  products++;
  if (memcmp(a, b, (size_t)count * 4)) {
    failures++;
    printf("%s: other bits than alone\n", what);
  }
}

/* Many vectors, and experts, one of which nobody chooses and one of which does not exist: each as it is alone. */
static void check_products(int64_t vectors) {
  enum { EXPERTS = 4, ROWS = 5, COLUMNS = 64 };
  const int count = EXPERTS * ROWS * COLUMNS;
  double* values = malloc((size_t)count * 8);
  void* held = random_values((size_t)count, GEARBX_BFLOAT16, values);
  void* scales = random_values(EXPERTS * ROWS * 2, GEARBX_FLOAT16, values);
  uint32_t* words = malloc((size_t)count / 2);
  for (int i = 0; i < count / 8; i++) words[i] = random_bits();
  float* x = random_x(vectors * COLUMNS);
  float* y = malloc((size_t)(vectors * ROWS) * 4);
  float* alone = malloc((size_t)(vectors * ROWS) * 4);
  int32_t* vector = malloc((size_t)vectors * 4);
  int32_t* expert = malloc((size_t)vectors * 4);
  const gearbx_pairs pairs = {vectors, EXPERTS, vector, expert};
  for (int64_t p = 0; p < vectors; p++) {
    vector[p] = (int32_t)(vectors - 1 - p);
    expert[p] = p == 3 ? EXPERTS : (int32_t)(p % (EXPERTS - 1));
  }
  for (int form = 0; form < 5; form++) { /* dense and stacks; their activations as they are, and rounded */
    static const int all_bits[] = {0, 16, 0, 8, 16};
    const int stack = form > 1, x_bits = all_bits[form];
    for (int experts = 0; experts < 2; experts++) {
      gearbx_dense d = {ROWS, COLUMNS, held, GEARBX_BFLOAT16, x_bits};
      gearbx_stack s = {.rows = ROWS, .columns = COLUMNS, .group = 32, .planes = 1, .widths = {4}, .weights = {words},
                        .scales = scales, .biases = {scales}, .scale_type = GEARBX_FLOAT16,
                        .x_bits = x_bits};
      if (experts) {
        stack ? gearbx_stack_experts(&s, &pairs, x, y) : gearbx_dense_experts(&d, &pairs, x, y);
      } else {
        stack ? gearbx_stack_product(&s, x, vectors, y) : gearbx_dense_product(&d, x, vectors, y);
      }
      for (int64_t p = 0; p < vectors; p++) {
        const int e = experts ? expert[p] : 0;
        const float* mine = x + (experts ? vector[p] : p) * COLUMNS;
        d.weights = (const uint16_t*)held + e * ROWS * COLUMNS;
        s.weights[0] = words + e * ROWS * COLUMNS / 8;
        s.scales = s.biases[0] = (const uint16_t*)scales + e * ROWS * 2;
        if (e == EXPERTS)
          memcpy(alone + p * ROWS, y + p * ROWS, ROWS * 4), failures += !isnan(y[p * ROWS]);
        else
          stack ? gearbx_stack_matvec(&s, mine, 1, alone + p * ROWS) : gearbx_dense_product(&d, mine, 1, alone + p * ROWS);
      }
      same_bits(experts ? "experts" : "many vectors", y, alone, vectors * ROWS);
    }
  }
  free(values);
  free(held);
  free(scales);
  free(words);
  free(x);
  free(y);
  free(alone);
  free(vector);
  free(expert);
}

/* Several matrices of different types and heights with the same activations: each vector of each as it is alone. */
static void check_matrices(int64_t columns, int64_t vectors) {
  enum { MATRICES = 4 };
  static const int64_t heights[MATRICES] = {5, 0, 130, 1};
  gearbx_dense made[MATRICES];
  const gearbx_dense* matrices[MATRICES];
  float *x = random_x(vectors * columns), *y[MATRICES];
  x[columns / 2] = INFINITY; /* in the first vector alone */
  for (int i = 0; i < MATRICES; i++) {
    const int64_t rows = heights[i];
    double* values = malloc((size_t)(rows * columns + 1) * 8);
    made[i] = (gearbx_dense){rows, columns, random_values((size_t)(rows * columns), i % 3, values), i % 3, 16 * (i & 1)};
    matrices[i] = &made[i];
    y[i] = malloc((size_t)(vectors * rows + 1) * 4);
    free(values);
  }
  gearbx_dense_products(matrices, MATRICES, x, vectors, y);
  for (int i = 0; i < MATRICES; i++) {
    const int64_t rows = heights[i];
    float* alone = malloc((size_t)(vectors * rows + 1) * 4);
    for (int64_t v = 0; v < vectors; v++) gearbx_dense_product(&made[i], x + v * columns, 1, alone + v * rows);
    for (int64_t r = 0; r < rows; r++) failures += isfinite(y[i][r]) != 0; /* NaN keeps the sign of one operand */
    same_bits("several matrices", y[i] + rows, alone + rows, (vectors - 1) * rows);
    free(alone);
    free((void*)made[i].weights);
    free(y[i]);
  }
  free(x);
}

/* Several matrices over the same vectors, of which two have other codes: each as it is alone. */
static void check_several(int64_t vectors, int x_bits, int64_t rows, int64_t groups) {
  enum { COUNT = 4, GROUP = 64 };
  static const int widths[COUNT] = {4, 4, 8, 3};
  const int64_t columns = groups * GROUP;
  float* x = random_x(vectors * columns);
  gearbx_stack m[COUNT];
  const gearbx_stack* matrices[COUNT];
  float* y[COUNT];
  for (int i = 0; i < COUNT; i++) {
    const int64_t height = rows + 7 * i;
    double* values = malloc((size_t)(height * groups) * 8);
    uint8_t* packed = malloc((size_t)(height * columns / 8 * widths[i]));
    for (int64_t b = 0; b < height * columns / 8 * widths[i]; b++) packed[b] = (uint8_t)random_bits();
    m[i] = (gearbx_stack){.rows = height, .columns = columns, .group = GROUP, .planes = 1, .widths = {widths[i]},
                          .weights = {packed}, .scale_type = GEARBX_BFLOAT16, .x_bits = x_bits};
    m[i].scales = random_values((size_t)(height * groups), GEARBX_BFLOAT16, values);
    m[i].biases[0] = random_values((size_t)(height * groups), GEARBX_BFLOAT16, values);
    matrices[i] = &m[i];
    y[i] = malloc((size_t)(vectors * height) * 4);
    free(values);
  }
  gearbx_stack_products(matrices, COUNT, x, vectors, y);
  for (int i = 0; i < COUNT; i++) {
    float* alone = malloc((size_t)(vectors * m[i].rows) * 4);
    for (int64_t v = 0; v < vectors; v++) gearbx_stack_product(&m[i], x + v * columns, 1, alone + v * m[i].rows);
    same_bits("several matrices", y[i], alone, vectors * m[i].rows);
    free(alone);
    free(y[i]);
    free((void*)m[i].weights[0]);
    free((void*)m[i].scales);
    free((void*)m[i].biases[0]);
  }
  free(x);
}

/* A row of exactly this size. The sampled token is in it, and the likeliest where nothing else is kept. It is the same
 * where the margin is asked for, which is positive, and infinite where nothing else is kept. */
static void check_sampled(int64_t count) {
  static const gearbx_sampling how[] = {{1, 1, 0, 0, {1, 2}},   {0.5f, 0.9f, 0, 0, {3, 4}}, {2, 1, 0.1f, 3, {5, 6}},
                                        {2, 1e-6f, 0, 0, {7, 8}}, {2, 1, 1, 0, {9, 10}},      {2, 1, 0, 1, {11, 12}}};
  float* logits = malloc((size_t)count * 4);
  int64_t likeliest = 0;
  for (int64_t i = 0; i < count; i++) {
    logits[i] = random_float() + (float)i * 1e-4f;
    if (logits[i] > logits[likeliest]) likeliest = i;
  }
  for (int i = 0; i < (int)(sizeof how / sizeof *how); i++) {
    float margin;
    const int64_t token = gearbx_sampled(logits, count, how + i, NULL);
    products++;
    if (token < 0 || token >= count || (i > 2 && token != likeliest)) failures++;
    if (gearbx_sampled(logits, count, how + i, &margin) != token || !(margin > 0)) failures++;
    if (i > 2 && margin < INFINITY) failures++;
  }
  free(logits);
}

/* A held number as a double. */
static double value_of(const void* held, int type, int64_t at) {
  if (type == GEARBX_FLOAT32) return ((const float*)held)[at];
  const uint16_t half = ((const uint16_t*)held)[at];
  if (type == GEARBX_BFLOAT16) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return half >> 15 ? -size : size;
}

/* The codes of a matrix, read from the words, leave no more than the nearest of as many even steps would. */
static void check_codes(int type, int bits, int group, int64_t rows, int64_t groups) {
  const int64_t columns = groups * group, words = columns * bits / 32;
  double* weights = malloc((size_t)(rows * columns) * sizeof *weights);
  void* held = random_values((size_t)(rows * columns), type, weights);
  void *scales = malloc((size_t)(rows * groups) * 4), *biases = malloc((size_t)(rows * groups) * 4);
  uint32_t* packed = malloc((size_t)(rows * words) * 4);
  const gearbx_grid grid = {held, type, group, 1e-30f, scales, &biases};
  const gearbx_splitting job = {rows, columns, bits, NULL, &grid, 1, &bits, 0, &packed};
  gearbx_split_codes(&job);
  const int most = (1 << bits) - 1;
  double left = 0, allowed = 0;
  for (int64_t g = 0; g < rows * groups; g++) {
    const double *w = weights + g * group, scale = value_of(scales, type, g), bias = value_of(biases, type, g);
    double low = w[0], high = w[0];
    for (int i = 1; i < group; i++) low = fmin(low, w[i]), high = fmax(high, w[i]);
    const double step = (high - low) / most;
    /* A scale and a bias rounded to 16 bits move a weight further. */
    const double moved = type == GEARBX_FLOAT32 ? 1e-6 : (type == GEARBX_BFLOAT16 ? 0x1p-8 : 0x1p-11) * 4;
    for (int i = 0; i < group; i++) {
      const int64_t at = (g % groups * group + i) * bits, word = g / groups * words + at / 32;
      const uint64_t two = packed[word] | (at % 32 + bits > 32 ? (uint64_t)packed[word + 1] << 32 : 0);
      const double code = (double)(two >> at % 32 & (uint64_t)most);
      left += pow(w[i] - (code * scale + bias), 2);
      allowed += pow(fabs(w[i] - (low + step * rint((w[i] - low) / step))) + moved, 2);
    }
  }
  products++;
  if (!(left <= allowed)) {
    failures++;
    printf("codes of %d bits, group %d, type %d: %g are left of %g allowed\n", bits, group, type, left, allowed);
  }
  free(weights), free(held), free(scales), free(biases), free(packed);
}

int main(void) {
  for (int64_t count = 1; count < 3000; count += 1 + count / 2) check_sampled(count);
  static const int stacks[][5] = {{1, 1},    {1, 2},    {1, 3},    {1, 4},       {1, 5},       {1, 6},
                                  {1, 8},    {2, 2, 2}, {2, 2, 4}, {2, 3, 1},    {2, 3, 5},    {2, 4, 1},
                                  {2, 4, 2}, {2, 4, 4}, {2, 6, 2}, {2, 5, 1},    {2, 2, 6},    {3, 2, 2, 4},
                                  {3, 3, 1, 4}, {4, 4, 1, 1, 2}, {4, 2, 2, 2, 2}};
  static const int64_t heights[] = {1, 3, 17};
  static const int counts[] = {1, 2, 5, 16};
  /* Each group size of a stack has another type of scales, and each pair of the two occurs with many stacks. */
  for (int s = 0; s < (int)(sizeof stacks / sizeof *stacks); s++)
    for (int g = 0; g < 3; g++)
      for (int h = 0; h < 3; h++)
        for (int v = 0; v < 4; v++)
          for (int x_bits = 0; x_bits <= 16; x_bits += 8)
            check_stack(stacks[s][0], stacks[s] + 1, 32 << g, (g + s) % 3, heights[h], 1 + 4 * h, counts[v], x_bits);
  static const int side_by_side[][3] = {{1, 4}, {1, 8}, {2, 4, 4}, {2, 4, 2}, {2, 4, 1}};
  for (int s = 0; s < 5; s++)
    for (int g = 0; g < 3; g++)
      for (int v = 0; v < 4; v++)
        for (int x_bits = 8; x_bits <= 16; x_bits += 8) {
          const int type = (g + s) % 3;
          check_stack(side_by_side[s][0], side_by_side[s] + 1, 32 << g, type, 16, 1, counts[v], x_bits);
          check_stack(side_by_side[s][0], side_by_side[s] + 1, 32 << g, type, 48, 21, counts[v] + 3, x_bits);
        }
  const int four = 4;
  /* Several pieces, and more groups than are widened at once. */
  check_stack(1, &four, 32, GEARBX_BFLOAT16, 1100, 75, 3, 0);
  check_stack(1, &four, 32, GEARBX_BFLOAT16, 1100, 75, 3, 8);
  for (int bits = 2; bits <= 8; bits += 2)
    for (int x_bits = 0; x_bits <= 16; x_bits += 8)
      for (int64_t inputs = 1; inputs < 200; inputs += 11)
        for (int v = 0; v < 4; v++) {
          check_symmetric(bits, 1, v % 3, 3, inputs, counts[v], x_bits);
          check_symmetric(bits, 0, v % 3, 3, inputs, counts[v], x_bits);
        }
  for (int type = 0; type < 3; type++) {
    static const int64_t widths[] = {1, 7, 8, 31, 32, 100, 257};
    for (int w = 0; w < 7; w++)
      for (int h = 0; h < 3; h++)
        for (int v = 0; v < 4; v++)
          for (int x_bits = 0; x_bits <= (type == GEARBX_BFLOAT16 ? 16 : 0); x_bits += 16)
            check_dense(type, heights[h], widths[w], counts[v], x_bits);
    check_dense(type, 3000, 130, 2, 16);
    check_dense(type, 0, 16, 1, 0);
  }
  for (int x_bits = 0; x_bits <= 16; x_bits += 8) {
    check_several(1, x_bits, 50, 17);
    check_several(3, x_bits, 1, 1);
    check_several(21, x_bits, 130, 33);
  }
  check_stack(1, &four, 64, GEARBX_BFLOAT16, 20, 150, 1, 8); /* more columns than a row is read of at a time */
  for (int bits = 1; bits <= 8; bits++)
    for (int type = 0; type < 3; type++) check_codes(type, bits, 32 << (bits + type) % 3, 1 + 20 * type, 1 + bits);
  check_products(1);
  check_products(17);
  check_products(100);
  for (int64_t columns = 1; columns <= 1100; columns = 2 * columns + 7)
    for (int64_t vectors = 1; vectors <= 40; vectors += vectors < 17 ? 1 : 23) check_matrices(columns, vectors);
  check_matrices(48, 1100); /* more than are prepared at once */
  printf("%d products, %d wrong, %d threads\n", products, failures, gearbx_threads());
  return failures != 0;
}
