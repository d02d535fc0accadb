// Transformer blocks as operations of MLX's graph: one for a whole block, or two with any kind of KV cache in between.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "attention_inputs.h"
#include "block_program.h"
#include "exact_form.h"
#include "graph.h"
#include "mlx/stream.h"

namespace gearbx {
namespace {

// Norms and linear layers as parts of a block, and blocks of them.

// A linear layer, whose matrix `matrix_of` makes after a check that these arrays can be read in place.
template <class MatrixOf>
nb::capsule linear_part(const std::vector<mx::array>& arrays, const std::optional<mx::array>& bias,
                        const MatrixOf& matrix_of) {
  LinearPart made;
  for (const mx::array& a : arrays) note(a, made.memory);
  made.value.matrix = matrix_of();
  if (bias) {
    require(bias->ndim() == 1 && bias->shape(0) == made.value.rows(), "a bias must have a number for each row");
    made.value.bias = note(*bias, made.memory).data<void>();
    made.value.bias_type = type_of(*bias);
  }
  return in_capsule(LINEAR, std::move(made));
}

nb::capsule stack_part(const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const std::vector<int>& widths, int group, int rest,
                       int x_bits, const std::optional<mx::array>& bias) {
  const auto s = mx::default_stream(mx::Device::cpu);
  StackForm form(widths, group, rest, x_bits, scales);
  const auto x = mx::broadcast_to(mx::array(0.0f), {1, form.columns(scales)}, s);
  const auto inputs = form.inputs(x, weights, scales, biases, 2, s);
  return linear_part({inputs.begin() + 1, inputs.end()}, bias, [&] { return form.matrix(inputs); });
}

nb::capsule symmetric_part(const mx::array& weight, const mx::array& scales, int inputs, int bits, int x_bits,
                           const std::optional<mx::array>& bias) {
  check_symmetric(weight, scales, inputs, bits, x_bits);
  return linear_part({weight, scales}, bias, [&] { return symmetric_of(weight, scales, inputs, bits, x_bits); });
}

nb::capsule dense_part(const mx::array& weight, const std::optional<mx::array>& bias, int x_bits) {
  require(weight.ndim() == 2, "weights must be a matrix");
  check_x_bits(x_bits);
  return linear_part({weight}, bias, [&] { return dense_of(weight, x_bits); });
}

nb::capsule exact_part(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                       const mx::array& low, const mx::array& high, const mx::array& offsets, int group,
                       const std::optional<mx::array>& bias, int x_bits) {
  const ExactForm form(group, x_bits, scales, low);
  const auto s = mx::default_stream(mx::Device::cpu);
  const auto inputs = form.inputs(codes, scales, biases, low, high, offsets, 2, s);
  return linear_part(inputs, bias, [&] { return form.matrix(inputs, 0); });
}

nb::capsule norm_part(const mx::array& weight, float eps, bool plus_one) {
  require(weight.ndim() == 1, "the weight of a norm must be a vector");
  NormPart made;
  made.value = {note(weight, made.memory).data<void>(), type_of(weight), eps, plus_one};
  return in_capsule(NORM, std::move(made));
}

nb::capsule make_block(nb::capsule before_attention, std::vector<nb::capsule> projections, nb::capsule output,
                       nb::capsule before_mlp, std::vector<nb::capsule> gates, nb::capsule down,
                       std::optional<nb::capsule> after_attention, std::optional<nb::capsule> after_mlp,
                       std::optional<nb::capsule> of_queries, std::optional<nb::capsule> of_keys,
                       std::optional<nb::capsule> of_embedding, int heads, int key_heads,
                       const mx::array& frequencies, bool gelu, bool traditional, float rotation_scale, float scale) {
  const BlockParts parts = {before_attention, projections, output,     before_mlp, gates,       down,
                            after_attention,  after_mlp,   of_queries, of_keys,    of_embedding};
  const Sizes sizes = {heads, key_heads, gelu, traditional, rotation_scale, scale};
  return in_capsule<Program>(BLOCK, std::make_shared<const BlockProgram>(parts, sizes, frequencies));
}

nb::capsule make_chain(const std::vector<nb::capsule>& blocks, const std::optional<nb::capsule>& norm) {
  require(!blocks.empty(), "a chain needs at least one block");
  auto chain = std::make_shared<Chain>();
  for (const nb::capsule& block : blocks) chain->blocks.push_back(from_capsule<Program>(BLOCK, block));
  for (const Program& block : chain->blocks)
    require(block->block().inputs() == chain->inputs(), "blocks differ in width");
  if (norm) chain->norm = from_capsule<NormPart>(NORM, *norm);
  return in_capsule<std::shared_ptr<const Chain>>(CHAIN, std::move(chain));
}

// Blocks as operations.

constexpr char KEPT[] = "gearbx_kept";

// Runs run(x, y) on the stream of an operation, and keeps its inputs until then.
class OverMemory : public Operation {
 public:
  OverMemory(mx::Stream s, Kept kept, int64_t offset, bool causal)
      : Operation(s), kept_(std::make_shared<Kept>(std::move(kept))), offset_(offset), causal_(causal) {}

