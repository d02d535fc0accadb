// RMS norms, rotary positions and SwiGLU as operations of MLX's graph.

#include "fused.h"

#include <algorithm>

#include "attention_inputs.h"

namespace gearbx {
namespace {

// Inputs: x, weight.
class RmsNorm : public Operation {
 public:
  RmsNorm(mx::Stream s, float eps) : Operation(s), eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& weight = inputs[1];
    const int64_t columns = weight.shape(0), rows = vectors_of(inputs[0]);
    dispatch(inputs, outputs[0],
             [rows, columns, w = weight.data<void>(), type = type_of(weight), eps = eps_](const float* x, float* y) {
               gearbx_rms_norm(x, rows, columns, w, type, eps, y);
             });
  }

  const char* name() const override { return "GearbxRmsNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return eps_ == static_cast<const RmsNorm&>(other).eps_;
  }

 private:
  float eps_;
};

// Inputs: x, with any strides; frequencies; and the padding, if there is some.
class Rope : public Operation {
 public:
  Rope(mx::Stream s, bool traditional, float scale, int64_t offset)
      : Operation(s), traditional_(traditional), scale_(scale), offset_(offset) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& frequencies = inputs[1];
    gearbx_rotation r = {};
    std::copy(inputs[0].shape().begin(), inputs[0].shape().end(), r.shape);
    std::copy(inputs[0].strides().begin(), inputs[0].strides().end(), r.strides);
    r.frequencies = frequencies.data<float>();
    r.dims = 2 * frequencies.shape(0);
    r.traditional = traditional_;
    r.scale = scale_;
    r.offset = offset_;
    r.padding = padding_of(inputs, 2);
    enqueue(inputs, outputs[0], [r, x = inputs[0].data<float>()](float* y) { gearbx_rope(&r, x, y); });
  }

  const char* name() const override { return "GearbxRope"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Rope&>(other);
    return traditional_ == o.traditional_ && scale_ == o.scale_ && offset_ == o.offset_;
  }

 private:
  bool traditional_;
  float scale_;
  int64_t offset_;
};

typedef void (*Gated)(const float* gate, const float* up, int64_t count, float* y);

// Inputs: gate, up.
class GatedUnit : public Operation {
 public:
  GatedUnit(mx::Stream s, Gated gated) : Operation(s), gated_(gated) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int64_t count = static_cast<int64_t>(inputs[0].size());
    const auto run = [count, gated = gated_, second = Rows(inputs[1])](const float* gate, float* y) {
      std::vector<float> copy;
      gated(gate, second.read(copy), count, y);
    };
    dispatch(inputs, outputs[0], run);
  }

  const char* name() const override { return gated_ == gearbx_swiglu ? "GearbxSwiGlu" : "GearbxGeGlu"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return gated_ == static_cast<const GatedUnit&>(other).gated_;
  }

 private:
  Gated gated_;
};

mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 1, "the weight of a norm must be a vector");
  type_of(weight);
  check_x(x, weight.shape(0));
  return output(x.shape(), weight.shape(0), std::make_shared<RmsNorm>(s, eps),
                {in_float32(x, s), in_rows(weight, s)});
}

mx::array rope(const mx::array& x, const mx::array& frequencies, bool traditional, float scale, int64_t offset,
               const std::optional<mx::array>& padding) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(frequencies.ndim() == 1 && frequencies.dtype() == mx::float32, "frequencies must be a float32 vector");
  require(x.ndim() == 4 && x.size() > 0, "x must be (batch, heads, length, width), and not empty");
  require(2 * frequencies.shape(0) <= x.shape(3), "x has fewer than two numbers for each frequency");
  std::vector<mx::array> inputs = {in_float32(x, s), in_rows(frequencies, s)};
  add_padding(padding, x.shape(0), inputs, s);
  return output(x.shape(), x.shape(3), std::make_shared<Rope>(s, traditional, scale, offset), std::move(inputs));
}

mx::array gated_unit(const mx::array& gate, const mx::array& up, Gated gated) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(gate.shape() == up.shape() && gate.ndim() > 0 && gate.size() > 0,
          "gate and up must have the same shape, and not be empty");
  const auto unit = std::make_shared<GatedUnit>(s, gated);
  return output(gate.shape(), gate.shape(-1), unit, {in_float32(gate, s), in_float32(up, s)});
}

mx::array swiglu(const mx::array& gate, const mx::array& up) { return gated_unit(gate, up, gearbx_swiglu); }
mx::array geglu(const mx::array& gate, const mx::array& up) { return gated_unit(gate, up, gearbx_geglu); }

}  // namespace

void bind_fused(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a);
  m.def("swiglu", &swiglu, "gate"_a, "up"_a);
  m.def("geglu", &geglu, "gate"_a, "up"_a);
  m.def("rope", &rope, "x"_a, "frequencies"_a, "traditional"_a, "scale"_a, "offset"_a,
        "padding"_a = nb::none());
}

}  // namespace gearbx
