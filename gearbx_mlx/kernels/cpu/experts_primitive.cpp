// Products of mixtures of experts as operations of MLX's graph: mx::gather_mm and mx::gather_qmm for single vectors.

#include "experts.h"

namespace gearbx {
namespace {

class StackExperts : public Experts {
 public:
  StackExperts(mx::Stream s, std::vector<int32_t> vectors, StackForm form)
      : Experts(s, std::move(vectors)), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], form_.matrix(inputs), gearbx_stack_experts);
  }

  const char* name() const override { return "GearbxStackExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const StackExperts&>(other);
    return form_ == o.form_ && vectors_ == o.vectors_;
  }

 private:
  StackForm form_;
};

class DenseExperts : public Experts {
 public:
  DenseExperts(mx::Stream s, std::vector<int32_t> vectors, int x_bits)
      : Experts(s, std::move(vectors)), x_bits_(x_bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], dense_of(inputs[1], x_bits_), gearbx_dense_experts);
  }

  const char* name() const override { return "GearbxDenseExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const DenseExperts&>(other);
    return vectors_ == o.vectors_ && x_bits_ == o.x_bits_;
  }

 private:
  int x_bits_;
};

mx::array stack_experts(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                        const std::vector<mx::array>& biases, const std::vector<int>& widths, int group,
                        int rest, mx::array indices, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  StackForm form = {widths, group, rest, x_bits};
  auto inputs = form.inputs(x, weights, scales, biases, 3, s);
  const auto pairs = broadcast(x, indices, s);
  inputs.push_back(indices);
  return finish(x, pairs, scales.shape(1), std::make_shared<StackExperts>(s, vectors_of_pairs(x, pairs), form),
                std::move(inputs));
}

mx::array dense_experts(const mx::array& x, const mx::array& weight, mx::array indices, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 3, "weights must be a matrix for each expert");
  type_of(weight);
  check_x_bits(x_bits);
  check_x(x, weight.shape(2));
  const auto pairs = broadcast(x, indices, s);
  return finish(x, pairs, weight.shape(1), std::make_shared<DenseExperts>(s, vectors_of_pairs(x, pairs), x_bits),
                {in_float32(x, s), in_rows(weight, s), indices});
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("stack_experts", &stack_experts, "x"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a,
        "rest"_a, "indices"_a, "x_bits"_a = 0);
  m.def("dense_experts", &dense_experts, "x"_a, "weight"_a, "indices"_a, "x_bits"_a = 0);
}

}  // namespace gearbx
