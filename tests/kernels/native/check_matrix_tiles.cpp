// Operations on matrix tiles beside plain loops in the order of the processor's manual, bit for bit: the processor's own
// where there are some and this is compiled for them, or the twin of the same name.

#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "matrix_tiles.h"
#include "matvec.h"

namespace {

int products = 0, failures = 0;

#ifdef GEARBX_TILES
uint64_t state = 1;

uint32_t random_bits() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(state >> 32);
}

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Numbers of all signs, of magnitudes from subnormal to large; products of some are subnormal.
uint16_t random_bf16() {
  const uint32_t kind = random_bits() % 8, exponent = kind == 0 ? 0 : kind == 1 ? 1 + random_bits() % 70 : 120 + random_bits() % 12;
  return static_cast<uint16_t>((random_bits() & 0x807f) | exponent << 7);
}

float no_subnormal(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

float widened(uint16_t bf16) { return no_subnormal(as_float(static_cast<uint32_t>(bf16) << 16)); }

void expect(const void* right, const void* found, size_t size, const char* what, int m, int n, int k) {
  products++;
  if (std::memcmp(right, found, size) == 0) return;
  failures++;
  std::printf("%s: %d rows, %d columns, %d dwords: other bits\n", what, m, n, k);
}

void shape(int m, int n, int k) {
  gearbx::TileShapes shapes;
  shapes.set(0, m, 4 * n);
  shapes.set(1, m, 4 * k);
  shapes.set(2, k, 4 * n);
  gearbx::shape_tiles(shapes);
}

void check_bf16(int m, int n, int k) {
  uint16_t a[16][32], b[16][32];
  float c[16][16] = {}, found[16][16] = {};
  for (auto& row : a)
    for (uint16_t& value : row) value = random_bf16();
  for (auto& row : b)
    for (uint16_t& value : row) value = random_bf16();
  for (auto& row : c)
    for (float& value : row) value = random_bits() % 4 ? widened(random_bf16()) : as_float(random_bits() & 0x807fffff);
  shape(m, n, k);
  gearbx::load_tile<0>(c, sizeof c[0]);
  gearbx::load_tile<1>(a, sizeof a[0]);
  gearbx::load_tile<2>(b, sizeof b[0]);
  gearbx::add_bf16_products<0, 1, 2>();
  gearbx::store_tile<0>(found, sizeof found[0]);
  float right[16][16] = {};
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      float even = 0, odd = 0;
      for (int p = 0; p < k; p++) {
        even = no_subnormal(std::fma(widened(a[i][2 * p]), widened(b[p][2 * j]), even));
        odd = no_subnormal(std::fma(widened(a[i][2 * p + 1]), widened(b[p][2 * j + 1]), odd));
      }
      right[i][j] = no_subnormal(no_subnormal(c[i][j]) + no_subnormal(even + odd));
    }
  expect(right, found, sizeof found, "bf16", m, n, k);
}

template <class Code>
void check_bytes(int m, int n, int k) {
  int8_t a[16][64];
  Code b[16][64];
  int32_t right[16][16] = {}, found[16][16] = {};
  for (auto& row : a)
    for (int8_t& value : row) value = static_cast<int8_t>(random_bits() % 4 ? random_bits() : 0x80);
  for (auto& row : b)
    for (Code& value : row) value = static_cast<Code>(random_bits() % 4 ? random_bits() : 0xff);
  shape(m, n, k);
  gearbx::zero_tile<0>();
  gearbx::load_tile<1>(a, sizeof a[0]);
  gearbx::load_tile<2>(b, sizeof b[0]);
  gearbx::add_byte_products<0, 1, 2, Code>();
  gearbx::add_byte_products<0, 1, 2, Code>();
  gearbx::store_tile<0>(found, sizeof found[0]);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++)
      for (int p = 0; p < 4 * k; p++) right[i][j] += 2 * a[i][p] * b[p / 4][4 * j + p % 4];
  expect(right, found, sizeof found, "bytes", m, n, k);
}
#endif

}  // namespace

int main() {
#ifdef GEARBX_TILES
  if (gearbx::tiles_allowed())
    for (int m : {1, 5, 16})
      for (int n : {1, 2, 9, 16})
        for (int k : {1, 8, 16})
          for (int times = 0; times < 20; times++) {
            check_bf16(m, n, k);
            check_bytes<uint8_t>(m, n, k);
            check_bytes<int8_t>(m, n, k);
          }
  gearbx::release_tiles();
#endif
  std::printf("%d products, %d wrong, %d threads\n", products, failures, gearbx_threads());
  return failures != 0;
}
