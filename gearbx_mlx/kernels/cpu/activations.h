// Activations in the order in which tiles (tile.h) read them.

#pragma once

#include <vector>

#include "pool.h"
#include "sixteen.h"

namespace gearbx {

#ifdef GEARBX_AVX512
typedef F16 Lanes;
constexpr int TILE_VECTORS = 8;  // as many as the registers hold the sums of
inline EvenOdd join_parts(const F16* parts) { return in_halves(*parts); }
#else
typedef F8 Lanes;
constexpr int TILE_VECTORS = 4;
inline EvenOdd join_parts(const F8* parts) { return {parts[0], parts[1]}; }
#endif
constexpr int LANES = sizeof(Lanes) / sizeof(float), PARTS = 16 / LANES;

inline int64_t whole_blocks(int64_t columns) { return columns / 16 * 16; }

// Room for `count` floats in `memory`, from the beginning of a line of the cache on, so that no load needs two lines.
inline float* reserve(std::vector<float>& memory, int64_t count) {
  constexpr size_t LINE = 64;
  const size_t needed = static_cast<size_t>(count) + LINE / sizeof(float);
  if (memory.size() < needed) memory.resize(needed);
  return memory.data() + (LINE - reinterpret_cast<uintptr_t>(memory.data()) % LINE) % LINE / sizeof(float);
}

// Vectors (vectors, columns), in groups of at most TILE_VECTORS whose sizes differ by at most one.
//
// Packed, the vectors of a group are neighbours: first the first LANES of the first 16 columns, vector after vector,
// then those of the next 16 columns; and after all of these the other lanes. Rows of a power of two apart would compete
// for the same lines of the cache. Columns after the last multiple of 16 are not packed.
struct Activations {
  const float* x;
  int64_t vectors, columns;
  float* packed = nullptr;

  // One vector stays as it is. Others are packed into memory of the calling thread, which its next call overwrites.
  Activations(const float* from, int64_t count, int64_t width) : x(from), vectors(count), columns(width) {
    if (vectors == 1) return;
    static thread_local std::vector<float> memory;
    packed = reserve(memory, vectors * whole_blocks(columns));
    share_out(static_cast<int>(groups()), pack_group, this);
  }

  int64_t groups() const { return (vectors + TILE_VECTORS - 1) / TILE_VECTORS; }
  int64_t first(int64_t group) const { return group * vectors / groups(); }
  float* packed_group(int64_t group) const { return packed + first(group) * whole_blocks(columns); }

 private:
  static void pack_group(const void* context, int group) {
    const auto& a = *static_cast<const Activations*>(context);
    const int64_t first = a.first(group), count = a.first(group + 1) - first;
    float* to = a.packed_group(group);
    for (int p = 0; p < PARTS; p++)
      for (int64_t i = p * LANES; i < whole_blocks(a.columns); i += 16)
        for (int64_t v = first; v < first + count; v++, to += LANES)
          std::memcpy(to, a.x + v * a.columns + i, LANES * sizeof(float));
  }
};

}  // namespace gearbx
