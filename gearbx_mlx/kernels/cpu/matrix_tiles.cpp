// Availability of matrix tiles, their shapes, and bf16 matmuls by them.

#include "matrix_tiles.h"

#if defined(GEARBX_TILES) && !defined(GEARBX_TILE_TWIN)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "matvec.h"
#include "row_lanes.h"

namespace gearbx {

#ifndef GEARBX_TILES

bool tiles_allowed() { return false; }

#else

bool tiles_allowed() {
#ifdef GEARBX_TILE_TWIN
  return true;
#else
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // Linux's numbers
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
#endif
}

namespace {

struct Shaped {
  TileShapes shapes;
  bool is = false;
};
thread_local Shaped shaped;

// The results of a tile of `height` rows for `vectors`.
void put(const float* tile, int64_t height, int64_t vectors, float* y, int64_t stride) {
#ifdef GEARBX_AVX512_VNNI
  if (height == TILE_HEIGHT) {
    Ints columns[TILE_HEIGHT];
    transpose<TILE_HEIGHT>(reinterpret_cast<const uint8_t*>(tile), TILE_BYTES, columns);
    for (int64_t v = 0; v < vectors; v++) store_ints(y + v * stride, columns[v]);
    return;
  }
#endif
  for (int64_t v = 0; v < vectors; v++)
    for (int64_t r = 0; r < height; r++) y[v * stride + r] = tile[r * (TILE_BYTES / 4) + v];
}

// 16 rows and one group of vectors, or twice as many of either: every loaded tile is used for both.
template <bool SECOND_ROWS, bool SECOND_GROUP>
void multiply_four(const Bf16Tiles& job, int64_t row, int64_t height, int64_t second) {
  TileShapes shapes;
  for (int group = 0; group <= SECOND_GROUP; group++) {
    const int64_t bytes = 4 * job.vectors[group];
    shapes.set(2 * group, height, bytes);
    if (SECOND_ROWS) shapes.set(2 * group + 1, second, bytes);
    shapes.set(6 + group, TILE_HEIGHT, bytes);
  }
  shapes.set(4, height, TILE_BYTES);
  if (SECOND_ROWS) shapes.set(5, second, TILE_BYTES);
  shape_tiles(shapes);

  zero_tile<0>();
  if constexpr (SECOND_ROWS) zero_tile<1>();
  if constexpr (SECOND_GROUP) zero_tile<2>();
  if constexpr (SECOND_ROWS && SECOND_GROUP) zero_tile<3>();
  const uint16_t* w = job.w + row * job.columns;
  const int64_t stride = 2 * job.columns;  // bytes
  for (int64_t i = 0; i < job.steps; i++, w += 32) {
    load_tile<6>(job.x[0] + i * 32 * job.vectors[0], 4 * job.vectors[0]);
    load_tile<4>(w, stride);
    add_bf16_products<0, 4, 6>();
    if constexpr (SECOND_ROWS) {
      load_tile<5>(w + TILE_HEIGHT * job.columns, stride);
      add_bf16_products<1, 5, 6>();
    }
    if constexpr (SECOND_GROUP) {
      load_tile<7>(job.x[1] + i * 32 * job.vectors[1], 4 * job.vectors[1]);
      add_bf16_products<2, 4, 7>();
      if constexpr (SECOND_ROWS) add_bf16_products<3, 5, 7>();
    }
  }

  alignas(64) float results[TILE_HEIGHT * TILE_BYTES / 4];
  float* y = job.y + row;
  float* others = y + job.vectors[0] * job.stride;
  store_tile<0>(results, TILE_BYTES);
  put(results, height, job.vectors[0], y, job.stride);
  if constexpr (SECOND_ROWS) {
    store_tile<1>(results, TILE_BYTES);
    put(results, second, job.vectors[0], y + TILE_HEIGHT, job.stride);
  }
  if constexpr (SECOND_GROUP) {
    store_tile<2>(results, TILE_BYTES);
    put(results, height, job.vectors[1], others, job.stride);
    if constexpr (SECOND_ROWS) {
      store_tile<3>(results, TILE_BYTES);
      put(results, second, job.vectors[1], others + TILE_HEIGHT, job.stride);
    }
  }
}

}  // namespace

void shape_tiles(const TileShapes& shapes) {
  if (shaped.is && std::memcmp(&shaped.shapes, &shapes, sizeof shapes) == 0) return;
  shaped = {shapes, true};
#ifdef GEARBX_TILE_TWIN
  tiles.shapes = shapes;
#else
  asm volatile("ldtilecfg %0" ::"m"(shaped.shapes));
#endif
}

void release_tiles() {
  if (!shaped.is) return;
  shaped.is = false;
#ifndef GEARBX_TILE_TWIN
  asm volatile("tilerelease");
#endif
}

void multiply_bf16_tiles(const Bf16Tiles& job) {
  for (int64_t row = 0; row < job.rows; row += 2 * TILE_HEIGHT) {
    const int64_t left = job.rows - row, height = left < TILE_HEIGHT ? left : TILE_HEIGHT;
    const int64_t second = left - height < TILE_HEIGHT ? left - height : TILE_HEIGHT;
    if (second)
      (job.vectors[1] ? multiply_four<true, true> : multiply_four<true, false>)(job, row, height, second);
    else
      (job.vectors[1] ? multiply_four<false, true> : multiply_four<false, false>)(job, row, height, 0);
  }
}

#endif

}  // namespace gearbx

extern "C" int gearbx_tiles(void) {
#ifdef GEARBX_TILES
  return gearbx::tiles_allowed() ? 1 : -1;
#else
  return 0;
#endif
}
