// A block with the memory that it reads, assembled from norms and linear layers that Python passes on in capsules.

#pragma once

#include <optional>

#include "block.h"
#include "graph.h"

namespace gearbx {

constexpr char LINEAR[] = "gearbx_linear", NORM[] = "gearbx_norm", BLOCK[] = "gearbx_block";

using Memory = std::vector<std::weak_ptr<mx::array::Data>>;
using Kept = std::vector<std::shared_ptr<mx::array::Data>>;

// Records the memory of an array that a block reads in place.
inline const mx::array& note(const mx::array& a, Memory& memory) {
  require(a.is_available() && a.flags().row_contiguous, "a block's arrays must be evaluated and contiguous");
  memory.push_back(a.data_shared_ptr());
  return a;
}

// The memory, or null if some of it was offloaded.
inline std::optional<Kept> locked(const Memory& memory) {
  Kept kept;
  kept.reserve(memory.size());
  for (const auto& weak : memory) {
    kept.push_back(weak.lock());
    if (!kept.back()) return std::nullopt;
  }
  return kept;
}

// A linear layer or norm of a block, with the memory that it reads. Blocks do not keep memory, so that a gearbox can
// free it.
template <class Value>
struct Part {
  Value value;
  Memory memory;
};
typedef Part<Linear> LinearPart;
typedef Part<Norm> NormPart;

// Parts of a block: norms and linear layers, in capsules.
struct BlockParts {
  nb::capsule before_attention;
  std::vector<nb::capsule> projections;
  nb::capsule output, before_mlp;
  std::vector<nb::capsule> gates;
  nb::capsule down;
  std::optional<nb::capsule> after_attention, after_mlp, of_queries, of_keys, of_embedding;
};

struct Sizes {
  int heads, key_heads;
  bool gelu, traditional;
  float rotation_scale, scale;
};

class BlockProgram {
 public:
  // Throws std::invalid_argument if the parts do not fit each other.
  BlockProgram(const BlockParts& parts, const Sizes& sizes, const mx::array& frequencies)
      : frequencies_(frequencies) {
    block_.before_attention = norm(parts.before_attention);
    block_.before_mlp = norm(parts.before_mlp);
    block_.after_attention = norm(parts.after_attention);
    block_.after_mlp = norm(parts.after_mlp);
    block_.of_queries = norm(parts.of_queries);
    block_.of_keys = norm(parts.of_keys);
    block_.of_embedding = norm(parts.of_embedding);
    for (const auto& part : parts.projections) block_.projections.push_back(linear(part));
    for (const auto& part : parts.gates) block_.gates.push_back(linear(part));
    block_.output = linear(parts.output);
    block_.down = linear(parts.down);
    const auto [heads, key_heads, gelu, traditional, rotation_scale, scale] = sizes;
    block_.gelu = gelu;
    require(heads > 0 && key_heads > 0 && heads % key_heads == 0, "heads must be a multiple of the heads of keys");
    block_.heads = heads;
    block_.key_heads = key_heads;
    block_.width = block_.output.inputs() / heads;
    block_.scale = scale;
    require(frequencies.dtype() == mx::float32 && frequencies.ndim() == 1, "frequencies must be a float32 vector");
    block_.rotation = {note(frequencies, memory_).data<float>(), 2 * frequencies.shape(0), traditional, rotation_scale};
    check();
  }

  const Block& block() const { return block_; }

  // The memory, or null if some of it was offloaded.
  std::optional<Kept> keep() const { return locked(memory_); }

 private:
  template <class Value>
  const Value& take(const Part<Value>& part) {
    memory_.insert(memory_.end(), part.memory.begin(), part.memory.end());
    return part.value;
  }
  const Linear& linear(const nb::capsule& part) { return take(from_capsule<LinearPart>(LINEAR, part)); }
  const Norm& norm(const nb::capsule& part) { return take(from_capsule<NormPart>(NORM, part)); }
  Norm norm(const std::optional<nb::capsule>& part) { return part ? norm(*part) : Norm{}; }

  void check() const {
    const Block& b = block_;
    require(b.width * b.heads == b.output.inputs() && b.rotation.dims <= b.width, "heads and the output do not fit");
    require((b.projections.size() == 1 || b.projections.size() == 3) &&
                rows_of(b.projections) == b.width * (b.heads + 2 * b.key_heads),
            "projections and heads do not fit");
    require((b.gates.size() == 1 || b.gates.size() == 2) && rows_of(b.gates) == 2 * b.hidden(), "gates do not fit");
    for (const Linear& part : b.projections) require(part.inputs() == b.projected(), "a matrix and x differ in width");
    for (const Linear& part : b.gates) require(part.inputs() == b.inputs(), "a matrix and x differ in width");
    require(b.down.rows() == b.inputs(), "the last matrix must have as many rows as x has columns");
  }

  Block block_{};
  Memory memory_;
  mx::array frequencies_;  // kept: no gear changes them
};

typedef std::shared_ptr<const BlockProgram> Program;

// Blocks in sequence, with the norm after the last one if any.
struct Chain {
  std::vector<Program> blocks;
  NormPart norm;

  int64_t inputs() const { return blocks.front()->block().inputs(); }

  // As BlockProgram::keep, for all of them.
  std::optional<Kept> keep() const {
    Kept kept;
    const auto add = [&](std::optional<Kept> more) {
      if (more) kept.insert(kept.end(), more->begin(), more->end());
      return more.has_value();
    };
    for (const Program& block : blocks)
      if (!add(block->keep())) return std::nullopt;
    return add(locked(norm.memory)) ? std::optional(kept) : std::nullopt;
  }
};

constexpr char CHAIN[] = "gearbx_chain";

// Adds passes over a few tokens (pass_primitive.cpp).
void bind_passes(nb::module_& m);

}  // namespace gearbx
