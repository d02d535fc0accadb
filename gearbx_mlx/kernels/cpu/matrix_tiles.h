// Matrix tiles (Intel's AMX, in servers since 2023): registers of 16 rows of 64 bytes. One instruction
// multiplies two of them. The time does not depend on the number of vectors in a tile: 16 cost as much as one.
//
// A has rows of numbers in their memory layout. B has in row k, for each column, the factors of dword k of A: two bf16,
// or four bytes. C has float32 or int32: row m, column n is the sum over row m of A and column n of B.
//
// This file has all operations on tiles, and with GEARBX_TILE_TWIN bit-identical ones in plain C++, so that layouts and
// edges are tested on every processor.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(GEARBX_TILE_TWIN)
#define GEARBX_TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__) && \
    !defined(GEARBX_NO_TILES)
#define GEARBX_TILES 1
#endif

namespace gearbx {

// Whether this process may use tiles; if so, all its matmuls that have a tile kernel do. The system is asked once, and
// may refuse.
bool tiles_allowed();

#ifdef GEARBX_TILES

constexpr int TILE_HEIGHT = 16, TILE_BYTES = 64;  // per row
constexpr int MAX_TILES = 8;

// The processor's format: rows, and bytes of a row, for each tile.
struct TileShapes {
  uint8_t palette = 1, start = 0, zeros[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t height, int64_t row_bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

// Sets the shapes of the calling thread's tiles, whose contents are lost if the shapes change. Each piece of work ends
// with release_tiles(), so that the system saves no tiles of a waiting thread.
void shape_tiles(const TileShapes& shapes);
void release_tiles();

// Rows of bf16 weights, times one or two groups of vectors: `x`, in the order of Paired (tile.h), of `vectors`. y is
// the first result; the results of consecutive vectors are `stride` apart.
struct Bf16Tiles {
  const uint16_t* w;
  int64_t rows, columns, steps;  // of 32 columns
  const uint16_t* x[2];
  int64_t vectors[2];
  float* y;
  int64_t stride;
};
void multiply_bf16_tiles(const Bf16Tiles& job);

#ifdef GEARBX_TILE_TWIN

struct Tiles {
  TileShapes shapes;
  alignas(64) uint8_t bytes[MAX_TILES][TILE_HEIGHT][TILE_BYTES];
};
inline thread_local Tiles tiles;

template <class T>
T tile_number(int tile, int row, int at) {
  T value;
  std::memcpy(&value, tiles.bytes[tile][row] + at * static_cast<int>(sizeof(T)), sizeof value);
  return value;
}
template <class T>
void set_tile_number(int tile, int row, int at, T value) {
  std::memcpy(tiles.bytes[tile][row] + at * static_cast<int>(sizeof(T)), &value, sizeof value);
}

template <int TILE>
void zero_tile() {
  std::memset(tiles.bytes[TILE], 0, sizeof tiles.bytes[TILE]);
}
template <int TILE>
void load_tile(const void* from, int64_t stride) {
  zero_tile<TILE>();
  for (int r = 0; r < tiles.shapes.rows[TILE]; r++)
    std::memcpy(tiles.bytes[TILE][r], static_cast<const uint8_t*>(from) + r * stride, tiles.shapes.bytes[TILE]);
}
template <int TILE>
void store_tile(void* to, int64_t stride) {
  for (int r = 0; r < tiles.shapes.rows[TILE]; r++)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.bytes[TILE][r], tiles.shapes.bytes[TILE]);
}

// Subnormal numbers count as zeros, and so do subnormal results.
inline float flushed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (!(bits & 0x7f800000)) bits &= 0x80000000;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The products of even and of odd columns are added separately from zero, each with a rounding. Then both sums are
// added, and the total is added to C.
template <int C, int A, int B>
void add_bf16_products() {
  const auto bf16 = [](int tile, int row, int at) {
    const uint32_t bits = uint32_t{tile_number<uint16_t>(tile, row, at)} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return flushed(value);
  };
  for (int m = 0; m < tiles.shapes.rows[C]; m++)
    for (int n = 0; n < tiles.shapes.bytes[C] / 4; n++) {
      float sums[2] = {};
      for (int k = 0; k < tiles.shapes.bytes[A] / 4; k++)
        for (int i = 0; i < 2; i++)
          sums[i] = flushed(__builtin_fmaf(bf16(A, m, 2 * k + i), bf16(B, k, 2 * n + i), sums[i]));
      const float both = flushed(sums[0] + sums[1]);
      set_tile_number(C, m, n, flushed(flushed(tile_number<float>(C, m, n)) + both));
    }
}

// Bytes of A are signed; bytes of B have the type OfB.
template <int C, int A, int B, class OfB>
void add_byte_products() {
  for (int m = 0; m < tiles.shapes.rows[C]; m++)
    for (int n = 0; n < tiles.shapes.bytes[C] / 4; n++) {
      int32_t sum = tile_number<int32_t>(C, m, n);
      for (int k = 0; k < tiles.shapes.bytes[A]; k++)
        sum += tile_number<int8_t>(A, m, k) * tile_number<OfB>(B, k / 4, 4 * n + k % 4);
      set_tile_number(C, m, n, sum);
    }
}

#else

// In assembler, since GCC's intrinsics take no template argument for a tile, and do not declare that they read memory.
template <int TILE>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int C, int A, int B>
inline void add_bf16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B, class OfB>
inline void add_byte_products() {
  if constexpr (OfB(-1) < OfB(0))
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif
#endif

}  // namespace gearbx
