// Forward passes over a few tokens of one sequence, in one call that returns with the result: embedding, all blocks,
// head. They are no operations of MLX's graph, so that no call waits for a thread. A system may start that thread
// milliseconds late if it assigns it to the core of a polling one.
//
// A draft is a sequence of such passes over one token each. They write to the KV cache behind the entries in use, so
// that no write has to be undone. With draft rescoring, a second head computes the largest few logits again.
//
// A draft head (decoding/heads.py) is a block that reads states beside embeddings: those of the model, fused, for the
// first tokens, then its own. It may have output rows for some tokens only.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "block_program.h"
#include "simd.h"

namespace gearbx {
namespace {

// A drafted token, the entropy (bits) of its distribution, and its margin: the loss of logit until a second token wins.
using Following = std::tuple<int64_t, float, float>;

constexpr char PASSES[] = "gearbx_passes", DRAFT_HEAD[] = "gearbx_draft_head";
constexpr int64_t RESCORE_TOP_K = 4;  // with more, other tokens hardly ever win

template <class T>
void widen(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) to[i] = to_float(from[i]);
}

void look_up(const gearbx_dense& table, int64_t row, float* to) {
  const int64_t n = table.columns, at = row * n;
  if (table.type == GEARBX_BFLOAT16) return widen(static_cast<const Bf16*>(table.weights) + at, n, to);
  if (table.type == GEARBX_FLOAT16) return widen(static_cast<const Fp16*>(table.weights) + at, n, to);
  widen(static_cast<const float*>(table.weights) + at, n, to);
}

// The parts of a draft head beside its block and output rows: the layer that fuses the model's hidden states; the token
// of each row, none if there is a row per token; the number of tokens.
struct DraftHead {
  LinearPart fuse;
  std::vector<int64_t> tokens;
  int64_t vocabulary;
};

// Running passes. They keep their inputs, and must not outlive the entries that they write.
class Passes {
 public:
  Passes(std::shared_ptr<const Chain> chain, Linear head, std::optional<Linear> second,
         std::shared_ptr<const DraftHead> draft_head, Kept kept, std::vector<Entries> entries)
      : chain_(std::move(chain)),
        head_(head),
        second_(second),
        draft_head_(std::move(draft_head)),
        kept_(std::move(kept)),
        entries_(std::move(entries)) {}

  int64_t inputs() const { return chain_->inputs(); }
  int64_t vocabulary() const { return draft_head_ ? draft_head_->vocabulary : head_.rows(); }
  const DraftHead* draft_head() const { return draft_head_.get(); }
  int64_t room() const { return entries_.front().room; }
  int blocks() const { return static_cast<int>(entries_.size()); }

  // Memory for the embedding's rows to read next (count, inputs).
  float* rows(int64_t count) {
    for (auto* each : {&x_, &y_}) each->resize(static_cast<size_t>(count * inputs()));
    return x_.data();
  }

  // Takes the model's hidden states before the next rows, (count, inputs of the fusing layer).
  void fuse(const float* states, int64_t count) {
    states_.resize(static_cast<size_t>(count * inputs()));
    multiply(draft_head_->fuse.value, states, count, states_.data());
  }

  // The number of rows whose states a draft head has.
  int64_t fused() const { return static_cast<int64_t>(states_.size()) / inputs(); }

  // Logits (count, vocabulary) after these rows, the first of which is at `offset`. hidden (taps, count, inputs): the
  // outputs of the blocks with these numbers, from 1.
  void run(int64_t count, int64_t offset, float* logits, const std::vector<int>& taps, float* hidden) {
    float* outputs = run_blocks(count, offset, taps, hidden);
    if (chain_->norm.value.weight) norm(chain_->norm.value, outputs, count, inputs(), outputs);
    multiply(head_, outputs, count, logits);
  }

