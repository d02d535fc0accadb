// Norms and linear layers as parts of a block, and blocks of them.

#include <nanobind/stl/optional.h>

#include "block_program.h"
#include "exact_form.h"

namespace gearbx {
namespace {

// The linear layer whose matrix `matrix_of` makes once it is known that these arrays can be read in place.
template <class MatrixOf>
nb::capsule linear_part(const std::vector<mx::array>& arrays, const std::optional<mx::array>& bias,
                        const MatrixOf& matrix_of) {
  LinearPart made;
  for (const mx::array& a : arrays) note(a, made.memory);
  made.value.matrix = matrix_of();
  if (bias) {
    require(bias->ndim() == 1 && bias->shape(0) == made.value.rows(), "a bias must have a number for each row");
    made.value.bias = note(*bias, made.memory).data<void>();
    made.value.bias_type = type_of(*bias);
  }
  return in_capsule(LINEAR, std::move(made));
}

nb::capsule stack_part(const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const std::vector<int>& widths, int group, int rest,
                       int x_bits, const std::optional<mx::array>& bias) {
  const auto s = mx::default_stream(mx::Device::cpu);
  StackForm form(widths, group, rest, x_bits, scales);
  const auto x = mx::broadcast_to(mx::array(0.0f), {1, form.columns(scales)}, s);
  const auto inputs = form.inputs(x, weights, scales, biases, 2, s);
  return linear_part({inputs.begin() + 1, inputs.end()}, bias, [&] { return form.matrix(inputs); });
}

nb::capsule symmetric_part(const mx::array& weight, const mx::array& scales, int inputs, int bits, int x_bits,
                           const std::optional<mx::array>& bias) {
  check_symmetric(weight, scales, inputs, bits, x_bits);
  return linear_part({weight, scales}, bias, [&] { return symmetric_of(weight, scales, inputs, bits, x_bits); });
}

nb::capsule dense_part(const mx::array& weight, const std::optional<mx::array>& bias, int x_bits) {
  require(weight.ndim() == 2, "weights must be a matrix");
  check_x_bits(x_bits);
  return linear_part({weight}, bias, [&] { return dense_of(weight, x_bits); });
}

nb::capsule exact_part(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                       const mx::array& low, const mx::array& high, const mx::array& offsets, int group,
                       const std::optional<mx::array>& bias, int x_bits) {
  const ExactForm form(group, x_bits, scales, low);
  const auto s = mx::default_stream(mx::Device::cpu);
  const auto inputs = form.inputs(codes, scales, biases, low, high, offsets, 2, s);
  return linear_part(inputs, bias, [&] { return form.matrix(inputs, 0); });
}

nb::capsule norm_part(const mx::array& weight, float eps, bool plus_one) {
  require(weight.ndim() == 1, "the weight of a norm must be a vector");
  NormPart made;
  made.value = {note(weight, made.memory).data<void>(), type_of(weight), eps, plus_one};
  return in_capsule(NORM, std::move(made));
}

nb::capsule make_block(nb::capsule before_attention, std::vector<nb::capsule> projections, nb::capsule output,
                       nb::capsule before_mlp, std::vector<nb::capsule> gates, nb::capsule down,
                       std::optional<nb::capsule> after_attention, std::optional<nb::capsule> after_mlp,
                       std::optional<nb::capsule> of_queries, std::optional<nb::capsule> of_keys, int heads,
                       int key_heads, const mx::array& frequencies, bool gelu, bool traditional, float rotation_scale,
                       float scale) {
  const BlockParts parts = {before_attention, projections, output,     before_mlp, gates,
                            down,             after_attention, after_mlp, of_queries, of_keys};
  const Sizes sizes = {heads, key_heads, gelu, traditional, rotation_scale, scale};
  return in_capsule<Program>(BLOCK, std::make_shared<const BlockProgram>(parts, sizes, frequencies));
}

nb::capsule make_chain(const std::vector<nb::capsule>& blocks, const std::optional<nb::capsule>& norm) {
  require(!blocks.empty(), "a chain has at least one block");
  auto chain = std::make_shared<Chain>();
  for (const nb::capsule& block : blocks) chain->blocks.push_back(from_capsule<Program>(BLOCK, block));
  for (const Program& block : chain->blocks)
    require(block->block().inputs() == chain->inputs(), "blocks differ in width");
  if (norm) chain->norm = from_capsule<NormPart>(NORM, *norm);
  return in_capsule<std::shared_ptr<const Chain>>(CHAIN, std::move(chain));
}

}  // namespace

void bind_block_parts(nb::module_& m) {
  m.def("stack_part", &stack_part, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a, "rest"_a, "x_bits"_a,
        "bias"_a = nb::none());
  m.def("symmetric_part", &symmetric_part, "weight"_a, "scales"_a, "inputs"_a, "bits"_a, "x_bits"_a,
        "bias"_a = nb::none());
  m.def("dense_part", &dense_part, "weight"_a, "bias"_a = nb::none(), "x_bits"_a = 0);
  m.def("exact_part", &exact_part, "codes"_a, "scales"_a, "biases"_a, "low"_a, "high"_a, "offsets"_a, "group"_a,
        "bias"_a = nb::none(), "x_bits"_a = 0);
  m.def("norm_part", &norm_part, "weight"_a, "eps"_a, "plus_one"_a = false);
  m.def("block", &make_block, nb::kw_only(), "before_attention"_a, "projections"_a, "output"_a, "before_mlp"_a,
        "gates"_a, "down"_a, "after_attention"_a.none(), "after_mlp"_a.none(), "of_queries"_a.none(),
        "of_keys"_a.none(), "heads"_a, "key_heads"_a, "frequencies"_a, "gelu"_a, "traditional"_a, "rotation_scale"_a,
        "scale"_a);
  m.def("chain", &make_chain, "blocks"_a, "norm"_a = nb::none());
}

}  // namespace gearbx
