// Matmuls over exact weights, and decoded weights, as operations of MLX's graph.

#include <nanobind/stl/tuple.h>

#include <map>

#include "exact.h"
#include "exact_form.h"
#include "graph.h"
#include "split_codes.h"

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
    m.rows = static_cast<int64_t>(outputs[0].size()) / m.columns;  // the rows of all experts are in sequence
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

// Encoders of packed weights for Python: of format `exact`, and of planes. They are no operations of MLX's graph, but
// take evaluated arrays and compute at once: the exact encoder's output size is known only at its end, and the inputs
// of planes can be freed at once.

void require_evaluated(const mx::array& a, mx::Dtype dtype, const mx::Shape& shape, const char* what) {
  require(a.dtype() == dtype && a.shape() == shape, what);
  require(a.is_available() && a.flags().row_contiguous, "arrays must be evaluated and contiguous");
}

mx::array allocated(mx::Shape shape, mx::Dtype dtype) {
  size_t bytes = dtype.size();
  for (int length : shape) bytes *= static_cast<size_t>(length);
  return mx::array(mx::allocator::malloc(bytes), std::move(shape), dtype);
}

// values: (O, I) uint16. Returns kept, low, high and offsets, as in exact.h.
std::tuple<mx::array, mx::array, mx::array, mx::array> exact_encode(const mx::array& values, const mx::array& codes,
                                                                    const mx::array& scales, const mx::array& biases,
                                                                    int group) {
  require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
  require(values.ndim() == 2 && values.size() > 0 && values.shape(1) % group == 0, "values must be rows of groups");
  const int rows = values.shape(0), columns = values.shape(1);
  const mx::Shape groups = {rows, columns / group};
  require_evaluated(values, mx::uint16, {rows, columns}, "values must be the bits of bf16 weights");
  require_evaluated(codes, mx::uint32, {rows, columns / 8}, "packed codes do not fit the values");
  require_evaluated(scales, mx::uint16, groups, "there must be a scale for each group");
  require_evaluated(biases, mx::uint16, groups, "there must be a bias for each group");
  const auto* packed = reinterpret_cast<const uint8_t*>(codes.data<uint32_t>());
  const gearbx_exact_source m = {rows,   columns, group, values.data<uint16_t>(), packed, scales.data<uint16_t>(),
                                 biases.data<uint16_t>()};
  auto kept = allocated(groups, mx::uint8), offsets = allocated({rows + 1}, mx::uint32);
  auto low = allocated({rows, columns}, mx::uint8);
  uint32_t* begins = offsets.data<uint32_t>();
  begins[0] = 0;
  gearbx_exact_examine(&m, kept.data<uint8_t>(), low.data<uint8_t>(), begins + 1);
  for (int r = 0; r < rows; r++) begins[r + 1] += begins[r];
  const int count = static_cast<int>(begins[rows]);
  auto high = allocated({count > 0 ? count : 1}, mx::uint8);
  high.data<uint8_t>()[0] = 0;
  gearbx_exact_write_high(&m, kept.data<uint8_t>(), begins, high.data<uint8_t>());
  return {kept, low, high, offsets};
}

// Planes of these widths for rows of `groups` times 32 columns, written by `job`: (..., O, I * width / 32), or panels.
std::vector<mx::array> planes_by(gearbx_splitting job, mx::Shape shape, const std::vector<int>& widths, bool in_panels) {
  int together = 0;
  for (int width : widths) {
    require(width >= 1 && width <= 8, "planes must have 1 to 8 bits");
    together += width;
  }
  require(together >= 1 && together <= 8 && together == job.bits, "planes must have as many bits in all as a code");
  const int height = gearbx_panel_rows(), blocks = static_cast<int>(job.columns / 32);
  require(!in_panels || (shape.size() == 2 && shape[0] % height == 0), "panels must be whole");
  std::vector<mx::array> planes;
  std::vector<uint32_t*> words;
  for (int width : widths) {
    shape.back() = blocks * width;
    planes.push_back(allocated(in_panels ? mx::Shape{shape[0] / height, blocks * width, height} : shape, mx::uint32));
    words.push_back(planes.back().data<uint32_t>());
  }
  job.planes = static_cast<int>(widths.size());
  job.widths = widths.data();
  job.panel_rows = in_panels ? height : 0;
  job.words = words.data();
  gearbx_split_codes(&job);
  return planes;
}

