// Packing and unpacking of keys and values without Python or MLX, to be built with sanitizers: over buffers of exactly
// the size that is needed, against the formulas of formats/kv_cache.py, number by number.

#include <cmath>
#include <cstdio>
#include <vector>

#include "kv_planes.h"
#include "matvec.h"

using namespace gearbx;
typedef std::vector<float> Numbers;
typedef std::vector<uint32_t> Plane;

static uint64_t state = 1;
static int failures = 0, results = 0;

static float random_float() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<float>(static_cast<int32_t>(state >> 32)) / 1073741824.0f;
}

static void expect(bool right) {
  results++;
  failures += !right;
}

static bool is_close(double found, double expected) {
  return std::fabs(found - expected) <= 1e-5 * (1 + std::fabs(expected));
}

static uint32_t code_of(const Plane& plane, int64_t i) {
  return plane[static_cast<size_t>(i / CODES)] >> i % CODES * 4 & 15;
}

// Vectors (heads, positions, width), of which every second position is packed.
struct Packed {
  int64_t heads, positions, width, group;
  bool refined;
  Numbers x, scales, offsets;
  Plane coarse, fine;

  Packed(int64_t heads, int64_t positions, int64_t width, int64_t group, bool refined)
      : heads(heads), positions(positions), width(width), group(group), refined(refined),
        x(static_cast<size_t>((2 * heads * positions - 1) * width)),
        scales(static_cast<size_t>(heads * positions * width / group)), offsets(scales.size()),
        coarse(static_cast<size_t>(heads * positions * width / CODES)), fine(refined ? coarse.size() : 0) {
    for (float& value : x) value = random_float();
    for (int64_t i = 0; i < group; i++) x[static_cast<size_t>(i)] = 0.25f;  // a group of equal numbers
    x[static_cast<size_t>(2 * width)] = NAN;
    const KVRows rows = {x.data(), {0, 2 * positions * width, 2 * width}, heads, positions, heads * positions, width,
                         group};
    pack_vectors(rows, 0, rows.count, {coarse.data(), refined ? fine.data() : nullptr, scales.data(), offsets.data()});
  }

  const float* group_of(int64_t g) const { return x.data() + g * group / width * 2 * width + g * group % width; }

  void check_codes() const {
    for (size_t g = 0; g < scales.size(); g++) {
      const float* from = group_of(static_cast<int64_t>(g));
      float least = from[0], most = from[0];
      bool is_number = true;
      for (int64_t i = 0; i < group; i++) {
        least = from[i] < least ? from[i] : least;
        most = from[i] > most ? from[i] : most;
        is_number = is_number && !std::isnan(from[i]);
      }
      expect(std::isnan(scales[g]) == !is_number);
      if (!is_number) continue;
      const double finest = (static_cast<double>(most) - least) / (refined ? 255 : 15);
      expect(is_close(scales[g], finest * (refined ? 16 : 1)));
      for (int64_t i = 0; i < group; i++) {
        const int64_t at = static_cast<int64_t>(g) * group + i;
        const uint32_t code = refined ? code_of(coarse, at) << 4 | code_of(fine, at) : code_of(coarse, at);
        expect(std::fabs(least + code * finest - from[i]) <= 0.501 * finest + 1e-6);
      }
    }
  }

  // What is read of one plane or both, of all positions but the first.
  void check_numbers(bool both) const {
    const int64_t wide = width + 8, count = positions - 1;
    const gearbx_kv_planes planes = {coarse.data(), both ? fine.data() : nullptr, scales.data(), offsets.data(),
                                     positions, group};
    for (int64_t stride : {width, wide}) {
      Numbers found(static_cast<size_t>(count * stride));
      for (int64_t head = 0; head < heads; head++) {
        unpack_vectors(planes, head, 1, count, width, stride, found.data());
        for (int64_t i = 0; i < count; i++)
          for (int64_t k = 0; k < stride; k++) {
            const float number = found[static_cast<size_t>(i * stride + k)];
            if (k >= width) {
              expect(number == 0);
              continue;
            }
            const int64_t at = (head * positions + 1 + i) * width + k;
            const auto g = static_cast<size_t>(at / group);
            if (std::isnan(scales[g])) continue;
            const double code = code_of(coarse, at) + (both ? code_of(fine, at) / 16.0 - 15.0 / 32 : 0);
            expect(is_close(number, offsets[g] + scales[g] * code));
          }
      }
    }
  }
};

int main() {
  for (int64_t group : {8, 16, 32})
    for (int64_t width : {1, 2, 3, 4})
      for (bool refined : {false, true}) {
        const Packed packed(2, 5, width * group, group, refined);
        packed.check_codes();
        packed.check_numbers(false);
        if (refined) packed.check_numbers(true);
      }
  std::printf("%d results, %d wrong, %d threads\n", results, failures, gearbx_threads());
  return failures != 0;
}
