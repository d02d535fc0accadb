// Shared parts of the kernels' operations in MLX's lazy graph: MLX's CPU stream runs them after their inputs.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "products.h"

namespace gearbx {

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

inline int type_of(const mx::array& a) {
  if (a.dtype() == mx::float32) return GEARBX_FLOAT32;
  if (a.dtype() == mx::bfloat16) return GEARBX_BFLOAT16;
  if (a.dtype() == mx::float16) return GEARBX_FLOAT16;
  throw std::invalid_argument("weights, scales and biases must be float32, bfloat16 or float16");
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// The array, row-contiguous; copied only if it is not.
inline mx::array in_rows(const mx::array& a, mx::Stream s) {
  return a.is_available() && a.flags().row_contiguous ? a : mx::contiguous(a, false, s);
}

// The numbers of an input, row by row. Inputs usually are row-contiguous and are not copied. This is known only when
// the operation runs, and mx::contiguous would add an operation to every matmul.
class Rows {
 public:
  explicit Rows(const mx::array& a) : data_(a.data<float>()), size_(a.size()) {
    if (a.flags().row_contiguous) return;
    shape_ = a.shape();
    strides_ = a.strides();
  }

  // Uses `copy` if the input is not row-contiguous. Called on the stream, after the input is computed.
  const float* read(std::vector<float>& copy) const {
    if (shape_.empty()) return data_;
    std::vector<int> at(shape_.size() - 1);  // indices of the next row
    copy.reserve(size_);
    while (copy.size() < size_) {
      const float* row = data_;
      for (size_t d = 0; d < at.size(); d++) row += at[d] * strides_[d];
      for (int i = 0; i < shape_.back(); i++) copy.push_back(row[i * strides_.back()]);
      for (size_t d = at.size(); d-- > 0 && ++at[d] == shape_[d];) at[d] = 0;
    }
    return copy.data();
  }

 private:
  const float* data_;
  size_t size_;
  mx::Shape shape_;  // empty if the input is row-contiguous
  mx::Strides strides_;
};

inline mx::array in_float32(const mx::array& x, mx::Stream s) { return mx::astype(x, mx::float32, s); }

inline int64_t vectors_of(const mx::array& x) {
  return x.shape(-1) ? static_cast<int64_t>(x.size()) / x.shape(-1) : 0;
}

inline void check_x(const mx::array& x, int64_t columns) {
  require(x.ndim() >= 1 && x.shape(-1) == columns, "x and the weights differ in width");
  require(columns > 0 && x.size() > 0, "x must have at least one vector");
}

// An operation with one output, computed by a function of plain C.
class Operation : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("this kernel is for the CPU, and cannot run on a GPU");
  }

 protected:
  // Allocates the output, registers inputs and output with the encoder, and dispatches run(y) to the stream.
  template <class T = float, class Run>
  void enqueue(const std::vector<mx::array>& inputs, mx::array& out, Run run) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(out);
    encoder.dispatch([run, y = out.data<T>()]() { run(y); });
  }

  // As `enqueue`, with run(x, y); x is the first input.
  template <class Run>
  void dispatch(const std::vector<mx::array>& inputs, mx::array& out, Run run) {
    enqueue(inputs, out, [run, rows = Rows(inputs[0])](float* y) {
      std::vector<float> copy;
      run(rows.read(copy), y);
    });
  }
};

inline mx::array output(mx::Shape shape, int rows, std::shared_ptr<mx::Primitive> primitive,
                        std::vector<mx::array> inputs) {
  shape.back() = rows;
  return mx::array(shape, mx::float32, std::move(primitive), std::move(inputs));
}

inline gearbx_dense dense_of(const mx::array& w, int x_bits = 0) {
  return {w.shape(-2), w.shape(-1), w.data<void>(), type_of(w), x_bits};
}

inline void check_x_bits(int x_bits) {
  require(x_bits == 0 || x_bits == 8 || x_bits == 16, "x_bits must be 8 or 16, or 0 for unquantized activations");
}