// codes: (..., O, I * bits / 32) uint32. Returns the planes.
std::vector<mx::array> split_codes(const mx::array& codes, int bits, const std::vector<int>& widths, bool in_panels) {
  require(bits >= 1 && bits <= 8, "codes must have 1 to 8 bits");
  require(codes.ndim() >= 2 && codes.size() > 0 && codes.shape(-1) % bits == 0, "codes must be rows of whole words");
  require_evaluated(codes, mx::uint32, codes.shape(), "codes must be uint32");
  gearbx_splitting job = {};
  job.columns = 32L * (codes.shape(-1) / bits);
  job.rows = static_cast<int64_t>(codes.size()) / codes.shape(-1);
  job.bits = bits;
  job.codes = reinterpret_cast<const uint8_t*>(codes.data<uint32_t>());
  return planes_by(job, codes.shape(), widths, in_panels);
}

// The shape (..., O, I / group) of values per group of a weight.
mx::Shape groups_of(const mx::array& weight, int group) {
  require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
  require(weight.ndim() >= 2 && weight.size() > 0 && weight.shape(-1) % group == 0, "weights must be rows of groups");
  require_evaluated(weight, weight.dtype(), weight.shape(), "weights must be floating");
  auto groups = weight.shape();
  groups.back() /= group;
  return groups;
}

// weight: (..., O, I). Returns round-to-nearest planes, scales, and the biases of the first plane and of each other
// width, in the weight's type; by row or in panels. As `split` of formats/planes.py, without Python's lock.
std::tuple<std::vector<mx::array>, mx::array, std::vector<mx::array>> make_planes(const mx::array& weight,
                                                                                 const std::vector<int>& widths, int group,
                                                                                 float least, bool in_panels) {
  auto groups = groups_of(weight, group);
  const int height = gearbx_panel_rows();
  if (in_panels && groups.size() == 2) groups = {groups[0] / height, groups[1], height};
  auto scales = allocated(groups, weight.dtype());
  std::vector<mx::array> biases;
  std::vector<void*> of_planes;
  std::map<int, void*> of_width;
  for (size_t p = 0; p < widths.size(); p++) {
    const auto found = p ? of_width.find(widths[p]) : of_width.end();
    if (found == of_width.end()) {
      biases.push_back(allocated(groups, weight.dtype()));
      of_planes.push_back(biases.back().data<void>());
      if (p) of_width[widths[p]] = of_planes.back();
    } else {
      of_planes.push_back(found->second);
    }
  }
  const gearbx_grid grid = {weight.data<void>(), type_of(weight), group, least, scales.data<void>(), of_planes.data()};
  gearbx_splitting job = {};
  job.columns = weight.shape(-1);
  job.rows = static_cast<int64_t>(weight.size()) / weight.shape(-1);
  for (int width : widths) job.bits += width;
  job.grid = &grid;
  auto planes = planes_by(job, weight.shape(), widths, in_panels);
  return {planes, scales, biases};
}

}  // namespace

void bind_exact(nb::module_& m) {
  m.def("exact_matvec", &exact_matvec, "x"_a, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "group"_a, "x_bits"_a = 0);
  m.def("exact_experts", &exact_experts, "x"_a, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a,
        "group"_a, "indices"_a, "x_bits"_a = 0);
  m.def("exact_decode", &exact_decode, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a, "group"_a);
}

void bind_exact_encode(nb::module_& m) {
  m.def("exact_encode", &exact_encode, "values"_a, "codes"_a, "scales"_a, "biases"_a, "group"_a);
  m.def("split_codes", &split_codes, "codes"_a, "bits"_a, "widths"_a, "in_panels"_a);
  m.def("make_planes", &make_planes, "weight"_a, "widths"_a, "group"_a, "least"_a, "in_panels"_a,
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gearbx
