// Attention as an operation of MLX's graph.

#include <nanobind/stl/optional.h>

#include <optional>

#include "attention_inputs.h"

namespace gearbx {
namespace {

// Inputs: queries, keys, values; and the mask, if there is one, in the shape of the scores.
class Attention : public Operation {
 public:
  Attention(mx::Stream s, float scale, bool causal) : Operation(s), scale_(scale), causal_(causal) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array &q = inputs[0], &k = inputs[1];
    gearbx_attention form = {};
    form.batch = q.shape(0);
    form.heads = q.shape(1);
    form.shared = q.shape(1) / k.shape(1);
    form.length = q.shape(2);
    form.keys = k.shape(2);
    form.width = q.shape(3);
    form.scale = scale_;
    form.causal = causal_;
    if (inputs.size() > 3) take_mask(inputs[3], form);
    const Vectors queries(q, form.query_strides), keys(k, form.key_strides), values(inputs[2], form.value_strides);
    enqueue(inputs, outputs[0], [=](float* y) {
      std::vector<float> copies[3];
      gearbx_attend(&form, queries.read(copies[0]), keys.read(copies[1]), values.read(copies[2]), y);
    });
  }

  const char* name() const override { return "GearbxAttention"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Attention&>(other);
    return scale_ == o.scale_ && causal_ == o.causal_;
  }

 private:
  float scale_;
  bool causal_;
};

mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale, bool causal,
                    const std::optional<mx::array>& mask) {
  const auto s = mx::default_stream(mx::Device::cpu);
  for (const auto* a : {&queries, &keys, &values})
    require(a->ndim() == 4 && a->size() > 0 && a->dtype() == mx::float32,
            "queries, keys and values must be float32 (batch, heads, positions, width)");
  require(keys.shape() == values.shape() && keys.shape(0) == queries.shape(0) && keys.shape(3) == queries.shape(3),
          "queries, keys and values have shapes that do not fit");
  require(queries.shape(1) % keys.shape(1) == 0, "the heads of queries must be a multiple of the heads of keys");
  require(!causal || keys.shape(2) >= queries.shape(2), "causal attention needs at least as many keys as queries");
  std::vector<mx::array> inputs = {queries, keys, values};
  if (mask) {
    require(mask->dtype() == mx::bool_, "the mask must be bool");
    inputs.push_back(mx::broadcast_to(*mask, {queries.shape(0), queries.shape(1), queries.shape(2), keys.shape(2)}, s));
  }
  return output(queries.shape(), queries.shape(3), std::make_shared<Attention>(s, scale, causal), std::move(inputs));
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention", &attention, "queries"_a, "keys"_a, "values"_a, "scale"_a, "causal"_a,
        "mask"_a = nb::none());
}

}  // namespace gearbx
