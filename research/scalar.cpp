// Groupwise codes times one vector, one weight after the other on one thread: what vector kernels are compared with, as
// in AION's Table 2. Compilers are not to make vectors of it.

#include <cstdint>

#if defined(__clang__)
#define NO_VECTORS
#define NO_VECTORS_IN_LOOP _Pragma("clang loop vectorize(disable) interleave(disable)")
#else
#define NO_VECTORS __attribute__((optimize("no-tree-vectorize")))
#define NO_VECTORS_IN_LOOP
#endif

namespace {

constexpr int GROUP_BYTES = 16;  // of 32 codes

NO_VECTORS float product_of_group(const uint8_t* codes, const float* x) {
  float sum = 0;
  NO_VECTORS_IN_LOOP
  for (int i = 0; i < GROUP_BYTES; i++) {
    sum += static_cast<float>((codes[i] & 15) - 8) * x[2 * i];
    sum += static_cast<float>((codes[i] >> 4) - 8) * x[2 * i + 1];
  }
  return sum;
}

}  // namespace

// y (rows) = codes of 4 bits, two in a byte (rows, 16 groups), times x (32 groups). scales (rows, groups).
extern "C" void scalar_groupwise(const uint8_t* codes, const float* scales, int64_t rows, int64_t groups,
                                 const float* x, float* y) {
  for (int64_t row = 0; row < rows; row++) {
    float total = 0;
    for (int64_t g = row * groups; g < (row + 1) * groups; g++)
      total += scales[g] * product_of_group(codes + g * GROUP_BYTES, x + 2 * GROUP_BYTES * (g - row * groups));
    y[row] = total;
  }
}
