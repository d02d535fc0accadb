// What operations over mixtures of experts share: which vector meets which expert.

#pragma once

#include "graph.h"

namespace gearbx {

// The number of the vector in each pair, after x (..., 1, I) and the indices are broadcast against each other.
inline std::vector<int32_t> vectors_of_pairs(const mx::Shape& x, const mx::Shape& pairs) {
  int count = 1;
  for (int length : pairs) count *= length;
  std::vector<int32_t> vectors(static_cast<size_t>(count));
  for (int p = 0; p < count; p++) {
    int rest = p, vector = 0, stride = 1;
    for (size_t i = 0; i < pairs.size(); i++) {  // the last dimension first
      const int length = pairs[pairs.size() - 1 - i], own = i < x.size() ? x[x.size() - 1 - i] : 1;
      vector += (own == 1 ? 0 : rest % length) * stride;
      rest /= length;
      stride *= own;
    }
    vectors[static_cast<size_t>(p)] = vector;
  }
  return vectors;
}

// Inputs: x, the weights with what belongs to them, indices.
class Experts : public Operation {
 public:
  Experts(mx::Stream s, std::vector<int32_t> vectors) : Operation(s), vectors_(std::move(vectors)) {}

 protected:
  template <class Matrix, class Product>
  void multiply(const std::vector<mx::array>& inputs, mx::array& out, Matrix first, Product product) {
    dispatch(inputs, out,
             [first, product, experts = inputs[1].shape(0), chosen = inputs.back().data<int32_t>(),
              vectors = vectors_](const float* x, float* y) {
               const gearbx_pairs pairs = {static_cast<int64_t>(vectors.size()), experts, vectors.data(), chosen};
               product(&first, &pairs, x, y);
             });
  }

  std::vector<int32_t> vectors_;
};

// Returns the shape of the pairs, and broadcasts the indices to it.
inline mx::Shape broadcast(const mx::array& x, mx::array& indices, mx::Stream s) {
  require(x.ndim() >= 2 && x.shape(-2) == 1, "x must be (..., 1, I), with one vector for each index");
  require(mx::issubdtype(indices.dtype(), mx::integer), "indices must be integers");
  const mx::Shape own(x.shape().begin(), x.shape().end() - 2);
  const auto pairs = mx::broadcast_shapes(own, indices.shape());
  require(indices.size() > 0, "there must be at least one index");
  indices = in_rows(mx::astype(mx::broadcast_to(indices, pairs, s), mx::int32, s), s);
  return pairs;
}

inline mx::array finish(const mx::array& x, mx::Shape pairs, int rows, std::shared_ptr<mx::Primitive> primitive,
                 std::vector<mx::array> inputs) {
  pairs.push_back(1);
  pairs.push_back(x.shape(-1));
  return output(std::move(pairs), rows, std::move(primitive), std::move(inputs));
}

inline std::vector<int32_t> vectors_of_pairs(const mx::array& x, const mx::Shape& pairs) {
  return vectors_of_pairs(mx::Shape(x.shape().begin(), x.shape().end() - 2), pairs);
}

}  // namespace gearbx