  // The outputs of all blocks (count, inputs), not normed.
  float* run_blocks(int64_t count, int64_t offset, const std::vector<int>& taps = {}, float* hidden = nullptr) {
    const Positions at = {1, count, offset};
    const float* embedded = draft_head_ ? x_.data() : nullptr;
    float *from = draft_head_ ? states_.data() : x_.data(), *to = y_.data();
    for (size_t i = 0; i < entries_.size(); i++, std::swap(from, to)) {
      const Block& block = chain_->blocks[i]->block();
      run_block(block, at, attention_over(block, at, entries_[i].room, count > 1), entries_[i], from, to, embedded);
      for (size_t tap = 0; tap < taps.size(); tap++)
        if (taps[tap] == static_cast<int>(i) + 1)
          std::copy_n(to, count * inputs(), hidden + static_cast<int64_t>(tap) * count * inputs());
    }
    return from;
  }

  // Logits of a draft (vocabulary) after the last of these rows.
  void draft(int64_t count, int64_t offset, float* logits) {
    float* state = run_blocks(count, offset) + (count - 1) * inputs();
    if (draft_head_) states_.assign(state, state + inputs());
    if (chain_->norm.value.weight) norm(chain_->norm.value, state, 1, inputs(), state);
    if (draft_head_ && !draft_head_->tokens.empty()) {
      again_.resize(draft_head_->tokens.size());
      multiply(head_, state, 1, again_.data());
      std::fill_n(logits, vocabulary(), -INFINITY);
      for (size_t row = 0; row < again_.size(); row++) logits[draft_head_->tokens[row]] = again_[row];
    } else {
      multiply(head_, state, 1, logits);
    }
    if (second_) rescore(state, logits);
  }

  // The token after these rows from choose(logits, vocabulary, margin), the entropy (bits) of all tokens, and the
  // margin. A draft head has no entropy.
  template <class Choose>
  Following next(int64_t count, int64_t offset, const Choose& choose) {
    logits_.resize(static_cast<size_t>(vocabulary()));
    draft(count, offset, logits_.data());
    float bits = NAN, margin = INFINITY;
    if (!draft_head_) gearbx_entropy_bits(logits_.data(), 1, vocabulary(), &bits);
    const int64_t token = choose(logits_.data(), vocabulary(), &margin);
    return {token, bits, margin};
  }

 private:
  // Computes the largest few logits again, from the input of the head.
  void rescore(const float* state, float* logits) {
    int64_t best[RESCORE_TOP_K];
    const int64_t count = std::min(RESCORE_TOP_K, vocabulary()), at_once = rows_at_once(*second_);
    gearbx_largest(logits, vocabulary(), static_cast<int>(count), best);
    again_.resize(static_cast<size_t>(at_once));
    for (const int64_t* token = best; token < best + count; token++) {
      const int64_t first = *token / at_once * at_once;
      multiply(some_rows(*second_, first, at_once), state, 1, again_.data());
      logits[*token] = again_[static_cast<size_t>(*token - first)];
    }
  }

