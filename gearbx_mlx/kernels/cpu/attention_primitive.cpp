// Attention as an operation of MLX's graph.

#include "attention_inputs.h"
#include "kv_planes.h"
#include "pool.h"

namespace gearbx {
namespace {

// Inputs: queries, keys, values; the arrays of nested keys and values, if any; the mask in the shape of the scores, and
// the padding, if any.
class Attention : public Operation {
 public:
  Attention(mx::Stream s, float scale, bool causal, KVPlanesForm planes)
      : Operation(s), scale_(scale), causal_(causal), planes_(planes) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array &q = inputs[0], &k = inputs[1];
    gearbx_attention form = {};
    form.batch = q.shape(0);
    form.heads = q.shape(1);
    form.shared = q.shape(1) / k.shape(1);
    form.length = q.shape(2);
    form.keys = std::max<int64_t>(k.shape(2), planes_.packed);
    form.width = q.shape(3);
    form.scale = scale_;
    form.causal = causal_;
    planes_.take(inputs, 3, form);
    take_hidden(inputs, 3 + planes_.arrays(), form);
    const Vectors queries(q, form.query_strides), keys(k, form.key_strides), values(inputs[2], form.value_strides);
    enqueue(inputs, outputs[0], [=](float* y) {
      std::vector<float> copies[3];
      gearbx_attend(&form, queries.read(copies[0]), keys.read(copies[1]), values.read(copies[2]), y);
    });
  }

  const char* name() const override { return "GearbxAttention"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Attention&>(other);
    return scale_ == o.scale_ && causal_ == o.causal_ && planes_ == o.planes_;
  }

 private:
  float scale_;
  bool causal_;
  KVPlanesForm planes_;
};

void check_attention(const mx::array& queries, const mx::array& keys, const mx::array& values, int64_t seen,
                     bool causal) {
  for (const auto* a : {&queries, &keys, &values})
    require(a->ndim() == 4 && a->size() > 0 && a->dtype() == mx::float32,
            "queries, keys and values must be float32 (batch, heads, positions, width)");
  require(keys.shape() == values.shape() && keys.shape(0) == queries.shape(0) && keys.shape(3) == queries.shape(3),
          "queries, keys and values have shapes that do not fit");
  require(queries.shape(1) % keys.shape(1) == 0, "the heads of queries must be a multiple of the heads of keys");
  require(!causal || seen >= queries.shape(2), "causal attention needs at least as many keys as queries");
}

mx::array attend(Arrays inputs, KVPlanesForm planes, int64_t seen, float scale, bool causal,
                 const std::optional<mx::array>& mask, const std::optional<mx::array>& padding, mx::Stream s) {
  const mx::Shape shape = inputs[0].shape();
  add_hidden(mask, padding, {shape[0], shape[1], shape[2], static_cast<int>(seen)}, inputs, s);
  return output(shape, shape[3], std::make_shared<Attention>(s, scale, causal, planes), std::move(inputs));
}

mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale, bool causal,
                    const std::optional<mx::array>& mask, const std::optional<mx::array>& padding) {
  const auto s = mx::default_stream(mx::Device::cpu);
  check_attention(queries, keys, values, keys.shape(2), causal);
  return attend({queries, keys, values}, {}, keys.shape(2), scale, causal, mask, padding, s);
}

// Attention over keys and values of which the first `packed` are read from planes. `keys` and `values` have all
// positions; packed ones are not read. If all are packed, they are any arrays (batch, key heads, 1, width).
mx::array nested_attention(const mx::array& queries, const mx::array& keys, const mx::array& values,
                           const Arrays& key_planes, const Arrays& value_planes, int64_t packed, int64_t group,
                           float scale, bool causal, const std::optional<mx::array>& mask) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const int64_t seen = std::max<int64_t>(keys.shape(2), packed);
  check_attention(queries, keys, values, seen, causal);
  require(packed == seen || packed % 16 == 0, "a multiple of 16 positions must be packed, or all");
  Arrays inputs = {queries, keys, values};
  const KVPlanesForm planes =
      add_kv_planes(key_planes, value_planes, packed, group, keys.shape(), queries.shape(3), inputs, s);
  return attend(std::move(inputs), planes, seen, scale, causal, mask, std::nullopt, s);
}

constexpr int64_t VECTORS = 256;  // per piece of work

void pack_all(const KVRows& rows, const PackedKV& to) {
  const struct Job {
    const KVRows& rows;
    const PackedKV& to;
  } job = {rows, to};
  const auto work = [](const void* context, int piece) {
    const Job& j = *static_cast<const Job*>(context);
    const int64_t first = piece * VECTORS;
    pack_vectors(j.rows, first, std::min(first + VECTORS, j.rows.count), j.to);
  };
  share_out(static_cast<int>((rows.count + VECTORS - 1) / VECTORS), work, &job);
}

// Inputs: vectors. Outputs: one plane or two, scales, offsets.
class PackKV : public Operation {
 public:
  PackKV(mx::Stream s, int64_t group) : Operation(s), group_(group) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const size_t planes = outputs.size() - 2;
    for (size_t i = 1; i < outputs.size(); i++) outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
    const mx::array& x = inputs[0];
    KVRows rows = {nullptr, {}, x.shape(1), x.shape(2), 0, x.shape(3), group_};
    rows.count = static_cast<int64_t>(x.size()) / rows.width;
    const Vectors vectors(x, rows.strides);
    const PackedKV to = {nullptr, planes > 1 ? outputs[1].data<uint32_t>() : nullptr, outputs[planes].data<float>(),
                         outputs[planes + 1].data<float>()};
    enqueue<uint32_t>(inputs, outputs[0], [=](uint32_t* coarse) {
      std::vector<float> copy;
      KVRows from = rows;
      from.first = vectors.read(copy);
      pack_all(from, {coarse, to.fine, to.scales, to.offsets});
    });
  }

  const char* name() const override { return "GearbxPackKV"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return group_ == static_cast<const PackKV&>(other).group_;
  }

 private:
  int64_t group_;
};

// The planes, scales and offsets of vectors (batch, heads, positions, width).
Arrays pack_kv(const mx::array& vectors, int planes, int64_t group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(vectors.ndim() == 4 && vectors.size() > 0 && vectors.dtype() == mx::float32,
          "keys and values must be float32 (batch, heads, positions, width)");
  require(planes == 1 || planes == 2, "there must be one plane or two");
  require(group > 0 && group % 8 == 0 && vectors.shape(3) % group == 0, "groups must divide a vector");
  mx::Shape codes = vectors.shape(), groups = vectors.shape();
  codes.back() /= 8;
  groups.back() /= static_cast<int>(group);
  std::vector<mx::Shape> shapes(static_cast<size_t>(planes), codes);
  std::vector<mx::Dtype> types(static_cast<size_t>(planes), mx::uint32);
  shapes.insert(shapes.end(), 2, groups);
  types.insert(types.end(), 2, mx::float32);
  return mx::array::make_arrays(shapes, types, std::make_shared<PackKV>(s, group), {vectors});
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention", &attention, "queries"_a, "keys"_a, "values"_a, "scale"_a, "causal"_a,
        "mask"_a = nb::none(), "padding"_a = nb::none());
  m.def("nested_attention", &nested_attention, "queries"_a, "keys"_a, "values"_a, "key_planes"_a, "value_planes"_a,
        "packed"_a, "group"_a, "scale"_a, "causal"_a, "mask"_a = nb::none());
  m.def("pack_kv", &pack_kv, "vectors"_a, "planes"_a, "group"_a);
}

}  // namespace gearbx
