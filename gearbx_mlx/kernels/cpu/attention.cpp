// Attention over blocks of queries and spans of keys, without the matrix of all scores.
//
// A query's softmax is computed for each span separately, and then spans are merged in order. Spans start at multiples
// of SPAN behind the padding, so that this order is the same for a query in prefill, in decoding and in a batch.

#include "attention.h"

#include <cstring>
#include <memory>
#include <vector>

#include "attention_span.h"
#include "pool.h"

namespace gearbx {
namespace {

constexpr int64_t MAX_PIECES = 1 << 15;
constexpr int64_t WORTH_SHARING = 1 << 17;  // multiplications; waking a thread takes as long as fewer

struct Job {
  const gearbx_attention& form;
  const float *queries, *keys, *values;
  float* y;
  int64_t key_heads, blocks, spans;  // key_heads of the whole batch; blocks of queries of each; spans of keys
  int64_t pieces;
  Sums parts;  // for each key head and span, if threads share the spans too
};

Block block_of(const Job& job, int64_t key_head, int64_t block) {
  const gearbx_attention& f = job.form;
  const int64_t heads = f.heads / f.shared, batch = key_head / heads, head = key_head % heads;
  const int64_t first = block * BLOCK, count = std::min(BLOCK, f.shared * f.length - first);
  const int64_t padding = f.padding ? std::clamp<int64_t>(f.padding[batch], 0, f.keys) : 0;
  const float* keys = job.keys + batch * f.key_strides[0] + head * f.key_strides[1] + padding * f.key_strides[2];
  const int64_t* strides = f.value_strides;
  const float* values = job.values + batch * strides[0] + head * strides[1] + padding * strides[2];
  return {f, batch, head, first, count, padding, f.keys - padding, job.queries, keys, values};
}

// total += part, for each query.
void merge(const Sums& part, int64_t queries, int64_t wide, const Sums& total) {
  for (int64_t row = 0; row < queries; row++) {
    const Softmax& one = part.softmax[row];
    Softmax& both = total.softmax[row];
    if (!one.any) continue;
    const float highest = std::max(one.highest, both.highest);
    float factors[LANES] = {both.highest - highest, one.highest - highest};
    store(factors, exponential(load(factors)));
    const Floats kept = all(factors[0]), added = all(factors[1]);
    const auto add = [&](const float* from, float* to, int64_t count) {
      for (int64_t i = 0; i < count; i += LANES)
        store(to + i, multiply_add(load(from + i), added, load(to + i) * kept));
    };
    add(one.sums, both.sums, PARTS);
    add(part.values + row * wide, total.values + row * wide, wide);
    both.highest = highest;
    both.any = true;
  }
}

// The result of a query that sees no key; zeros if all keys are padding.
void mean_of_values(const Block& block, float* y) {
  const gearbx_attention& f = block.form;
  std::fill_n(y, f.width, 0.0f);
  std::vector<float> value(static_cast<size_t>(round_up(f.width)));
  for (int64_t key = 0; key < block.count_keys; key++) {
    read_rows(block, f.value_planes, block.values, f.value_strides[2], key, 1, value.data());
    for (int64_t i = 0; i < f.width; i++) y[i] += value[static_cast<size_t>(i)];
  }
  const float count = static_cast<float>(std::max<int64_t>(block.count_keys, 1));
  for (int64_t i = 0; i < f.width; i++) y[i] /= count;
}

void write(const Block& block, const Sums& total, float* all_y) {
  const gearbx_attention& f = block.form;
  for (int64_t row = 0; row < block.count; row++) {
    float* y = all_y + ((block.batch * f.heads + block.head(row)) * f.length + block.position(row)) * f.width;
    const float* sums = total.softmax[row].sums;
    const float factor = 1.0f / sum8(add8(load8(sums), load8(sums + 8)));
    const float* values = total.values + row * round_up(f.width);
    for (int64_t i = 0; i < f.width; i++) y[i] = values[i] * factor;
    if (!total.softmax[row].any) mean_of_values(block, y);
  }
}

// One block of queries over all spans, in the order of `sums_of`.
template <class SumsOf>
void attend_block(const Job& job, const Block& block, SumsOf sums_of) {
  static thread_local Softmax softmax[BLOCK];
  static thread_local Buffer<float> memory;
  const int64_t wide = round_up(job.form.width);
  const Sums total = {softmax, memory.room_for(BLOCK * wide)};
  std::fill_n(total.softmax, block.count, Softmax());
  std::fill_n(total.values, block.count * wide, 0.0f);
  for (int64_t span = 0; span < job.spans; span++) merge(sums_of(span), block.count, wide, total);
  write(block, total, job.y);
}

Space& space_for(const Block& block) {
  static thread_local Space space;
  space.prepare(round_up(block.form.width));
  scale_queries(block, space);
  return space;
}

// Blocks of queries, the last ones first: they see the most keys.
void attend_blocks(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  static thread_local Softmax softmax[BLOCK];
  static thread_local Buffer<float> memory;
  const Sums part = {softmax, memory.room_for(BLOCK * round_up(job.form.width))};
  const int64_t all = job.key_heads * job.blocks;
  for (int64_t i = piece * all / job.pieces; i < (piece + 1) * all / job.pieces; i++) {
    const Block block = block_of(job, i % job.key_heads, job.blocks - 1 - i / job.key_heads);
    Space& space = space_for(block);
    attend_block(job, block, [&](int64_t span) {
      attend_span(block, span * SPAN, space, part);
      return part;
    });
  }
}

// The sums of a key head's only block over a span.
Sums part_of(const Job& job, int64_t key_head, int64_t span) {
  const int64_t first = (key_head * job.spans + span) * job.form.shared * job.form.length;
  return {job.parts.softmax + first, job.parts.values + first * round_up(job.form.width)};
}

void attend_spans(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t key_head = piece / job.spans, span = piece % job.spans;
  const Block block = block_of(job, key_head, 0);
  attend_span(block, span * SPAN, space_for(block), part_of(job, key_head, span));
}

void merge_spans(const void* context, int key_head) {
  const Job& job = *static_cast<const Job*>(context);
  attend_block(job, block_of(job, key_head, 0), [&](int64_t span) { return part_of(job, key_head, span); });
}

// Few queries over many keys: threads share the spans too.
void attend_few(Job& job) {
  static thread_local std::unique_ptr<Softmax[]> softmax;
  static thread_local int64_t held = 0;
  static thread_local Buffer<float> memory;
  const int64_t count = job.key_heads * job.spans * job.form.shared * job.form.length;
  if (count > held) softmax = std::make_unique<Softmax[]>(static_cast<size_t>(held = count));
  job.parts = {softmax.get(), memory.room_for(count * round_up(job.form.width))};
  share_out(static_cast<int>(job.key_heads * job.spans), attend_spans, &job);
  share_out(static_cast<int>(job.key_heads), merge_spans, &job);
}

// Whether a mask, shared by all heads, hides exactly the padding and the keys that a causal mask hides.
bool is_causal(const gearbx_attention& f) {
  if (f.mask_strides[1] || f.mask_strides[3] != 1 || f.keys < f.length) return false;
  for (int64_t batch = 0; batch < f.batch; batch++)
    for (int64_t i = 0; i < f.length; i++) {
      const int64_t end = f.keys - f.length + i + 1;
      const int64_t first = f.padding ? std::clamp<int64_t>(f.padding[batch], 0, end) : 0;
      const uint8_t* mask = f.mask + batch * f.mask_strides[0] + i * f.mask_strides[2];
      if (std::memchr(mask + first, 0, static_cast<size_t>(end - first))) return false;
      if (std::memchr(mask + end, 1, static_cast<size_t>(f.keys - end))) return false;
    }
  return true;
}

}  // namespace
}  // namespace gearbx

extern "C" void gearbx_attend(const gearbx_attention* given, const float* queries, const float* keys,
                              const float* values, float* y) {
  using namespace gearbx;
  gearbx_attention simplified = *given, *form = &simplified;
  if (form->mask && is_causal(*form)) form->mask = nullptr, form->causal = 1;
  const int64_t key_heads = form->batch * form->heads / form->shared;
  const int64_t blocks = (form->shared * form->length + BLOCK - 1) / BLOCK, spans = (form->keys + SPAN - 1) / SPAN;
  Job job = {*form, queries, keys, values, y, key_heads, blocks, spans, 1, {}};
  const bool shared = form->batch * form->heads * form->length * form->keys * form->width >= WORTH_SHARING;
  const bool few = blocks == 1 && spans > 1 && key_heads < 4 * thread_count() && key_heads * spans < MAX_PIECES;
  if (shared && few && thread_count() > 1) return attend_few(job);
  if (shared) job.pieces = std::min(key_heads * blocks, MAX_PIECES);
  share_out(static_cast<int>(job.pieces), attend_blocks, &job);
}
