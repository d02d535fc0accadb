// Products of matrices and vectors as operations of MLX's graph, by name for Python.

#include "graph.h"

namespace gearbx {
namespace {

class StackMatvec : public Operation {
 public:
  StackMatvec(mx::Stream s, StackForm form) : Operation(s), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs[0], [m = form_.matrix(inputs), n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_stack_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxStackMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return form_ == static_cast<const StackMatvec&>(other).form_;
  }

 private:
  StackForm form_;
};

// Inputs: x, weights.
class DenseMatvec : public Operation {
 public:
  using Operation::Operation;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs[0], [m = dense_of(inputs[1]), n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_dense_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxDenseMatvec"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

mx::array stack_matvec(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const std::vector<int>& widths, int group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const StackForm form = {widths, group};
  auto inputs = form.inputs(x, weights, scales, biases, 2, s);
  return output(x.shape(), scales.shape(0), std::make_shared<StackMatvec>(s, form), std::move(inputs));
}

mx::array dense_matvec(const mx::array& x, const mx::array& weight) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 2, "weights are a matrix");
  type_of(weight);
  check_x(x, weight.shape(1));
  return output(x.shape(), weight.shape(0), std::make_shared<DenseMatvec>(s),
                {in_rows_and_float32(x, s), in_rows(weight, s)});
}

// Eager, unlike the products: it is for timing. `words` is evaluated, contiguous uint32.
uint32_t read_sum(const mx::array& words) {
  require(words.dtype() == mx::uint32 && words.is_available() && words.flags().row_contiguous,
          "evaluated uint32 words in a row");
  return gearbx_read_sum(words.data<uint32_t>(), static_cast<int64_t>(words.size()));
}

}  // namespace
}  // namespace gearbx

NB_MODULE(_gearbx_cpu, m) {
  using namespace gearbx;
  m.def("stack_matvec", &stack_matvec, "x"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a);
  m.def("dense_matvec", &dense_matvec, "x"_a, "weight"_a);
  bind_experts(m);
  bind_codebooks(m);
  m.def("read_sum", &read_sum, "words"_a);
  m.def("threads", &gearbx_threads);
}