  bool is_equivalent(const mx::Primitive&) const override { return false; }

 protected:
  Positions positions(const mx::array& x, const int32_t* padding) const {
    return {x.shape(0), x.shape(1), offset_, padding};
  }

  template <class Program, class Run>
  void start(const std::vector<mx::array>& inputs, mx::array& y, const Program& program, Run run) {
    dispatch(inputs, y, [run, program, kept = kept_](const float* x, float* to) { run(x, to); });
  }

  std::shared_ptr<Kept> kept_;
  int64_t offset_;
  bool causal_;
};

// Whole blocks in sequence. Inputs: x; for each block the keys and values of the KV cache, with room. Then come
// nested arrays, if the only block has some; mask and padding. Outputs: y; for each block the keys and values
// including x's.
class WholeBlocks : public OverMemory {
 public:
  WholeBlocks(mx::Stream s, std::shared_ptr<const Chain> chain, Kept kept, int64_t offset, bool causal,
              KVPlanesForm planes)
      : OverMemory(s, std::move(kept), offset, causal), chain_(std::move(chain)), planes_(planes) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const size_t count = chain_->blocks.size(), others = 1 + 2 * count;
    const Positions at = positions(inputs[0], padding_of(inputs, others + planes_.arrays()));
    let_go(inputs, outputs);
    const auto layers = std::make_shared<std::vector<Layer>>();
    layers->reserve(count);
    for (size_t i = 0; i < count; i++) {
      const mx::array &keys = inputs[1 + 2 * i], &values = inputs[2 + 2 * i];
      gearbx_attention form = attention_over(chain_->blocks[i]->block(), at, keys.shape(2), causal_);
      planes_.take(inputs, others, form);
      take_hidden(inputs, others + planes_.arrays(), form);
      layers->push_back({form, keys.shape(2), {keys, outputs[1 + 2 * i], stream()}, {values, outputs[2 + 2 * i], stream()}});
    }
    start(inputs, outputs[0], chain_, [at, layers, &chain = *chain_](const float* x, float* y) {
      static thread_local std::vector<float> between;
      between.resize(static_cast<size_t>(at.count() * chain.inputs()));
      for (size_t i = 0; i < layers->size(); i++, x = between.data()) {
        const Layer& layer = (*layers)[i];
        layer.keys.copy();
        layer.values.copy();
        float* to = i + 1 == layers->size() ? y : between.data();
        run_block(chain.blocks[i]->block(), at, layer.attention, {layer.keys.to, layer.values.to, layer.room}, x, to);
      }
      if (chain.norm.value.weight) norm(chain.norm.value, y, at.count(), chain.inputs(), y);
    });
  }

  const char* name() const override { return "GearbxBlocks"; }

 private:
  // MLX gives the inputs to every output, although the operation runs once. All but one release them, so that sharing
  // of the arrays can be detected.
  static void let_go(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    for (mx::array& out : outputs)
      if (&out.inputs() != &inputs && !out.is_tracer()) out.inputs().clear();
  }

  // A cache's entries before and after. They are written in place if no other array shares them, as in MLX's slice
  // updates. This waits for an operation that still has to read them, because waiting is faster than copying.
  struct Written {
    Written(const mx::array& in, mx::array& out, mx::Stream s) {
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

    std::optional<Rows> from;  // empty if they are in place
    size_t count = 0;
    float* to;
  };

  struct Layer {
    gearbx_attention attention;
    int64_t room;
    Written keys, values;
  };

