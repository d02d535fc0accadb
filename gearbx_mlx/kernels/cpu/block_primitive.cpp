// Transformer blocks as operations of MLX's graph: one for a whole block, or two, with a KV cache of any kind between.

#include <nanobind/stl/pair.h>

#include "attention_inputs.h"
#include "block_program.h"
#include "kv_planes_inputs.h"
#include "mlx/stream.h"
#include "watched.h"

namespace gearbx {
namespace {

constexpr char KEPT[] = "gearbx_kept";

gearbx_attention attention_form(const Block& block, const Positions& at, int64_t keys, bool causal) {
  gearbx_attention form = {};
  form.batch = at.batch;
  form.heads = block.heads;
  form.shared = block.heads / block.key_heads;
  form.length = at.length;
  form.keys = keys;
  form.width = block.width;
  form.scale = block.scale;
  form.causal = causal;
  return form;
}

// What operations of a block share: the block, and that its memory stays until the operation has run.
class BlockOperation : public Operation {
 public:
  BlockOperation(mx::Stream s, std::shared_ptr<const BlockProgram> program, Kept kept, int64_t offset, bool causal)
      : Operation(s), program_(std::move(program)), kept_(std::make_shared<Kept>(std::move(kept))), offset_(offset),
        causal_(causal) {}

  bool is_equivalent(const mx::Primitive&) const override { return false; }

 protected:
  const Block& block() const { return program_->block(); }
  Positions positions(const mx::array& x, const int32_t* padding) const {
    return {x.shape(0), x.shape(1), offset_, padding};
  }

  // Runs run(x, y) on the stream; nothing that it reads is freed before.
  template <class Run>
  void start(const std::vector<mx::array>& inputs, mx::array& y, Run run) {
    dispatch(inputs, y, [run, program = program_, kept = kept_](const float* x, float* to) { run(x, to); });
  }

  std::shared_ptr<const BlockProgram> program_;
  std::shared_ptr<Kept> kept_;
  int64_t offset_;
  bool causal_;
};

// A whole block. Inputs: x, keys, values (of the KV cache, with room), the arrays of nested keys and values if there are
// some, and what hides keys. Outputs: y, and the keys and values with those of x.
class WholeBlock : public BlockOperation {
 public:
  WholeBlock(mx::Stream s, std::shared_ptr<const BlockProgram> program, Kept kept, int64_t offset, bool causal,
             KVPlanesForm planes)
      : BlockOperation(s, std::move(program), std::move(kept), offset, causal), planes_(planes) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Positions at = positions(inputs[0], padding_of(inputs, 3 + planes_.arrays()));
    const int64_t room = inputs[1].shape(2), width = block().width, shared = block().key_heads * room * width;
    gearbx_attention form = attention_form(block(), at, at.offset + at.length, causal_);
    for (auto* strides : {form.key_strides, form.value_strides}) strides[0] = shared, strides[1] = room * width;
    form.key_strides[2] = form.value_strides[2] = form.query_strides[2] = width;
    form.query_strides[1] = at.length * width;
    form.query_strides[0] = block().heads * at.length * width;
    planes_.take(inputs, 3, form);
    take_hidden(inputs, 3 + planes_.arrays(), form);
    let_go(inputs, outputs);
    const Entries keys(inputs[1], outputs[1], stream()), values(inputs[2], outputs[2], stream());
    start(inputs, outputs[0], [=, &b = block()](const float* x, float* y) {
      keys.copy();
      values.copy();
      const int64_t head = room * width, first = at.offset * width;
      std::vector<float> queries(static_cast<size_t>(at.count() * b.heads * width));
      project(b, at, x, {queries.data(), form.query_strides[0], form.query_strides[1]},
              {keys.to + first, shared, head}, {values.to + first, shared, head});
      finish(b, form, x, queries.data(), keys.to, values.to, y);
    });
  }

  const char* name() const override { return "GearbxBlock"; }

 private:
  // Every output has the inputs, although the operation runs once: they are let go but by one, so that it can be seen
  // whether somebody else has them.
  static void let_go(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    for (mx::array& out : outputs)
      if (&out.inputs() != &inputs && !out.is_tracer()) out.inputs().clear();
  }

