// The arrays of exact weights as inputs of MLX's operations.

#pragma once

#include "exact.h"
#include "graph.h"

namespace gearbx {

// The arrays of an exact matrix, or of one for each expert, as inputs of an operation: codes, scales, biases, low,
// high, offsets.
struct ExactForm {
  int group, x_bits;
  bool in_panels;  // codes, scales and biases are (panels, ..., rows of a panel)

  ExactForm(int group, int x_bits, const mx::array& scales, const mx::array& low)
      : group(group), x_bits(x_bits), in_panels(scales.ndim() == 3 && low.ndim() == 2) {}

  bool operator==(const ExactForm& other) const {
    return group == other.group && x_bits == other.x_bits && in_panels == other.in_panels;
  }

  int rows(const mx::array& scales) const { return in_panels ? scales.shape(0) * scales.shape(2) : scales.shape(-2); }
  int columns(const mx::array& scales) const { return scales.shape(in_panels ? 1 : -1) * group; }

  // The matrix, or the first expert's; its first array is inputs[at].
  gearbx_exact matrix(const std::vector<mx::array>& inputs, size_t at) const {
    const auto next = [&]() -> const mx::array& { return inputs[at++]; };
    const auto bytes = [](const mx::array& a) { return static_cast<const uint8_t*>(a.data<void>()); };
    gearbx_exact m = {};
    m.group = group;
    m.x_bits = x_bits;
    m.codes = bytes(next());
    const mx::array& scales = next();
    m.rows = rows(scales);
    m.columns = columns(scales);
    m.panel_rows = in_panels ? gearbx_panel_rows() : 0;
    m.scales = scales.data<uint16_t>();
    m.biases = next().data<uint16_t>();
    m.low = bytes(next());
    const mx::array& high = next();
    m.high = bytes(high);
    m.count = static_cast<int64_t>(high.size());
    m.offsets = next().data<uint32_t>();
    return m;
  }

  // The inputs of an operation, after validation; `dimensions` of scales and biases.
  std::vector<mx::array> inputs(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                                const mx::array& low, const mx::array& high, const mx::array& offsets,
                                size_t dimensions, mx::Stream s) const {
    require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
    check_x_bits(x_bits);
    if (in_panels) {
      require(scales.shape(2) == gearbx_panel_rows(), "panels must have rows");
    } else {
      require(scales.ndim() == dimensions && scales.shape(-1) > 0,
              dimensions == 2 ? "scales must be a matrix" : "scales must be a matrix for each expert");
    }
    const int width = columns(scales);
    auto by_row = scales.shape();
    if (in_panels) by_row = {rows(scales), width};
    const auto fits_as = [&](const mx::array& a, mx::Dtype type, mx::Shape shape, size_t axis, int size) {
      shape[axis] = size;
      return a.dtype() == type && a.shape() == shape;
    };
    const auto fits = [&](const mx::array& a, mx::Dtype type, int size) {
      return fits_as(a, type, scales.shape(), in_panels ? 1 : scales.ndim() - 1, size);
    };
    const auto fits_rows = [&](const mx::array& a, mx::Dtype type, int size) {
      return fits_as(a, type, by_row, by_row.size() - 1, size);
    };
    require(fits(codes, mx::uint32, width / 8), "packed codes and scales have shapes that do not fit");
    require(scales.dtype() == mx::uint16, "scales must be uint16, the bits of bfloat16");
    require(fits(biases, mx::uint16, width / group), "biases must have the type and shape of the scales");
    require(fits_rows(low, mx::uint8, width), "low bytes do not fit the scales");
    require(high.dtype() == mx::uint8 && high.ndim() == 1, "high must be a vector of uint8");
    const auto all_rows = static_cast<int64_t>(low.size()) / low.shape(-1);
    require(offsets.dtype() == mx::uint32 && offsets.ndim() == 1 && offsets.shape(0) == all_rows + 1,
            "there must be a uint32 offset for each row, and one more");
    std::vector<mx::array> all;
    for (const auto& a : {codes, scales, biases, low, high, offsets}) all.push_back(in_rows(a, s));
    return all;
  }
};

}  // namespace gearbx