  std::shared_ptr<const Chain> chain_;
  KVPlanesForm planes_;
};

// The first half. Inputs: x, and the padding if there is some. Output: queries, keys and values (batch,
// heads + 2 key_heads, length, width).
class BlockHeads : public OverMemory {
 public:
  BlockHeads(mx::Stream s, Program program, Kept kept, int64_t offset)
      : OverMemory(s, std::move(kept), offset, false), program_(std::move(program)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Positions at = positions(inputs[0], padding_of(inputs, 1));
    start(inputs, outputs[0], program_, [=, &b = program_->block()](const float* x, float* y) {
      const int64_t head = at.length * b.width, batch = (b.heads + 2 * b.key_heads) * head;
      float* keys = y + b.heads * head;
      project(b, at, x, {y, batch, head}, {keys, batch, head}, {keys + b.key_heads * head, batch, head});
    });
  }

  const char* name() const override { return "GearbxBlockHeads"; }

 private:
  Program program_;
};

// The second half. Inputs: x, the output of the first half, the keys and values to read, the arrays of nested keys and
// values if any, mask and padding.
class BlockRest : public OverMemory {
 public:
  BlockRest(mx::Stream s, Program program, Kept kept, bool causal, KVPlanesForm planes)
      : OverMemory(s, std::move(kept), 0, causal), program_(std::move(program)), planes_(planes) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Positions at = positions(inputs[0], nullptr);
    const int64_t seen = std::max<int64_t>(inputs[2].shape(2), planes_.packed);
    const Block& block = program_->block();
    gearbx_attention form = attention_over(block, at, seen, causal_);
    form.keys = seen;
    form.query_strides[0] = (block.heads + 2 * block.key_heads) * at.length * block.width;  // keys, values between
    planes_.take(inputs, 4, form);
    take_hidden(inputs, 4 + planes_.arrays(), form);
    const Vectors keys(inputs[2], form.key_strides), values(inputs[3], form.value_strides);
    start(inputs, outputs[0], program_, [=, &b = block, queries = inputs[1].data<float>()](const float* x, float* y) {
      std::vector<float> copies[2];
      finish(b, form, x, queries, keys.read(copies[0]), values.read(copies[1]), y);
    });
  }

  const char* name() const override { return "GearbxBlockRest"; }

 private:
  Program program_;
  KVPlanesForm planes_;
};

void check_vectors(const Block& block, const mx::array& x) {
  require(x.ndim() == 3 && x.size() > 0 && x.dtype() == mx::float32, "x must be float32 (batch, length, inputs)");
  require(x.shape(2) == block.inputs() && !block.of_embedding.weight, "x and the block differ in width");
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

// y, after writing the keys and values of x into the arrays of the caches. Null if memory was offloaded.
std::optional<mx::array> run_blocks(const nb::capsule& chain_of, const mx::array& x, const std::vector<mx::array*>& keys,
                                    const std::vector<mx::array*>& values, int64_t offset, bool causal,
                                    const std::optional<mx::array>& mask, const std::optional<mx::array>& padding,
                                    const Arrays& key_planes, const Arrays& value_planes, int64_t packed,
                                    int64_t group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const auto& chain = from_capsule<std::shared_ptr<const Chain>>(CHAIN, chain_of);
  auto kept = chain->keep();
  if (!kept) return std::nullopt;
  const size_t count = chain->blocks.size();
  require(keys.size() == count && values.size() == count, "each block needs keys and values");
  require(!padding || !packed, "a padded batch cannot have planes");
  require(packed <= offset && packed % 16 == 0, "a multiple of 16 positions before x must be packed");
  require(!packed || count == 1, "only a single block may have planes");
  const Block& first = chain->blocks.front()->block();
  check_vectors(first, x);
  std::vector<mx::array> inputs = {x};
  std::vector<mx::Shape> shapes = {x.shape()};
  for (size_t i = 0; i < count; i++) {
    check_entries(chain->blocks[i]->block(), x, *keys[i], *values[i]);
    require(offset >= 0 && offset + x.shape(1) <= keys[i]->shape(2), "the cache has no room for x");
    for (const mx::array* entries : {keys[i], values[i]}) {
      inputs.push_back(*entries);
      shapes.push_back(entries->shape());
    }
  }
  KVPlanesForm planes;
  if (packed)
    planes = add_kv_planes(key_planes, value_planes, packed, group, keys[0]->shape(), first.width, inputs, s);
  add_hidden(mask, padding, scores_of(first, x, offset + x.shape(1)), inputs, s);
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  auto operation = std::make_shared<WholeBlocks>(s, chain, std::move(*kept), offset, causal, planes);
  auto made = mx::array::make_arrays(std::move(shapes), types, operation, inputs);
  for (size_t i = 0; i < count; i++) {
    keys[i]->overwrite_descriptor(made[1 + 2 * i]);
    values[i]->overwrite_descriptor(made[2 + 2 * i]);
  }
  return made[0];
}

// The output of the first half, and the second half's memory. A gearbox may offload it in between.
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
  const auto operation = std::make_shared<BlockHeads>(s, program, *kept, offset);
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
  require(!padding || !packed, "a padded batch cannot have planes");
  require(!causal || seen >= x.shape(1), "causal attention needs at least as many keys as queries");
  std::vector<mx::array> inputs = {x, heads, keys, values};
  KVPlanesForm planes;
  if (packed) planes = add_kv_planes(key_planes, value_planes, packed, group, keys.shape(), block.width, inputs, s);
  add_hidden(mask, padding, scores_of(block, x, seen), inputs, s);
  auto operation = std::make_shared<BlockRest>(s, program, from_capsule<Kept>(KEPT, kept), causal, planes);
  return mx::array(x.shape(), mx::float32, operation, std::move(inputs));
}

// A block is assembled once for the modules and arrays of a layer; a shift, an adapter or a user may replace these.
// Checking all of them takes Python a tenth of a millisecond per token, and this code microseconds.

constexpr char WATCHED[] = "gearbx_watched";

// The attributes of a block's modules.
constexpr const char* SETTINGS[] = {"eps",   "dims",    "base",       "scale", "traditional",
                                    "n_heads", "n_kv_heads", "bits", "group_size", "x_bits"};

// A module's state when this was made: its settings, its items, and theirs. It keeps only settings alive: an object is
// accessed only after it was found in its owner.
class Watched {
 public:
  explicit Watched(nb::handle root) { add(root, -1, nb::none()); }

