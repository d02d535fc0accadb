// Products of mixtures of experts as operations of MLX's graph: mx::gather_mm and mx::gather_qmm for single vectors.

#include "graph.h"

namespace gearbx {
namespace {

// The number of the vector in each pair, after x (..., 1, I) and the indices are broadcast against each other.
std::vector<int32_t> vectors_of_pairs(const mx::Shape& x, const mx::Shape& pairs) {
  int count = 1;
  for (int length : pairs) count *= length;
  std::vector<int32_t> vectors(static_cast<size_t>(count));
  for (int p = 0; p < count; p++) {
    int rest = p, vector = 0, stride = 1;
    for (size_t i = 0; i < pairs.size(); i++) {  // the last dimension first
      const int length = pairs[pairs.size() - 1 - i], own = i < x.size() ? x[x.size() - 1 - i] : 1;
      vector += (own == 1 ? 0 : rest % length) * stride;
      rest /= length;
      stride *= own;
    }
    vectors[static_cast<size_t>(p)] = vector;
  }
  return vectors;
}

// Inputs: x, the weights with what belongs to them, indices.
class Experts : public Operation {
 public:
  Experts(mx::Stream s, std::vector<int32_t> vectors) : Operation(s), vectors_(std::move(vectors)) {}

 protected:
  template <class Matrix, class Product>
  void multiply(const std::vector<mx::array>& inputs, mx::array& out, Matrix first, Product product) {
    dispatch(inputs, out,
             [first, product, experts = inputs[1].shape(0), chosen = inputs.back().data<int32_t>(),
              vectors = vectors_](const float* x, float* y) {
               const gearbx_pairs pairs = {static_cast<int64_t>(vectors.size()), experts, vectors.data(), chosen};
               product(&first, &pairs, x, y);
             });
  }

  std::vector<int32_t> vectors_;
};

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
  using Experts::Experts;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], dense_of(inputs[1]), gearbx_dense_experts);
  }

  const char* name() const override { return "GearbxDenseExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return vectors_ == static_cast<const DenseExperts&>(other).vectors_;
  }
};

// Returns the shape of the pairs, and broadcasts the indices to it.
mx::Shape broadcast(const mx::array& x, mx::array& indices, mx::Stream s) {
  require(x.ndim() >= 2 && x.shape(-2) == 1, "x must be (..., 1, I), with one vector for each index");
  require(mx::issubdtype(indices.dtype(), mx::integer), "indices must be integers");
  const mx::Shape own(x.shape().begin(), x.shape().end() - 2);
  const auto pairs = mx::broadcast_shapes(own, indices.shape());
  require(indices.size() > 0, "there must be at least one index");
  indices = in_rows(mx::astype(mx::broadcast_to(indices, pairs, s), mx::int32, s), s);
  return pairs;
}

mx::array finish(const mx::array& x, mx::Shape pairs, int rows, std::shared_ptr<mx::Primitive> primitive,
                 std::vector<mx::array> inputs) {
  pairs.push_back(1);
  pairs.push_back(x.shape(-1));
  return output(std::move(pairs), rows, std::move(primitive), std::move(inputs));
}

std::vector<int32_t> vectors_of_pairs(const mx::array& x, const mx::Shape& pairs) {
  return vectors_of_pairs(mx::Shape(x.shape().begin(), x.shape().end() - 2), pairs);
}

mx::array stack_experts(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                        const std::vector<mx::array>& biases, const std::vector<int>& widths, int group,
                        mx::array indices, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const StackForm form = {widths, group, x_bits};
  auto inputs = form.inputs(x, weights, scales, biases, 3, s);
  const auto pairs = broadcast(x, indices, s);
  inputs.push_back(indices);
  return finish(x, pairs, scales.shape(1), std::make_shared<StackExperts>(s, vectors_of_pairs(x, pairs), form),
                std::move(inputs));
}

mx::array dense_experts(const mx::array& x, const mx::array& weight, mx::array indices) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 3, "weights must be a matrix for each expert");
  type_of(weight);
  check_x(x, weight.shape(2));
  const auto pairs = broadcast(x, indices, s);
  return finish(x, pairs, weight.shape(1), std::make_shared<DenseExperts>(s, vectors_of_pairs(x, pairs)),
                {in_float32(x, s), in_rows(weight, s), indices});
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("stack_experts", &stack_experts, "x"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a,
        "indices"_a, "x_bits"_a = 0);
  m.def("dense_experts", &dense_experts, "x"_a, "weight"_a, "indices"_a);
}

}  // namespace gearbx
