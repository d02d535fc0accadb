// Greedy drafts of one text: a token's row of the embedding, all blocks, the head, its best token and entropy, in one call
// that returns when they are there. What it writes into the KV cache stands behind the entries that count, so that
// nothing has to be undone. It is no operation of MLX's graph: nobody has to wait for a thread to take it up.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>

#include "block_program.h"
#include "simd.h"

namespace gearbx {
namespace {

constexpr char DRAFT[] = "gearbx_draft";

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

// A draft that has begun. It keeps what it reads, and must not outlive the entries that it writes.
class Draft {
 public:
  Draft(std::shared_ptr<const Chain> chain, Linear head, Kept kept, std::vector<Entries> entries)
      : chain_(std::move(chain)), head_(head), kept_(std::move(kept)), entries_(std::move(entries)),
        x_(static_cast<size_t>(chain_->inputs())), y_(x_.size()), logits_(static_cast<size_t>(head.rows())) {}

  int64_t inputs() const { return chain_->inputs(); }
  int64_t room() const { return entries_.front().room; }

  // Where the row of the embedding goes that is read next.
  float* row() { return x_.data(); }

  // The best token after the one whose row that is, at `offset`, and the entropy (bits) of all.
  std::pair<int64_t, float> next(int64_t offset) {
    const Positions at = {1, 1, offset};
    float *from = x_.data(), *to = y_.data();
    for (size_t i = 0; i < entries_.size(); i++, std::swap(from, to)) {
      const Block& block = chain_->blocks[i]->block();
      run_block(block, at, attention_over(block, at, entries_[i].room, false), entries_[i], from, to);
    }
    if (chain_->norm.value.weight) norm(chain_->norm.value, from, 1, chain_->inputs(), from);
    multiply(head_, from, 1, logits_.data());
    float bits;
    const auto count = static_cast<int64_t>(logits_.size());
    gearbx_entropy_bits(logits_.data(), 1, count, &bits);
    return {std::max_element(logits_.begin(), logits_.end()) - logits_.begin(), bits};
  }

 private:
  std::shared_ptr<const Chain> chain_;
  Linear head_;
  Kept kept_;
  std::vector<Entries> entries_;
  std::vector<float> x_, y_, logits_;
};

// The entries of a cache that nobody else has, where they are; none where a draft must not write.
std::optional<Entries> entries_of(mx::array& keys, mx::array& values) {
  for (mx::array* a : {&keys, &values}) {
    a->eval();
    if (!a->is_donatable() || !a->flags().row_contiguous) return std::nullopt;
  }
  return Entries{keys.data<float>(), values.data<float>(), keys.shape(2)};
}

// None where memory was given up, or somebody else has the entries of a cache too.
std::optional<nb::capsule> begin(const nb::capsule& chain_of, const nb::capsule& head_of,
                                 const std::vector<mx::array*>& keys, const std::vector<mx::array*>& values) {
  const auto& chain = from_capsule<std::shared_ptr<const Chain>>(CHAIN, chain_of);
  const auto& head = from_capsule<LinearPart>(LINEAR, head_of);
  auto kept = chain->keep(), of_head = locked(head.memory);
  if (!kept || !of_head) return std::nullopt;
  kept->insert(kept->end(), of_head->begin(), of_head->end());
  require(head.value.inputs() == chain->inputs(), "the blocks and the head differ in width");
  require(keys.size() == chain->blocks.size() && values.size() == keys.size(), "each block has its keys and values");
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
  return in_capsule(DRAFT, Draft(chain, head.value, std::move(*kept), std::move(entries)));
}

// table: a row for each token.
std::pair<int64_t, float> next(const nb::capsule& draft_of, mx::array& table, int64_t token, int64_t offset) {
  auto& draft = const_cast<Draft&>(from_capsule<Draft>(DRAFT, draft_of));
  require(table.ndim() == 2 && table.shape(1) == draft.inputs(), "the embedding and the blocks differ in width");
  require(token >= 0 && token < table.shape(0), "no such token");
  require(offset >= 0 && offset < draft.room(), "the cache has no room");
  table.eval();
  require(table.flags().row_contiguous, "the rows of the embedding must be contiguous");
  look_up(dense_of(table), token, draft.row());
  const nb::gil_scoped_release released;
  return draft.next(offset);
}

}  // namespace

void bind_drafts(nb::module_& m) {
  m.def("begin_draft", &begin, "chain"_a, "head"_a, "keys"_a, "values"_a);
  m.def("draft_token", &next, "draft"_a, "table"_a, "token"_a, "offset"_a);
}

}  // namespace gearbx
