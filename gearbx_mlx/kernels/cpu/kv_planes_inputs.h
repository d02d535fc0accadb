// Nested keys and values as inputs of MLX's operations.

#pragma once

#include "attention.h"
#include "graph.h"

namespace gearbx {

typedef std::vector<mx::array> Arrays;

// What an operation has to know of nested keys and values beside their arrays. packed: 0 where there are none.
struct KVPlanesForm {
  int64_t packed = 0, group = 0;
  bool fine = false;  // whether the second plane is read

  size_t arrays() const { return packed ? (fine ? 8 : 6) : 0; }

  // Takes the arrays, which begin at an input of the operation.
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

// Checks nested keys and values (batch, heads, capacity, ...), each planes, scales and offsets, for vectors of `width`
// numbers, and adds them to an operation's inputs.
inline KVPlanesForm add_kv_planes(const Arrays& keys, const Arrays& values, int64_t packed, int64_t group,
                                  const mx::Shape& heads, int64_t width, Arrays& inputs, mx::Stream s) {
  require(packed > 0 && group > 0 && group % 8 == 0 && width % group == 0, "planes have groups that divide a vector");
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
