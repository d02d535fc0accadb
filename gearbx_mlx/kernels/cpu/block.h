// A transformer block: norm, heads, rotation, attention, sum, norm, gated MLP, sum. One call runs all of it, on the
// caller's thread and the pool's. These threads poll for work in between and do not sleep.
//
// Every step uses the kernel of its operation, so that a block is bit-identical to its operations.

#pragma once

#include <variant>
#include <vector>

#include "attention.h"
#include "exact.h"
#include "fused.h"
#include "products.h"

namespace gearbx {

// x times a transposed matrix, plus a bias if any.
struct Linear {
  std::variant<gearbx_stack, gearbx_dense, gearbx_exact> matrix;
  const void* bias = nullptr;  // (rows), of `bias_type` (matvec.h)
  int bias_type = GEARBX_FLOAT32;

  int64_t rows() const;
  int64_t inputs() const;
};

int64_t rows_of(const std::vector<Linear>& linears);

// `count` rows of a layer, and the number of rows of which `first` and `count` must be multiples.
Linear some_rows(const Linear& linear, int64_t first, int64_t count);
int64_t rows_at_once(const Linear& linear);

struct Norm {
  const void* weight = nullptr;  // null: no norm here
  int type = GEARBX_FLOAT32;
  float eps = 0;
  bool plus_one = false;  // multiplies by 1 + weight
};

struct Rotation {
  const float* frequencies;  // (dims / 2), radians per position
  int dims, traditional;     // as in gearbx_rotation
  float scale;
};

struct Block {
  Norm before_attention, after_attention, before_mlp, after_mlp, of_queries, of_keys;
  Norm of_embedding;  // of a draft head: its projections read the normed embedding of each token, then the normed x
  std::vector<Linear> projections;  // to queries, keys and values: three matrices, or one with the rows of all
  Linear output;
  std::vector<Linear> gates;  // gate and up: two matrices, or one with the rows of both
  bool gelu;                  // the gate: gelu, otherwise silu
  Linear down;
  int64_t heads, key_heads, width;  // numbers of a head
  Rotation rotation;
  float scale;  // of scores

  int64_t inputs() const { return output.rows(); }
  int64_t projected() const { return inputs() * (of_embedding.weight ? 2 : 1); }  // inputs of the projections
  int64_t hidden() const { return down.inputs(); }
};

// The addresses of a head's numbers (batch, head, position). Those of a vector are contiguous, and so are vectors.
struct Heads {
  float* first;
  int64_t batch_stride, head_stride;
};

// The positions of vectors x (batch, length, inputs): a sequence's first one has position `offset`, less its padding.
struct Positions {
  int64_t batch, length, offset;
  const int32_t* padding = nullptr;  // (batch), or none
  int64_t count() const { return batch * length; }
};

// Writes the queries (batch, heads, length, width), keys and values (batch, key_heads, length, width) of x. Queries and
// keys are normed, if the block does so, and rotated. embedded (batch, length, inputs): of a draft head.
void project(const Block& block, const Positions& at, const float* x, Heads queries, Heads keys, Heads values,
             const float* embedded = nullptr);

// y (batch, length, inputs) = the block's result for x, when `attention` reads these queries, keys and values.
void finish(const Block& block, const gearbx_attention& attention, const float* x, const float* queries,
            const float* keys, const float* values, float* y);

// The keys and values of a KV cache, (batch, key_heads, room, width) each.
struct Entries {
  float *keys, *values;
  int64_t room;
};

// Attention of x over the entries before it and its own. The callers add mask, padding and planes.
gearbx_attention attention_over(const Block& block, const Positions& at, int64_t room, bool causal);

// y (batch, length, inputs) = the block's result for x, whose keys and values are written into the entries. embedded:
// as for project.
void run_block(const Block& block, const Positions& at, const gearbx_attention& attention, const Entries& entries,
               const float* x, float* y, const float* embedded = nullptr);

// y (vectors, columns) = the norm of each vector of x; y may be x.
void norm(const Norm& by, const float* x, int64_t vectors, int64_t columns, float* y);

// y (vectors, rows) = x times the transposed matrix, plus the bias.
void multiply(const Linear& linear, const float* x, int64_t vectors, float* y);

}  // namespace gearbx
