// The kernels as operations of MLX's own graph: lazy, and run by MLX's CPU stream when their inputs are there.

#include <nanobind/nanobind.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "matvec.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

namespace {

int type_of(const mx::array& a) {
  if (a.dtype() == mx::float32) return GEARBX_FLOAT32;
  if (a.dtype() == mx::bfloat16) return GEARBX_BFLOAT16;
  if (a.dtype() == mx::float16) return GEARBX_FLOAT16;
  throw std::invalid_argument("weights, scales and biases are float32, bfloat16 or float16");
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Row-contiguous when it is evaluated; nothing is copied that already is.
mx::array in_rows(const mx::array& a, mx::Stream s) {
  return a.is_available() && a.flags().row_contiguous ? a : mx::contiguous(a, false, s);
}

mx::array in_rows_and_float32(const mx::array& x, mx::Stream s) { return in_rows(mx::astype(x, mx::float32, s), s); }

int vectors_of(const mx::array& x) { return x.shape(-1) ? static_cast<int>(x.size() / x.shape(-1)) : 0; }

void check_x(const mx::array& x, int64_t columns) {
  require(x.ndim() >= 1 && x.shape(-1) == columns, "x and the weights differ in width");
  require(columns > 0 && vectors_of(x) >= 1 && vectors_of(x) <= GEARBX_MAX_VECTORS, "1 to 16 vectors");
}

class Matvec : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("a CPU kernel has no GPU form");
  }

 protected:
  // Allocates the output, tells the encoder what is read and written, and hands `run` to the stream.
  template <class Run>
  void dispatch(const std::vector<mx::array>& inputs, mx::array& out, Run run) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(out);
    encoder.dispatch(
        [run, x = inputs[0].data<float>(), n = vectors_of(inputs[0]), y = out.data<float>()]() { run(x, n, y); });
  }
};

// Inputs: x, the weights of each plane, scales, the biases of each plane.
class StackMatvec : public Matvec {
 public:
  StackMatvec(mx::Stream s, std::vector<int> widths, int group)
      : Matvec(s), widths_(std::move(widths)), group_(group) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    gearbx_stack m = {};
    m.planes = static_cast<int>(widths_.size());
    m.group = group_;
    m.columns = inputs[0].shape(-1);
    m.rows = inputs[1].shape(0);
    const mx::array& scales = inputs[static_cast<size_t>(m.planes + 1)];
    m.scales = scales.data<void>();
    m.scale_type = type_of(scales);
    for (int p = 0; p < m.planes; p++) {
      m.widths[p] = widths_[static_cast<size_t>(p)];
      m.weights[p] = inputs[static_cast<size_t>(p + 1)].data<void>();
      m.biases[p] = inputs[static_cast<size_t>(m.planes + 2 + p)].data<void>();
    }
    dispatch(inputs, outputs[0], [m](const float* x, int n, float* y) { gearbx_stack_matvec(&m, x, n, y); });
  }

  const char* name() const override { return "GearbxStackMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const StackMatvec&>(other);
    return widths_ == o.widths_ && group_ == o.group_;
  }

 private:
  std::vector<int> widths_;
  int group_;
};

// Inputs: x, weights.
class DenseMatvec : public Matvec {
 public:
  using Matvec::Matvec;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& w = inputs[1];
    const gearbx_dense m = {w.shape(0), w.shape(1), w.data<void>(), type_of(w)};
    dispatch(inputs, outputs[0], [m](const float* x, int n, float* y) { gearbx_dense_matvec(&m, x, n, y); });
  }

  const char* name() const override { return "GearbxDenseMatvec"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

mx::array output(const mx::array& x, int rows, std::shared_ptr<mx::Primitive> primitive,
                 std::vector<mx::array> inputs) {
  auto shape = x.shape();
  shape.back() = rows;
  return mx::array(shape, mx::float32, std::move(primitive), std::move(inputs));
}

mx::array stack_matvec(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const std::vector<int>& widths, int group) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const size_t planes = widths.size();
  require(planes >= 1 && planes <= GEARBX_MAX_PLANES && weights.size() == planes && biases.size() == planes,
          "1 to 8 planes, each with weights and biases");
  require(group == 32 || group == 64 || group == 128, "groups of 32, 64 or 128");
  require(scales.ndim() == 2, "scales are a matrix");
  const int rows = scales.shape(0);
  const int64_t columns = static_cast<int64_t>(scales.shape(1)) * group;
  check_x(x, columns);
  type_of(scales);

  std::vector<mx::array> inputs = {in_rows_and_float32(x, s)};
  int bits = 0;
  for (size_t p = 0; p < planes; p++) {
    const auto& w = weights[p];
    require(widths[p] >= 1 && widths[p] <= 8 && widths[p] != 7, "planes of 1 to 6 or 8 bits");
    require(w.dtype() == mx::uint32 && w.ndim() == 2 && w.shape(0) == rows && w.shape(1) == columns / 32 * widths[p],
            "packed weights that do not go with the scales");
    bits += widths[p];
    inputs.push_back(in_rows(w, s));
  }
  require(bits <= 8, "planes of 8 bits together at most");
  inputs.push_back(in_rows(scales, s));
  for (const auto& b : biases) {
    require(b.dtype() == scales.dtype() && b.shape() == scales.shape(), "biases that do not go with the scales");
    inputs.push_back(in_rows(b, s));
  }
  return output(x, rows, std::make_shared<StackMatvec>(s, widths, group), std::move(inputs));
}

mx::array dense_matvec(const mx::array& x, const mx::array& weight) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 2, "weights are a matrix");
  type_of(weight);
  check_x(x, weight.shape(1));
  return output(x, weight.shape(0), std::make_shared<DenseMatvec>(s),
                {in_rows_and_float32(x, s), in_rows(weight, s)});
}

// Inputs: logprobs.
class EntropyBits : public Matvec {
 public:
  using Matvec::Matvec;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int64_t count = inputs[0].shape(-1), rows = static_cast<int64_t>(inputs[0].size()) / count;
    dispatch(inputs, outputs[0],
             [count, rows](const float* x, int, float* y) { gearbx_entropy_bits(x, rows, count, y); });
  }

  const char* name() const override { return "GearbxEntropyBits"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

mx::array entropy_bits(const mx::array& logprobs) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(logprobs.ndim() >= 1 && logprobs.size() > 0, "log-probabilities of at least one token");
  auto shape = logprobs.shape();
  shape.pop_back();
  return mx::array(shape, mx::float32, std::make_shared<EntropyBits>(s), {in_rows_and_float32(logprobs, s)});
}

// Eager, unlike the products: it is for timing. `words` is evaluated, contiguous uint32.
uint32_t read_sum(const mx::array& words) {
  require(words.dtype() == mx::uint32 && words.is_available() && words.flags().row_contiguous,
          "evaluated uint32 words in a row");
  return gearbx_read_sum(words.data<uint32_t>(), static_cast<int64_t>(words.size()));
}

}  // namespace

NB_MODULE(_gearbx_cpu, m) {
  m.def("stack_matvec", &stack_matvec, "x"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a);
  m.def("dense_matvec", &dense_matvec, "x"_a, "weight"_a);
  m.def("entropy_bits", &entropy_bits, "logprobs"_a);
  m.def("read_sum", &read_sum, "words"_a);
  m.def("threads", &gearbx_threads);
}
