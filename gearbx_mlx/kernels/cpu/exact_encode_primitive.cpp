// The encoder of format `exact` for Python. The number of bytes that it writes is known when it is done, so that it is
// no operation of MLX's graph: it takes evaluated arrays, and computes at once.

#include <nanobind/stl/tuple.h>

#include "exact_encode.h"
#include "graph.h"

namespace gearbx {
namespace {

void require_evaluated(const mx::array& a, mx::Dtype dtype, const mx::Shape& shape, const char* what) {
  require(a.dtype() == dtype && a.shape() == shape, what);
  require(a.is_available() && a.flags().row_contiguous, "arrays must be evaluated and contiguous");
}

mx::array allocated(mx::Shape shape, mx::Dtype dtype) {
  size_t bytes = dtype.size();
  for (int length : shape) bytes *= static_cast<size_t>(length);
  return mx::array(mx::allocator::malloc(bytes), std::move(shape), dtype);
}

// values: (O, I) uint16. Returns kept, low, high and offsets, as in exact_encode.h and exact.h.
std::tuple<mx::array, mx::array, mx::array, mx::array> exact_encode(
    const mx::array& values, const std::vector<mx::array>& weights, const mx::array& scales,
    const std::vector<mx::array>& biases, const std::vector<int>& widths, int group) {
  const int planes = static_cast<int>(widths.size());
  require((planes == 1 && (widths[0] == 3 || widths[0] == 4)) || widths == std::vector<int>{4, 4},
          "there must be a plane of 3 or 4 bits, or two of 4");
  require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
  require(values.ndim() == 2 && values.size() > 0 && values.shape(1) % group == 0, "values must be rows of groups");
  require(weights.size() == widths.size() && biases.size() == widths.size(), "each plane has weights and biases");
  const int rows = values.shape(0), columns = values.shape(1);
  require_evaluated(values, mx::uint16, {rows, columns}, "values must be the bits of bf16 weights");
  const mx::Shape groups = {rows, columns / group};
  require_evaluated(scales, mx::uint16, groups, "there must be a scale for each group");
  gearbx_exact_source m = {rows, columns, group, planes, widths[0], values.data<uint16_t>(), {}, scales.data<uint16_t>(), {}};
  for (size_t p = 0; p < widths.size(); p++) {
    require_evaluated(weights[p], mx::uint32, {rows, columns / 32 * widths[p]}, "packed weights do not fit the values");
    require_evaluated(biases[p], mx::uint16, groups, "there must be a bias for each group");
    m.weights[p] = reinterpret_cast<const uint8_t*>(weights[p].data<uint32_t>());
    m.biases[p] = biases[p].data<uint16_t>();
  }
  auto kept = allocated(groups, mx::uint8), offsets = allocated({rows + 1}, mx::uint32);
  auto low = planes == 1 ? allocated({rows, columns}, mx::uint8) : allocated({rows, columns / 32 * 5}, mx::uint32);
  uint32_t* begins = offsets.data<uint32_t>();
  begins[0] = 0;
  gearbx_exact_examine(&m, kept.data<uint8_t>(), static_cast<uint8_t*>(low.data<void>()), begins + 1);
  for (int r = 0; r < rows; r++) begins[r + 1] += begins[r];
  const int count = static_cast<int>(begins[rows]);
  auto high = allocated({count > 0 ? count : 1}, mx::uint8);
  high.data<uint8_t>()[0] = 0;
  gearbx_exact_write_high(&m, kept.data<uint8_t>(), begins, high.data<uint8_t>());
  return {kept, low, high, offsets};
}

}  // namespace

void bind_exact_encode(nb::module_& m) {
  m.def("exact_encode", &exact_encode, "values"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a);
}

}  // namespace gearbx