  bool is_same(nb::handle root) const {
    std::vector<nb::handle> now(seen_.size());
    for (size_t i = 0; i < seen_.size(); i++) {
      const Seen& was = seen_[i];
      now[i] = i == 0 ? root : item(now[static_cast<size_t>(was.owner)], was);
      if (now[i].ptr() != was.object || Py_TYPE(now[i].ptr()) != was.type) return false;
      if (was.is_array && !was.array.is_same(now[i])) return false;
      if (was.count >= 0 && size(now[i]) != was.count) return false;
      if (was.attributes >= 0 && !has_settings(now[i], was)) return false;
    }
    return true;
  }

  bool has_tracer() const { return has_tracer_; }

 private:
  // The memory of an array, and its layout.
  struct Array {
    const void* first = nullptr;  // null: not computed yet
    mx::Shape shape;
    mx::Strides strides;

    Array() = default;
    explicit Array(nb::handle h) {
      const mx::array& a = *nb::inst_ptr<mx::array>(h);
      if (!a.is_available()) return;
      first = a.data<char>();
      shape = a.shape();
      strides = a.strides();
    }
    bool is_same(nb::handle h) const {
      const mx::array& a = *nb::inst_ptr<mx::array>(h);
      const bool there = a.is_available();
      return there == (first != nullptr) &&
             (!there || (first == a.data<char>() && shape == a.shape() && strides == a.strides()));
    }
  };

  struct Seen {
    int owner;       // number of its owner
    nb::object key;  // its name or index there
    PyObject* object;
    PyTypeObject* type;
    bool is_array = false;
    Array array = {};
    Py_ssize_t count = -1, attributes = -1;  // of items; of other attributes, -1 without any
    std::vector<std::pair<nb::object, nb::object>> settings = {};  // name and value
  };

  static Py_ssize_t size(nb::handle h) { return PyDict_Check(h.ptr()) ? PyDict_Size(h.ptr()) : PyList_Size(h.ptr()); }

  static nb::handle item(nb::handle owner, const Seen& seen) {
    if (PyDict_Check(owner.ptr())) return PyDict_GetItem(owner.ptr(), seen.key.ptr());
    const auto index = nb::cast<Py_ssize_t>(seen.key);
    return index < PyList_GET_SIZE(owner.ptr()) ? PyList_GET_ITEM(owner.ptr(), index) : nullptr;
  }

  static nb::object attributes_of(nb::handle object) {
    static PyObject* const name = PyUnicode_InternFromString("__dict__");
    return nb::steal(PyObject_GetAttr(object.ptr(), name));
  }

  static bool has_settings(nb::handle object, const Seen& was) {
    const nb::object attributes = attributes_of(object);
    if (PyDict_GET_SIZE(attributes.ptr()) != was.attributes) return false;  // otherwise none was added
    for (const auto& [name, value] : was.settings) {
      const nb::handle now = PyDict_GetItem(attributes.ptr(), name.ptr());
      if (now.ptr() != value.ptr() && (!now || !now.equal(value))) return false;
    }
    return true;
  }

