// Products over exact weights, and the weights themselves, as operations of MLX's graph.

#include "exact_form.h"
#include "experts.h"

namespace gearbx {
namespace {

// Inputs: x, the exact matrix.
class ExactMatvec : public Operation {
 public:
  ExactMatvec(mx::Stream s, ExactForm form) : Operation(s), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs[0], [m = form_.matrix(inputs, 1), n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_exact_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxExactMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return form_ == static_cast<const ExactMatvec&>(other).form_;
  }

 private:
  ExactForm form_;
};

// Inputs: x, the exact matrices, indices.
class ExactExperts : public Experts {
 public:
  ExactExperts(mx::Stream s, std::vector<int32_t> vectors, ExactForm form)
      : Experts(s, std::move(vectors)), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], form_.matrix(inputs, 1), gearbx_exact_experts);
  }

  const char* name() const override { return "GearbxExactExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const ExactExperts&>(other);
    return form_ == o.form_ && vectors_ == o.vectors_;
  }

 private:
  ExactForm form_;
};

// Inputs: the exact matrix, or one for each expert.
class ExactDecode : public Operation {
 public:
  ExactDecode(mx::Stream s, ExactForm form) : Operation(s), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    gearbx_exact m = form_.matrix(inputs, 0);
    m.rows = static_cast<int64_t>(outputs[0].size()) / m.columns;  // all experts' rows follow each other
    enqueue<uint16_t>(inputs, outputs[0], [m](uint16_t* y) { gearbx_exact_decode(&m, y); });
  }

  const char* name() const override { return "GearbxExactDecode"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return form_ == static_cast<const ExactDecode&>(other).form_;
  }

 private:
  ExactForm form_;
};

mx::array exact_matvec(const mx::array& x, const mx::array& codes, const mx::array& scales, const mx::array& biases,
                       const mx::array& low, const mx::array& high, const mx::array& offsets, int group,
                       int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const ExactForm form(group, x_bits, scales, low);
  auto inputs = form.inputs(codes, scales, biases, low, high, offsets, 2, s);
  check_x(x, form.columns(scales));
  inputs.insert(inputs.begin(), in_float32(x, s));
  return output(x.shape(), form.rows(scales), std::make_shared<ExactMatvec>(s, form), std::move(inputs));
}

mx::array exact_experts(const mx::array& x, const mx::array& codes, const mx::array& scales, const mx::array& biases,
                        const mx::array& low, const mx::array& high, const mx::array& offsets, int group,
                        mx::array indices, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const ExactForm form(group, x_bits, scales, low);
  auto inputs = form.inputs(codes, scales, biases, low, high, offsets, 3, s);
  check_x(x, static_cast<int64_t>(scales.shape(2)) * group);
  const auto pairs = broadcast(x, indices, s);
  inputs.insert(inputs.begin(), in_float32(x, s));
  inputs.push_back(indices);
  return finish(x, pairs, scales.shape(1), std::make_shared<ExactExperts>(s, vectors_of_pairs(x, pairs), form),
                std::move(inputs));
}

mx::array exact_decode(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                       const mx::array& low, const mx::array& high, const mx::array& offsets, int group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const ExactForm form(group, 0, scales, low);
  auto inputs = form.inputs(codes, scales, biases, low, high, offsets, low.ndim() == 3 ? 3 : 2, s);
  auto shape = low.shape();
  shape.back() = form.columns(scales);
  return mx::array(shape, mx::bfloat16, std::make_shared<ExactDecode>(s, form), std::move(inputs));
}

}  // namespace

void bind_exact(nb::module_& m) {
  m.def("exact_matvec", &exact_matvec, "x"_a, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "group"_a, "x_bits"_a = 0);
  m.def("exact_experts", &exact_experts, "x"_a, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "group"_a, "indices"_a, "x_bits"_a = 0);
  m.def("exact_decode", &exact_decode, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a, "group"_a);
}

}  // namespace gearbx