inline void check_symmetric(const mx::array& weight, const mx::array& scales, int inputs, int bits, int x_bits) {
  check_x_bits(x_bits);
  require(bits == 2 || bits == 4 || bits == 6 || bits == 8, "symmetric codes must have 2, 4, 6 or 8 bits");
  require(weight.dtype() == (bits == 8 ? mx::int8 : mx::uint8) && weight.ndim() == 2,
          "the weight must be rows of bytes: int8 for 8-bit codes, otherwise uint8");
  require((static_cast<int64_t>(inputs) * bits + 7) / 8 <= weight.shape(1), "x is wider than the weights");
  type_of(scales);
  const bool by_row = scales.ndim() == 1, by_group = scales.ndim() == 2 && scales.shape(1) == (inputs + 31) / 32;
  require((by_row || by_group) && scales.shape(0) == weight.shape(0),
          "there must be a scale for each row, or for each 32 inputs of a row");
}

// Symmetric codes: rows of bytes for this number of inputs.
inline gearbx_stack symmetric_of(const mx::array& weight, const mx::array& scales, int inputs, int bits, int x_bits) {
  gearbx_stack m = {};
  m.kind = scales.ndim() == 1 ? GEARBX_SYMMETRIC_ROWS : GEARBX_SYMMETRIC_GROUPS;
  m.group = m.kind == GEARBX_SYMMETRIC_ROWS ? 64 : 32;
  m.inputs = inputs;
  m.columns = (m.inputs + m.group - 1) / m.group * m.group;
  m.rows = weight.shape(0);
  m.row_bytes = weight.shape(1);
  m.planes = 1;
  m.widths[0] = bits;
  m.weights[0] = weight.data<void>();
  m.scales = scales.data<void>();
  m.scale_type = type_of(scales);
  m.x_bits = x_bits;
  return m;
}

// A stack of planes as inputs of an operation: x, the weights of each plane, scales, the biases of the first planes.
struct StackForm {
  std::vector<int> widths;
  int group;
  int rest;  // lower bits of longer codes that the stack omits; the biases belong to the longer codes
  int x_bits;
  bool in_panels = false;  // arrays are (panels, ..., rows of a panel)

  // Of a matrix with these scales: arrays of three dimensions are in panels.
  StackForm(std::vector<int> widths, int group, int rest, int x_bits, const mx::array& scales)
      : widths(std::move(widths)), group(group), rest(rest), x_bits(x_bits), in_panels(scales.ndim() == 3) {}
  // Of the matrices of experts.
  StackForm(std::vector<int> widths, int group, int rest, int x_bits)
      : widths(std::move(widths)), group(group), rest(rest), x_bits(x_bits) {}

  bool operator==(const StackForm& other) const {
    return widths == other.widths && group == other.group && rest == other.rest && x_bits == other.x_bits &&
           in_panels == other.in_panels && biases_ == other.biases_;
  }

  int rows(const mx::array& scales) const { return in_panels ? scales.shape(0) * scales.shape(2) : scales.shape(-2); }
  int columns(const mx::array& scales) const { return scales.shape(in_panels ? 1 : -1) * group; }

  gearbx_stack matrix(const std::vector<mx::array>& inputs) const {
    gearbx_stack m = {};
    m.planes = static_cast<int>(widths.size());
    m.group = group;
    m.x_bits = x_bits;
    const mx::array& scales = inputs[static_cast<size_t>(m.planes + 1)];
    m.rows = rows(scales);
    m.columns = columns(scales);
    m.panel_rows = in_panels ? gearbx_panel_rows() : 0;
    m.scales = scales.data<void>();
    m.scale_type = type_of(scales);
    for (int p = 0; p < m.planes; p++) {
      m.widths[p] = widths[static_cast<size_t>(p)];
      m.weights[p] = inputs[static_cast<size_t>(p + 1)].data<void>();
      if (p < biases_) m.biases[p] = inputs[static_cast<size_t>(m.planes + 2 + p)].data<void>();
    }
    m.middle = 0.5f * (1.0f - 1.0f / static_cast<float>(1 << rest));
    return m;
  }