  // The entries of a cache before and after. They are written in place, if nobody else has them: as in MLX's own
  // slice updates. This waits for an operation that still has to read them: to wait is faster than to copy.
  struct Entries {
    Entries(const mx::array& in, mx::array& out, mx::Stream s) {
      if (!in.is_donatable()) mx::synchronize(s);
      if (in.is_donatable() && in.flags().row_contiguous) {
        out.copy_shared_buffer(in);
      } else {
        out.set_data(mx::allocator::malloc(out.nbytes()));
        from.emplace(in);
        count = in.size();
      }
      to = out.data<float>();
    }

    void copy() const {
      std::vector<float> rows;
      if (from) std::memcpy(to, from->read(rows), count * sizeof(float));
    }

    std::optional<Rows> from;  // none: they are in place
    size_t count = 0;
    float* to;
  };

  KVPlanesForm planes_;
};

// The first half. Inputs: x, and the padding if there is some. Output: queries, keys and values (batch,
// heads + 2 key_heads, length, width).
class BlockHeads : public BlockOperation {
 public:
  using BlockOperation::BlockOperation;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Positions at = positions(inputs[0], padding_of(inputs, 1));
    start(inputs, outputs[0], [=, &b = block()](const float* x, float* y) {
      const int64_t head = at.length * b.width, batch = (b.heads + 2 * b.key_heads) * head;
      float* keys = y + b.heads * head;
      project(b, at, x, {y, batch, head}, {keys, batch, head}, {keys + b.key_heads * head, batch, head});
    });
  }

  const char* name() const override { return "GearbxBlockHeads"; }
};

// The second half. Inputs: x, the output of the first half, the keys and values to read, the arrays of nested keys and
// values if there are some, and what hides keys.
class BlockRest : public BlockOperation {
 public:
  BlockRest(mx::Stream s, std::shared_ptr<const BlockProgram> program, Kept kept, bool causal, KVPlanesForm planes)
      : BlockOperation(s, std::move(program), std::move(kept), 0, causal), planes_(planes) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Positions at = positions(inputs[0], nullptr);
    const int64_t seen = std::max<int64_t>(inputs[2].shape(2), planes_.packed);
    gearbx_attention form = attention_form(block(), at, seen, causal_);
    planes_.take(inputs, 4, form);
    take_hidden(inputs, 4 + planes_.arrays(), form);
    const int64_t head = at.length * block().width;
    form.query_strides[0] = (block().heads + 2 * block().key_heads) * head;
    form.query_strides[1] = head;
    form.query_strides[2] = block().width;
    const Vectors keys(inputs[2], form.key_strides), values(inputs[3], form.value_strides);
    start(inputs, outputs[0], [=, &b = block(), queries = inputs[1].data<float>()](const float* x, float* y) {
      std::vector<float> copies[2];
      finish(b, form, x, queries, keys.read(copies[0]), values.read(copies[1]), y);
    });
  }

  const char* name() const override { return "GearbxBlockRest"; }

 private:
  KVPlanesForm planes_;
};

void check_vectors(const Block& block, const mx::array& x) {
  require(x.ndim() == 3 && x.size() > 0 && x.dtype() == mx::float32, "x must be float32 (batch, length, inputs)");
  require(x.shape(2) == block.inputs(), "x and the block differ in width");
}

void check_entries(const Block& block, const mx::array& x, const mx::array& keys, const mx::array& values) {
  for (const auto* a : {&keys, &values})
    require(a->ndim() == 4 && a->dtype() == mx::float32 && a->shape(0) == x.shape(0) &&
                a->shape(1) == block.key_heads && a->shape(3) == block.width,
            "keys and values must be float32 (batch, heads, positions, width)");
  require(keys.shape(2) == values.shape(2), "keys and values differ in length");
}

mx::Shape scores_of(const Block& block, const mx::array& x, int64_t keys) {
  return {x.shape(0), static_cast<int>(block.heads), x.shape(1), static_cast<int>(keys)};
}

