// Shares the rows of several matrices out at once.

#pragma once

#include "matvec.h"
#include "pool.h"
#include "sixteen.h"
#include "split.h"

namespace gearbx {

// Rows of a block for a few vectors, of which so many at once have their sums in registers (tile.h).
#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
constexpr int TILE_ROWS = 4, ROWS_AT_ONCE = 2;
#else
constexpr int TILE_ROWS = 3, ROWS_AT_ONCE = 3;
#endif
constexpr int64_t MOST_ROWS = 96;  // of a block

// How many rows of `row_bytes` each are multiplied at a time: few for a few vectors, so that they stay in the first
// cache; for more vectors as many as stay in the second one, since the activations are read for each block. Every
// thread gets some blocks.
inline int64_t block_rows(int64_t rows, int64_t row_bytes, int64_t vectors) {
  constexpr int64_t CACHE = 384 << 10;
  if (vectors <= GEARBX_MAX_VECTORS) return TILE_ROWS;
  const int64_t fit = CACHE / (row_bytes + 1), share = rows / (4 * thread_count()), some = fit < share ? fit : share;
  return some < TILE_ROWS ? TILE_ROWS : some < MOST_ROWS ? some / TILE_ROWS * TILE_ROWS : MOST_ROWS;
}

// Rows of a matrix in pieces of whole tiles. A piece has at least a block, and so many bytes, if there are enough for
// every thread, that it takes long compared with the first of them, which are read without a prefetch.
struct TilePieces {
  int64_t rows;
  Pieces tiles;

  TilePieces(int64_t rows, int64_t row_bytes, int64_t block, int vectors)
      : rows(rows),
        tiles((rows + TILE_ROWS - 1) / TILE_ROWS, TILE_ROWS * row_bytes, vectors,
              least(row_bytes, block)) {}

  int count() const { return tiles.count; }
  int64_t first(int piece) const {
    const int64_t row = tiles.first(piece) * TILE_ROWS;
    return row < rows ? row : rows;
  }

 private:
  int64_t least(int64_t row_bytes, int64_t block) const {
    constexpr int64_t MOST_BYTES = 512 << 10;
    const int64_t share = rows / (4 * thread_count()), most = MOST_BYTES / (row_bytes + 1);
    const int64_t some = share < most ? share : most;
    return (some > block ? some : block) / TILE_ROWS;
  }
};

// Calls work(matrix number, first row, end of rows) for all pieces of all matrices, on several threads, and returns
// when all calls have. pieces_of(number) gives a matrix's TilePieces.
template <class PiecesOf, class Work>
void share_rows(int matrices, PiecesOf pieces_of, const Work& work) {
  constexpr int MOST = 60;  // matrices at once, of at most 1024 pieces each
  for (int done = 0; done < matrices; done += MOST) {
    const int count = matrices - done < MOST ? matrices - done : MOST;
    struct Job {
      const Work* work;
      PiecesOf* pieces_of;
      int done, ends[MOST];
    } job = {&work, &pieces_of, done, {}};
    for (int i = 0, end = 0; i < count; i++) job.ends[i] = end += pieces_of(done + i).count();
    share_out(
        job.ends[count - 1],
        [](const void* context, int piece) {
          const Job& job = *static_cast<const Job*>(context);
          int i = 0;
          while (piece >= job.ends[i]) i++;
          const auto pieces = (*job.pieces_of)(job.done + i);
          const int own = piece - (i ? job.ends[i - 1] : 0);
          (*job.work)(job.done + i, pieces.first(own), pieces.first(own + 1));
        },
        &job);
  }
}

}  // namespace gearbx