  // The inputs of an operation, after validation; `dimensions` of all arrays of the stack.
  std::vector<mx::array> inputs(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                                const std::vector<mx::array>& biases, size_t dimensions, mx::Stream s) {
    const size_t planes = widths.size();
    require(planes >= 1 && planes <= GEARBX_MAX_PLANES && weights.size() == planes && !biases.empty() &&
                biases.size() <= planes,
            "there must be 1 to 8 planes, each with weights, and biases of the first ones");
    require(rest >= 0 && rest <= 7, "0 to 7 bits may be left out");
    biases_ = static_cast<int>(biases.size());
    check_x_bits(x_bits);
    require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
    if (in_panels) check_panels(scales);
    else
      require(scales.ndim() == dimensions,
              dimensions == 2 ? "scales must be a matrix" : "scales must be a matrix for each expert");
    check_x(x, columns(scales));
    type_of(scales);

    std::vector<mx::array> all = {in_float32(x, s)};
    int bits = 0;
    for (size_t p = 0; p < planes; p++) {
      require(widths[p] >= 1 && widths[p] <= 8 && widths[p] != 7, "planes must have 1 to 6 or 8 bits");
      auto shape = scales.shape();
      shape[in_panels ? 1 : shape.size() - 1] = columns(scales) / 32 * widths[p];
      require(weights[p].dtype() == mx::uint32 && weights[p].shape() == shape,
              "packed weights and scales have shapes that do not fit");
      bits += widths[p];
      all.push_back(in_rows(weights[p], s));
    }
    require(bits <= 8, "planes must have at most 8 bits in all");
    all.push_back(in_rows(scales, s));
    for (const auto& b : biases) {
      require(b.dtype() == scales.dtype() && b.shape() == scales.shape(),
              "biases must have the type and shape of the scales");
      all.push_back(in_rows(b, s));
    }
    return all;
  }

 private:
  int biases_ = 0;

  void check_panels(const mx::array& scales) const {
    require(scales.shape(2) == gearbx_panel_rows(), "panels must have as many rows as this processor multiplies at once");
    require(x_bits != 0, "panels need activations of 8 or 16 bits");
    const int second = widths.size() > 1 ? widths[1] : 0;
    const bool four = widths[0] == 4 && widths.size() <= 2 && second != 3;
    require(four || widths == std::vector<int>{8}, "panels must have planes of widths 8, 4, or 4 and then 4, 2 or 1");
  }
};

// Adds matmuls over codebooks (codebook_primitive.cpp).
void bind_codebooks(nb::module_& m);

// Adds the unpacking of GGUF files (gguf_primitive.cpp).
void bind_gguf(nb::module_& m);

// Adds arrays over mapped files (mapped_primitive.cpp).
void bind_mapped(nb::module_& m);

// Adds the encoder of format exact (exact_primitive.cpp).
void bind_exact_encode(nb::module_& m);
// Adds matmuls over exact weights (exact_primitive.cpp).
void bind_exact(nb::module_& m);

// Adds attention (attention_primitive.cpp).
void bind_attention(nb::module_& m);

// Adds transformer blocks (block_primitive.cpp).
void bind_blocks(nb::module_& m);

// Adds norms, rotary positions and SwiGLU (fused_primitive.cpp).
void bind_fused(nb::module_& m);

// C++ values that Python only passes on. They are no nanobind classes, because a process may load the kernels twice,
// but can register a class only once.

template <class T>
nanobind::capsule in_capsule(const char* name, T value) {
  return nanobind::capsule(new T(std::move(value)), name, [](void* p) noexcept { delete static_cast<T*>(p); });
}

template <class T>
const T& from_capsule(const char* name, const nanobind::capsule& capsule) {
  return *static_cast<const T*>(capsule.data(name));
}

// Adds the check of a module's modules and arrays for changes (block_primitive.cpp).
void bind_watched(nanobind::module_& m);

// Common parts of operations over mixtures of experts: the vector and expert of each pair.

// The number of the vector in each pair, after x (..., 1, I) and the indices are broadcast against each other.
inline std::vector<int32_t> vectors_of_pairs(const mx::array& x, const mx::Shape& pairs) {
  int count = 1;
  for (int length : pairs) count *= length;
  std::vector<int32_t> vectors(static_cast<size_t>(count));
  for (int p = 0; p < count; p++) {
    int rest = p, vector = 0, stride = 1;
    for (int i = 0; i < static_cast<int>(pairs.size()); i++) {  // the last dimension first
      const int length = pairs[pairs.size() - 1 - static_cast<size_t>(i)];
      const int own = i + 2 < static_cast<int>(x.ndim()) ? x.shape(-3 - i) : 1;
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

}  // namespace gearbx