// y, after writing the keys and values of x into the arrays of the cache. None if memory was given up.
std::optional<mx::array> run_whole(const nb::capsule& block_program, const mx::array& x, mx::array& keys,
                                   mx::array& values, int64_t offset, bool causal,
                                   const std::optional<mx::array>& mask, const std::optional<mx::array>& padding,
                                   const Arrays& key_planes, const Arrays& value_planes, int64_t packed,
                                   int64_t group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const Program& program = from_capsule<Program>(BLOCK, block_program);
  auto kept = program->keep();
  if (!kept) return std::nullopt;
  const Block& block = program->block();
  check_vectors(block, x);
  check_entries(block, x, keys, values);
  require(offset >= 0 && offset + x.shape(1) <= keys.shape(2), "the cache has no room for x");
  require(!padding || !packed, "keys and values of a padded batch are in no planes");
  require(packed <= offset && packed % 16 == 0, "a multiple of 16 positions before x must be packed");
  std::vector<mx::array> inputs = {x, keys, values};
  KVPlanesForm planes;
  if (packed) planes = add_kv_planes(key_planes, value_planes, packed, group, keys.shape(), block.width, inputs, s);
  add_hidden(mask, padding, scores_of(block, x, offset + x.shape(1)), inputs, s);
  auto operation = std::make_shared<WholeBlock>(s, program, std::move(*kept), offset, causal, planes);
  auto made = mx::array::make_arrays({x.shape(), keys.shape(), values.shape()},
                                     {mx::float32, mx::float32, mx::float32}, operation, inputs);
  keys.overwrite_descriptor(made[1]);
  values.overwrite_descriptor(made[2]);
  return made[0];
}

// The output of the first half, and the memory for the second one: between the two, a gearbox may give it up.
std::optional<std::pair<mx::array, nb::capsule>> run_heads(const nb::capsule& block_program, const mx::array& x,
                                                           int64_t offset,
                                                           const std::optional<mx::array>& padding) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const Program& program = from_capsule<Program>(BLOCK, block_program);
  auto kept = program->keep();
  if (!kept) return std::nullopt;
  const Block& block = program->block();
  check_vectors(block, x);
  const mx::Shape shape = {x.shape(0), static_cast<int>(block.heads + 2 * block.key_heads), x.shape(1),
                           static_cast<int>(block.width)};
  std::vector<mx::array> inputs = {x};
  add_padding(padding, x.shape(0), inputs, s);
  const auto operation = std::make_shared<BlockHeads>(s, program, *kept, offset, false);
  return std::pair(mx::array(shape, mx::float32, operation, std::move(inputs)), in_capsule(KEPT, std::move(*kept)));
}

mx::array run_rest(const nb::capsule& block_program, const nb::capsule& kept, const mx::array& x,
                   const mx::array& heads, const mx::array& keys, const mx::array& values, bool causal,
                   const std::optional<mx::array>& mask, const std::optional<mx::array>& padding,
                   const Arrays& key_planes, const Arrays& value_planes, int64_t packed, int64_t group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const Program& program = from_capsule<Program>(BLOCK, block_program);
  const Block& block = program->block();
  check_vectors(block, x);
  check_entries(block, x, keys, values);
  const int64_t seen = std::max<int64_t>(keys.shape(2), packed);
  require(!padding || !packed, "keys and values of a padded batch are in no planes");
  require(!causal || seen >= x.shape(1), "causal attention needs at least as many keys as queries");
  std::vector<mx::array> inputs = {x, heads, keys, values};
  KVPlanesForm planes;
  if (packed) planes = add_kv_planes(key_planes, value_planes, packed, group, keys.shape(), block.width, inputs, s);
  add_hidden(mask, padding, scores_of(block, x, seen), inputs, s);
  auto operation = std::make_shared<BlockRest>(s, program, from_capsule<Kept>(KEPT, kept), causal, planes);
  return mx::array(x.shape(), mx::float32, operation, std::move(inputs));
}

}  // namespace

void bind_blocks(nb::module_& m) {
  bind_block_parts(m);
  m.def("run_block", &run_whole, "block"_a, "x"_a, "keys"_a, "values"_a, "offset"_a, "causal"_a,
        "mask"_a = nb::none(), "padding"_a = nb::none(), "key_planes"_a = Arrays(), "value_planes"_a = Arrays(),
        "packed"_a = 0, "group"_a = 0);
  m.def("run_block_heads", &run_heads, "block"_a, "x"_a, "offset"_a, "padding"_a = nb::none());
  m.def("run_block_rest", &run_rest, "block"_a, "kept"_a, "x"_a, "heads"_a, "keys"_a, "values"_a, "causal"_a,
        "mask"_a = nb::none(), "padding"_a = nb::none(), "key_planes"_a = Arrays(), "value_planes"_a = Arrays(),
        "packed"_a = 0, "group"_a = 0);
  bind_watched(m);
}

}  // namespace gearbx