  static void note_settings(nb::handle object, Seen& seen) {
    if (!nb::hasattr(object, "__dict__")) return;  // a dictionary, no module
    const nb::object attributes = attributes_of(object);
    seen.attributes = PyDict_GET_SIZE(attributes.ptr());
    for (const char* setting : SETTINGS) {
      const nb::object name = nb::steal(PyUnicode_InternFromString(setting));
      if (PyObject* value = PyDict_GetItem(attributes.ptr(), name.ptr()))
        seen.settings.emplace_back(name, nb::borrow(value));
    }
  }

  void add(nb::handle object, int owner, nb::object key) {
    const int number = static_cast<int>(seen_.size());
    Seen seen = {owner, std::move(key), object.ptr(), Py_TYPE(object.ptr())};
    const bool is_dict = PyDict_Check(object.ptr()), is_list = PyList_Check(object.ptr());
    if (nb::isinstance<mx::array>(object)) {
      seen.is_array = true;
      seen.array = Array(object);
      has_tracer_ = has_tracer_ || nb::inst_ptr<mx::array>(object)->is_tracer();
    } else if (is_dict || is_list) {
      seen.count = size(object);
      if (is_dict) note_settings(object, seen);
    }
    seen_.push_back(std::move(seen));
    if (is_dict)
      for (auto [name, value] : nb::borrow<nb::dict>(object)) add(value, number, nb::borrow(name));
    if (is_list)
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object.ptr()); i++)
        add(PyList_GET_ITEM(object.ptr(), i), number, nb::cast(i));
  }

  std::vector<Seen> seen_;
  bool has_tracer_ = false;
};

}  // namespace

void bind_blocks(nb::module_& m) {
  m.def("stack_part", &stack_part, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a, "rest"_a, "x_bits"_a,
        "bias"_a = nb::none());
  m.def("symmetric_part", &symmetric_part, "weight"_a, "scales"_a, "inputs"_a, "bits"_a, "x_bits"_a,
        "bias"_a = nb::none());
  m.def("dense_part", &dense_part, "weight"_a, "bias"_a = nb::none(), "x_bits"_a = 0);
  m.def("exact_part", &exact_part, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a, "group"_a,
        "bias"_a = nb::none(), "x_bits"_a = 0);
  m.def("norm_part", &norm_part, "weight"_a, "eps"_a, "plus_one"_a = false);
  m.def("block", &make_block, nb::kw_only(), "before_attention"_a, "projections"_a, "output"_a, "before_mlp"_a,
        "gates"_a, "down"_a, "after_attention"_a.none(), "after_mlp"_a.none(), "of_queries"_a.none(),
        "of_keys"_a.none(), "of_embedding"_a = nb::none(), "heads"_a, "key_heads"_a, "frequencies"_a, "gelu"_a,
        "traditional"_a, "rotation_scale"_a, "scale"_a);
  m.def("chain", &make_chain, "blocks"_a, "norm"_a = nb::none());
  bind_passes(m);
  m.def("run_blocks", &run_blocks, "chain"_a, "x"_a, "keys"_a, "values"_a, "offset"_a, "causal"_a,
        "mask"_a = nb::none(), "padding"_a = nb::none(), "key_planes"_a = Arrays(), "value_planes"_a = Arrays(),
        "packed"_a = 0, "group"_a = 0);
  m.def("run_block_heads", &run_heads, "block"_a, "x"_a, "offset"_a, "padding"_a = nb::none());
  m.def("run_block_rest", &run_rest, "block"_a, "kept"_a, "x"_a, "heads"_a, "keys"_a, "values"_a, "causal"_a,
        "mask"_a = nb::none(), "padding"_a = nb::none(), "key_planes"_a = Arrays(), "value_planes"_a = Arrays(),
        "packed"_a = 0, "group"_a = 0);
  bind_watched(m);
}

void bind_watched(nb::module_& m) {
  m.def("watched", [](nb::handle module) { return in_capsule(WATCHED, Watched(module)); }, "module"_a);
  m.def("has_tracer", [](nb::handle module) { return Watched(module).has_tracer(); }, "module"_a);
  m.def("is_same", [](const nb::capsule& watched, nb::handle module) {
    return from_capsule<Watched>(WATCHED, watched).is_same(module);
  }, "watched"_a, "module"_a);
}

}  // namespace gearbx
