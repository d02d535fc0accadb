// Queries, keys, values, and what hides keys, as inputs of MLX's operations.

#pragma once

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "attention.h"
#include "graph.h"

namespace gearbx {

// Vectors (batch, heads, positions, width) in place; or a copy, if the numbers of a vector are not contiguous.
class Vectors {
 public:
  Vectors(const mx::array& a, int64_t* strides) : data_(a.data<float>()), rows_(a) {
    copied_ = a.strides(3) != 1 && a.shape(3) != 1;
    const int64_t vector = a.shape(3), head = a.shape(2) * vector;
    strides[0] = copied_ ? a.shape(1) * head : a.strides(0);
    strides[1] = copied_ ? head : a.strides(1);
    strides[2] = copied_ ? vector : a.strides(2);
  }

  const float* read(std::vector<float>& copy) const { return copied_ ? rows_.read(copy) : data_; }

 private:
  const float* data_;
  Rows rows_;
  bool copied_;
};

// Adds the padding of each sequence to the inputs of an operation, if there is some.
inline void add_padding(const std::optional<mx::array>& padding, int batch, std::vector<mx::array>& inputs,
                        mx::Stream s) {
  if (!padding) return;
  require(padding->dtype() == mx::int32 && padding->shape() == mx::Shape{batch},
          "the padding must be int32, a number for each sequence");
  inputs.push_back(in_rows(*padding, s));
}

// Adds a mask, for scores of this shape (batch, heads, queries, keys), and the padding.
inline void add_hidden(const std::optional<mx::array>& mask, const std::optional<mx::array>& padding,
                       const mx::Shape& scores, std::vector<mx::array>& inputs, mx::Stream s) {
  if (mask) {
    require(mask->dtype() == mx::bool_, "the mask must be bool");
    inputs.push_back(mx::broadcast_to(*mask, scores, s));
  }
  add_padding(padding, scores[0], inputs, s);
}

// The padding among an operation's inputs from `first` on; null if there is none.
inline const int32_t* padding_of(const std::vector<mx::array>& inputs, size_t first) {
  const bool padded = inputs.size() > first && inputs.back().dtype() == mx::int32;
  return padded ? inputs.back().data<int32_t>() : nullptr;
}

// What `add_hidden` added as inputs from `first` on.
inline void take_hidden(const std::vector<mx::array>& inputs, size_t first, gearbx_attention& form) {
  form.padding = padding_of(inputs, first);
  if (inputs.size() <= first || inputs[first].dtype() != mx::bool_) return;
  const mx::array& mask = inputs[first];
  form.mask = reinterpret_cast<const uint8_t*>(mask.data<bool>());
  std::copy(mask.strides().begin(), mask.strides().end(), form.mask_strides);
}

}  // namespace gearbx
