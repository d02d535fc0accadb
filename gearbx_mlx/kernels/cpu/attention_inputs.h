// Queries, keys, values and masks as inputs of MLX's operations.

#pragma once

#include <algorithm>

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

// The mask (batch, heads, queries, keys), bool, of an operation.
inline void take_mask(const mx::array& mask, gearbx_attention& form) {
  form.mask = reinterpret_cast<const uint8_t*>(mask.data<bool>());
  std::copy(mask.strides().begin(), mask.strides().end(), form.mask_strides);
}

}  // namespace gearbx
