/* Products over codebooks without Python or MLX, to be built with sanitizers: every width of both kinds, over buffers of
   exactly the size that a matrix needs, against a plain loop in double precision. Unused bits are random. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "codebook.h"
#include "matvec.h"

enum { GROUP = 128, LIBRARY = 32 };

static uint64_t state = 1;

static uint32_t random_bits(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 32);
}

/* fp16 of 0.25 to 2, either sign. */
static uint16_t* random_halves(size_t count) {
  uint16_t* halves = malloc(count * 2);
  for (size_t i = 0; i < count; i++)
    halves[i] = (uint16_t)((random_bits() & 1) << 15 | (13 + random_bits() % 3) << 10 | (random_bits() & 1023));
  return halves;
}

static double value_of(uint16_t half) {
  const double size = ldexp(1.0 + (half & 1023) / 1024.0, (half >> 10 & 31) - 15);
  return half >> 15 ? -size : size;
}

/* Where the code of a column lies in its row: bits from the start. */
static int64_t place_of(int bits, int library, int64_t column) {
  if (library) return column * bits;
  if (bits == 5) return column / 3 * 16 + column % 3 * 5;
  const int held = 32 / bits;
  return column / held * 32 + column % held * bits;
}

static unsigned read_code(const uint8_t* row, int64_t place, int bits) {
  unsigned code = 0;
  for (int b = 0; b < bits; b++) code |= (unsigned)(row[(place + b) / 8] >> (place + b) % 8 & 1) << b;
  return code;
}

static void write_code(uint8_t* row, int64_t place, int bits, unsigned code) {
  for (int b = 0; b < bits; b++) {
    row[(place + b) / 8] &= (uint8_t) ~(1 << (place + b) % 8);
    row[(place + b) / 8] |= (uint8_t)((code >> b & 1) << (place + b) % 8);
  }
}

static int failures = 0, products = 0;

static void check(int bits, int library, int64_t rows, int64_t columns, int64_t vectors) {
  const int64_t groups = (columns + GROUP - 1) / GROUP, entries = 1 << bits;
  const int held = bits == 5 ? 6 : 32 / bits;
  gearbx_codebook m = {.rows = rows, .columns = columns, .bits = bits};
  m.row_words = library ? groups * 4 * bits : (columns + held - 1) / held;
  uint32_t* words = malloc((size_t)(rows * m.row_words) * 4);
  for (int64_t i = 0; i < rows * m.row_words; i++) words[i] = random_bits();
  uint16_t* codebook = random_halves((size_t)((library ? LIBRARY : rows) * entries));
  uint8_t* chosen = malloc((size_t)(rows * groups));
  for (int64_t i = 0; i < rows * groups; i++) chosen[i] = (uint8_t)(random_bits() % LIBRARY);
  uint16_t *scales = random_halves((size_t)(rows * groups)), *midpoints = random_halves((size_t)(rows * groups));

  uint32_t* offsets = malloc((size_t)(rows + 1) * 4);
  uint16_t* where = malloc((size_t)(rows * columns) * 2 + 2);
  char* outlying = calloc((size_t)(rows * columns), 1);
  offsets[0] = 0;
  for (int64_t r = 0; r < rows; r++) {
    const uint32_t one_in = 2 + random_bits() % 40;
    uint32_t end = offsets[r];
    for (int64_t c = 0; c < columns; c++)
      if (random_bits() % one_in == 0) {
        where[end++] = (uint16_t)c;
        outlying[r * columns + c] = 1;
        if (!library)
          write_code((uint8_t*)(words + r * m.row_words), place_of(bits, 0, c), bits, (unsigned)(r % entries));
      }
    offsets[r + 1] = end;
  }
  const uint32_t count = offsets[rows] ? offsets[rows] : 1;
  uint16_t *values = random_halves(count), *column_of = malloc((size_t)count * 2);
  for (uint32_t i = 0; i < offsets[rows]; i++) column_of[i] = where[i];
  m.weights = words;
  m.codebook = codebook;
  m.outliers = values;
  m.outlier_columns = column_of;
  m.outlier_offsets = offsets;
  if (library) {
    m.entries = chosen;
    m.scales = scales;
    m.midpoints = midpoints;
  }

  float *x = malloc((size_t)(vectors * columns) * 4), *y = malloc((size_t)(vectors * rows) * 4);
  for (int64_t i = 0; i < vectors * columns; i++) x[i] = (float)((int)(random_bits() % 2001) - 1000) / 500.0f;
  gearbx_codebook_product(&m, x, vectors, y);
  products++;
  for (int64_t v = 0; v < vectors; v++)
    for (int64_t r = 0; r < rows; r++) {
      double exact = 0, bound = 0;
      uint32_t next = offsets[r];
      for (int64_t c = 0; c < columns; c++) {
        const unsigned code = read_code((const uint8_t*)(words + r * m.row_words), place_of(bits, library, c), bits);
        const int64_t g = r * groups + c / GROUP;
        double weight = value_of(codebook[(library ? chosen[g] : r) * entries + code]), size = fabs(weight);
        if (library) {
          size = fabs(value_of(scales[g]) * weight) + fabs(value_of(midpoints[g]));
          weight = value_of(midpoints[g]) + value_of(scales[g]) * weight;
        }
        if (outlying[r * columns + c]) {
          weight = value_of(values[next++]);
          size = 2 * size + fabs(weight);
        }
        exact += weight * x[v * columns + c];
        bound += size * fabs((double)x[v * columns + c]);
      }
      const double error = fabs(y[v * rows + r] - exact);
      if (!(error <= ((double)columns / 8 + 32) * 0x1p-24 * bound + 1e-30)) {
        failures++;
        printf("%d bits, library %d, %d x %d, %d vectors: row %d of vector %d is %g off\n", bits, library, (int)rows,
               (int)columns, (int)vectors, (int)r, (int)v, error);
        v = vectors;
        break;
      }
    }
  free(words);
  free(codebook);
  free(chosen);
  free(scales);
  free(midpoints);
  free(offsets);
  free(where);
  free(outlying);
  free(values);
  free(column_of);
  free(x);
  free(y);
}

int main(void) {
  static const int64_t widths[] = {1, 7, 33, 128, 130, 256, 500}, heights[] = {1, 4, 17}, counts[] = {1, 2, 5, 21};
  for (int bits = 2; bits <= 6; bits++)
    for (int library = 0; library <= (bits <= 4); library++) {
      for (int w = 0; w < 7; w++)
        for (int h = 0; h < 3; h++)
          for (int v = 0; v < 4; v++) check(bits, library, heights[h], widths[w], counts[v]);
      check(bits, library, 1100, 300, 2); /* several pieces */
    }
  printf("%d products, %d wrong, %d threads\n", products, failures, gearbx_threads());
  return failures != 0;
}
