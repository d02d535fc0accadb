// Products over exact weights, and the weights themselves, as operations of MLX's graph.

#include "exact.h"
#include "experts.h"

namespace gearbx {
namespace {

// The arrays of an exact matrix, or of one for each expert, as inputs of an operation: weights of each plane, scales,
// biases of each plane, low, high, offsets.
struct ExactForm {
  std::vector<int> widths;
  int group;

  bool operator==(const ExactForm& other) const { return widths == other.widths && group == other.group; }

  // The matrix, or the first expert's; its arrays begin at inputs[at].
  gearbx_exact matrix(const std::vector<mx::array>& inputs, size_t at) const {
    const auto next = [&]() -> const mx::array& { return inputs[at++]; };
    const auto bytes = [](const mx::array& a) { return static_cast<const uint8_t*>(a.data<void>()); };
    gearbx_exact m = {};
    m.planes = static_cast<int>(widths.size());
    m.bits = widths[0];
    m.group = group;
    for (int p = 0; p < m.planes; p++) m.weights[p] = bytes(next());
    const mx::array& scales = next();
    m.rows = scales.shape(-2);
    m.columns = static_cast<int64_t>(scales.shape(-1)) * group;
    m.scales = scales.data<uint16_t>();
    for (int p = 0; p < m.planes; p++) m.biases[p] = next().data<uint16_t>();
    m.low = bytes(next());
    const mx::array& high = next();
    m.high = bytes(high);
    m.count = static_cast<int64_t>(high.size());
    m.offsets = next().data<uint32_t>();
    return m;
  }

  // The inputs of an operation, after checking them; `dimensions` of scales and biases.
  std::vector<mx::array> inputs(const std::vector<mx::array>& weights, const mx::array& scales,
                                const std::vector<mx::array>& biases, const mx::array& low, const mx::array& high,
                                const mx::array& offsets, size_t dimensions, mx::Stream s) const {
    require(widths == std::vector{3} || widths == std::vector{4} || widths == std::vector{4, 4},
            "exact weights have codes of 3 or 4 bits, or planes of 4 and 4");
    require(weights.size() == widths.size() && biases.size() == widths.size(),
            "there must be weights and biases for each plane");
    require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
    require(scales.ndim() == dimensions && scales.shape(-1) > 0,
            dimensions == 2 ? "scales must be a matrix" : "scales must be a matrix for each expert");
    const int columns = scales.shape(-1) * group;
    const auto fits = [&](const mx::array& a, mx::Dtype type, int width) {
      auto shape = scales.shape();
      shape.back() = width;
      return a.dtype() == type && a.shape() == shape;
    };
    std::vector<mx::array> all;
    for (const auto& w : weights) {
      require(fits(w, mx::uint32, columns / 32 * widths[0]), "packed weights and scales have shapes that do not fit");
      all.push_back(in_rows(w, s));
    }
    require(scales.dtype() == mx::uint16, "scales must be uint16, the bits of bfloat16");
    all.push_back(in_rows(scales, s));
    for (const auto& b : biases) {
      require(fits(b, mx::uint16, scales.shape(-1)), "biases must have the type and shape of the scales");
      all.push_back(in_rows(b, s));
    }
    require(widths.size() == 1 ? fits(low, mx::uint8, columns) : fits(low, mx::uint32, columns / 32 * 5),
            "low bits do not fit the scales");
    require(high.dtype() == mx::uint8 && high.ndim() == 1, "high must be a vector of uint8");
    const auto rows = static_cast<int64_t>(scales.size()) / scales.shape(-1);
    require(offsets.dtype() == mx::uint32 && offsets.ndim() == 1 && offsets.shape(0) == rows + 1,
            "there must be a uint32 offset for each row, and one more");
    for (const auto& a : {low, high, offsets}) all.push_back(in_rows(a, s));
    return all;
  }
};

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

mx::array exact_matvec(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const mx::array& low, const mx::array& high,
                       const mx::array& offsets, const std::vector<int>& widths, int group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const ExactForm form = {widths, group};
  auto inputs = form.inputs(weights, scales, biases, low, high, offsets, 2, s);
  check_x(x, static_cast<int64_t>(scales.shape(1)) * group);
  inputs.insert(inputs.begin(), in_float32(x, s));
  return output(x.shape(), scales.shape(0), std::make_shared<ExactMatvec>(s, form), std::move(inputs));
}

mx::array exact_experts(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                        const std::vector<mx::array>& biases, const mx::array& low, const mx::array& high,
                        const mx::array& offsets, const std::vector<int>& widths, int group, mx::array indices) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const ExactForm form = {widths, group};
  auto inputs = form.inputs(weights, scales, biases, low, high, offsets, 3, s);
  check_x(x, static_cast<int64_t>(scales.shape(2)) * group);
  const auto pairs = broadcast(x, indices, s);
  inputs.insert(inputs.begin(), in_float32(x, s));
  inputs.push_back(indices);
  return finish(x, pairs, scales.shape(1), std::make_shared<ExactExperts>(s, vectors_of_pairs(x, pairs), form),
                std::move(inputs));
}

mx::array exact_decode(const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const mx::array& low, const mx::array& high,
                       const mx::array& offsets, const std::vector<int>& widths, int group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const ExactForm form = {widths, group};
  auto inputs = form.inputs(weights, scales, biases, low, high, offsets, scales.ndim() == 3 ? 3 : 2, s);
  auto shape = scales.shape();
  shape.back() *= group;
  return mx::array(shape, mx::bfloat16, std::make_shared<ExactDecode>(s, form), std::move(inputs));
}

}  // namespace

void bind_exact(nb::module_& m) {
  m.def("exact_matvec", &exact_matvec, "x"_a, "weights"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "widths"_a, "group"_a);
  m.def("exact_experts", &exact_experts, "x"_a, "weights"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "widths"_a, "group"_a, "indices"_a);
  m.def("exact_decode", &exact_decode, "weights"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "widths"_a, "group"_a);
}

}  // namespace gearbx
