// Queries, keys, values, mask and padding as inputs of MLX's operations.

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

// Adds the padding of each sequence, if any, to the inputs of an operation.
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

// The padding among an operation's inputs from `first` on; null without.
inline const int32_t* padding_of(const std::vector<mx::array>& inputs, size_t first) {
  const bool padded = inputs.size() > first && inputs.back().dtype() == mx::int32;
  return padded ? inputs.back().data<int32_t>() : nullptr;
}

// The mask and padding that `add_hidden` added as inputs from `first` on.
inline void take_hidden(const std::vector<mx::array>& inputs, size_t first, gearbx_attention& form) {
  form.padding = padding_of(inputs, first);
  if (inputs.size() <= first || inputs[first].dtype() != mx::bool_) return;
  const mx::array& mask = inputs[first];
  form.mask = reinterpret_cast<const uint8_t*>(mask.data<bool>());
  std::copy(mask.strides().begin(), mask.strides().end(), form.mask_strides);
}

// Nested keys and values as inputs of MLX's operations.

typedef std::vector<mx::array> Arrays;

// The form of nested keys and values, without their arrays. packed: 0 for none.
struct KVPlanesForm {
  int64_t packed = 0, group = 0;
  bool fine = false;  // whether the second plane is read

  size_t arrays() const { return packed ? (fine ? 8 : 6) : 0; }

  // Takes the arrays, the first of which is at an index of the operation's inputs.
  void take(const Arrays& inputs, size_t first, gearbx_attention& form) const {
    form.packed = packed;
    if (!packed) return;
    form.key_planes = planes(inputs.data() + first);
    form.value_planes = planes(inputs.data() + first + arrays() / 2);
  }

  bool operator==(const KVPlanesForm& o) const { return packed == o.packed && group == o.group && fine == o.fine; }

 private:
  gearbx_kv_planes planes(const mx::array* a) const {
    gearbx_kv_planes made = {};
    made.coarse = a[0].data<uint32_t>();
    if (fine) made.fine = a[1].data<uint32_t>();
    made.scales = a[1 + fine].data<float>();
    made.offsets = a[2 + fine].data<float>();
    made.capacity = a[0].shape(2);
    made.group = group;
    return made;
  }
};

// Validates nested keys and values (batch, heads, capacity, ...), each planes, scales and offsets, for vectors of
// `width` numbers, and adds them to an operation's inputs.
inline KVPlanesForm add_kv_planes(const Arrays& keys, const Arrays& values, int64_t packed, int64_t group,
                                  const mx::Shape& heads, int64_t width, Arrays& inputs, mx::Stream s) {
  require(packed > 0 && group > 0 && group % 8 == 0 && width % group == 0, "groups must divide a vector");
  require(keys.size() == values.size() && (keys.size() == 3 || keys.size() == 4), "there must be one plane or two");
  const bool fine = keys.size() == 4;
  for (const Arrays* arrays : {&keys, &values})
    for (size_t i = 0; i < arrays->size(); i++) {
      const mx::array& a = (*arrays)[i];
      const bool codes = i <= size_t{fine};
      require(a.dtype() == (codes ? mx::uint32 : mx::float32), "planes must be uint32, scales and offsets float32");
      require(a.ndim() == 4 && a.shape(0) == heads[0] && a.shape(1) == heads[1] && a.shape(2) == keys[0].shape(2) &&
                  a.shape(2) >= packed && a.shape(3) == (codes ? width / 8 : width / group),
              "planes have shapes that do not fit");
      inputs.push_back(in_rows(a, s));
    }
  return {packed, group, fine};
}

}  // namespace gearbx