  std::shared_ptr<const Chain> chain_;
  Linear head_;
  std::optional<Linear> second_;
  std::shared_ptr<const DraftHead> draft_head_;  // null: passes of a model
  Kept kept_;
  std::vector<Entries> entries_;
  std::vector<float> x_, y_, states_, logits_, again_;  // states_: of a draft head, before the next rows
};

// The memory of a cache's entries; null if an array has a second owner, since then it must not be written in place.
std::optional<Entries> entries_of(mx::array& keys, mx::array& values) {
  for (mx::array* a : {&keys, &values}) {
    a->eval();
    if (!a->is_donatable() || !a->flags().row_contiguous) return std::nullopt;
  }
  return Entries{keys.data<float>(), values.data<float>(), keys.shape(2)};
}

nb::capsule make_draft_head(const nb::capsule& fuse, const std::vector<int64_t>& tokens, int64_t vocabulary) {
  for (const int64_t token : tokens) require(token >= 0 && token < vocabulary, "no such token");
  const DraftHead made = {from_capsule<LinearPart>(LINEAR, fuse), tokens, vocabulary};
  return in_capsule<std::shared_ptr<const DraftHead>>(DRAFT_HEAD, std::make_shared<const DraftHead>(made));
}

// Null if memory was offloaded, or other arrays share the cache's entries. `second_of`: the head for draft rescoring.
std::optional<nb::capsule> begin(const nb::capsule& chain_of, const nb::capsule& head_of,
                                 const std::vector<mx::array*>& keys, const std::vector<mx::array*>& values,
                                 const std::optional<nb::capsule>& second_of,
                                 const std::optional<nb::capsule>& draft_head_of) {
  const auto& chain = from_capsule<std::shared_ptr<const Chain>>(CHAIN, chain_of);
  const auto& head = from_capsule<LinearPart>(LINEAR, head_of);
  auto kept = chain->keep(), of_head = locked(head.memory);
  if (!kept || !of_head) return std::nullopt;
  kept->insert(kept->end(), of_head->begin(), of_head->end());
  std::optional<Linear> second;
  if (second_of) {
    const auto& part = from_capsule<LinearPart>(LINEAR, *second_of);
    require(part.value.inputs() == head.value.inputs() && part.value.rows() == head.value.rows(),
            "the two heads differ in shape");
    if (const auto memory = locked(part.memory)) {
      kept->insert(kept->end(), memory->begin(), memory->end());
      second = part.value;
    }
  }
  std::shared_ptr<const DraftHead> draft_head;
  if (draft_head_of) {
    draft_head = from_capsule<std::shared_ptr<const DraftHead>>(DRAFT_HEAD, *draft_head_of);
    const auto memory = locked(draft_head->fuse.memory);
    if (!memory) return std::nullopt;
    kept->insert(kept->end(), memory->begin(), memory->end());
    require(chain->blocks.size() == 1 && draft_head->fuse.value.rows() == chain->inputs(),
            "the layer does not fuse for this block");
    const size_t rows = draft_head->tokens.size();
    require(head.value.rows() == (rows ? static_cast<int64_t>(rows) : draft_head->vocabulary),
            "each row of the head needs a token");
  }
  for (const auto& block : chain->blocks)
    require(!block->block().of_embedding.weight == !draft_head, "only a draft head's block reads embeddings");
  require(head.value.inputs() == chain->inputs(), "the blocks and the head differ in width");
  require(keys.size() == chain->blocks.size() && values.size() == keys.size(), "each block needs keys and values");
  std::vector<Entries> entries;
  for (size_t i = 0; i < keys.size(); i++) {
    const Block& block = chain->blocks[i]->block();
    for (const mx::array* a : {keys[i], values[i]})
      require(a->dtype() == mx::float32 && a->ndim() == 4 && a->shape(0) == 1 && a->shape(1) == block.key_heads &&
                  a->shape(3) == block.width && a->shape(2) == keys[0]->shape(2),
              "keys and values must be float32 (1, heads, positions, width)");
    const auto here = entries_of(*keys[i], *values[i]);
    if (!here) return std::nullopt;
    entries.push_back(*here);
  }
  return in_capsule(PASSES, Passes(chain, head.value, second, draft_head, std::move(*kept), std::move(entries)));
}

// Passes over the embeddings of these tokens. table: a row per token.
Passes& looked_up(const nb::capsule& passes_of, mx::array& table, const std::vector<int64_t>& tokens, int64_t offset) {
  auto& passes = const_cast<Passes&>(from_capsule<Passes>(PASSES, passes_of));
  const auto count = static_cast<int64_t>(tokens.size());
  require(table.ndim() == 2 && table.shape(1) == passes.inputs(), "the embedding and the blocks differ in width");
  require(count > 0 && offset >= 0 && offset + count <= passes.room(), "the cache has no room");
  require(!passes.draft_head() || passes.fused() == count, "a draft head needs a state for each token");
  table.eval();
  require(table.flags().row_contiguous, "the rows of the embedding must be contiguous");
  float* to = passes.rows(count);
  for (const int64_t token : tokens) {
    require(token >= 0 && token < table.shape(0), "no such token");
    look_up(dense_of(table), token, to);
    to += passes.inputs();
  }
  return passes;
}

// Gives a draft head the model's hidden states (count, taps x inputs) before the next tokens.
void fuse(const nb::capsule& passes_of, mx::array& states) {
  auto& passes = const_cast<Passes&>(from_capsule<Passes>(PASSES, passes_of));
  require(passes.draft_head(), "these passes read no states");
  states.eval();
  require(states.ndim() == 2 && states.dtype() == mx::float32 && states.flags().row_contiguous &&
              states.shape(1) == passes.draft_head()->fuse.value.inputs(),
          "states must be contiguous, float32 (count, inputs)");
  const nb::gil_scoped_release released;
  passes.fuse(states.data<float>(), states.shape(0));
}

Following best(const nb::capsule& passes_of, mx::array& table, const std::vector<int64_t>& tokens, int64_t offset) {
  Passes& passes = looked_up(passes_of, table, tokens, offset);
  const nb::gil_scoped_release released;
  const auto read = static_cast<int64_t>(tokens.size());
  return passes.next(read, offset, [](const float* logits, int64_t count, float* margin) {
    int64_t best[2];
    gearbx_largest(logits, count, count > 1 ? 2 : 1, best);
    if (count > 1) *margin = logits[best[0]] - logits[best[1]];
    return best[0];
  });
}

Following sampled(const nb::capsule& passes_of, mx::array& table, const std::vector<int64_t>& tokens, int64_t offset,
                  float temp, float top_p, float min_p, int top_k, uint32_t first, uint32_t second) {
  Passes& passes = looked_up(passes_of, table, tokens, offset);
  require(temp > 0, "the temperature must be above 0");
  const gearbx_sampling how = {temp, top_p, min_p, top_k, {first, second}};
  const nb::gil_scoped_release released;
  const auto read = static_cast<int64_t>(tokens.size());
  return passes.next(read, offset, [&](const float* logits, int64_t count, float* margin) {
    return gearbx_sampled(logits, count, &how, margin);
  });
}

mx::array floats(const mx::Shape& shape) {
  size_t size = sizeof(float);
  for (const int each : shape) size *= static_cast<size_t>(each);
  return mx::array(mx::allocator::malloc(size), shape, mx::float32);
}

mx::array draft_logits(const nb::capsule& passes_of, mx::array& table, const std::vector<int64_t>& tokens,
                       int64_t offset) {
  Passes& passes = looked_up(passes_of, table, tokens, offset);
  auto made = floats({1, static_cast<int>(passes.vocabulary())});
  const nb::gil_scoped_release released;
  passes.draft(static_cast<int64_t>(tokens.size()), offset, made.data<float>());
  return made;
}

std::pair<mx::array, mx::array> logits(const nb::capsule& passes_of, mx::array& table,
                                       const std::vector<int64_t>& tokens, int64_t offset,
                                       const std::vector<int>& taps) {
  Passes& passes = looked_up(passes_of, table, tokens, offset);
  require(!passes.draft_head(), "a draft head only drafts");
  for (const int tap : taps) require(tap >= 1 && tap <= passes.blocks(), "no such block");
  const int count = static_cast<int>(tokens.size()), inputs = static_cast<int>(passes.inputs());
  auto made = floats({1, count, static_cast<int>(passes.vocabulary())});
  auto hidden = floats({static_cast<int>(taps.size()), count, inputs});
  const nb::gil_scoped_release released;
  passes.run(count, offset, made.data<float>(), taps, hidden.data<float>());
  return {made, hidden};
}

}  // namespace

void bind_passes(nb::module_& m) {
  m.def("begin_passes", &begin, "chain"_a, "head"_a, "keys"_a, "values"_a, "second"_a = nb::none(),
        "draft_head"_a = nb::none());
  m.def("draft_head", &make_draft_head, "fuse"_a, "tokens"_a, "vocabulary"_a);
  m.def("fuse_states", &fuse, "passes"_a, "states"_a);
  m.def("best_token", &best, "passes"_a, "table"_a, "tokens"_a, "offset"_a);
  m.def("sampled_token", &sampled, "passes"_a, "table"_a, "tokens"_a, "offset"_a, "temp"_a, "top_p"_a, "min_p"_a,
        "top_k"_a, "first"_a, "second"_a);
  m.def("draft_logits", &draft_logits, "passes"_a, "table"_a, "tokens"_a, "offset"_a);
  m.def("pass_logits", &logits, "passes"_a, "table"_a, "tokens"_a, "offset"_a, "taps"_a);
}

}  // namespace gearbx
