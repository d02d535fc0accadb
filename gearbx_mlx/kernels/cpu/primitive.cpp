// Matmuls as operations of MLX's graph, and the Python module of all kernels.

#include "graph.h"

namespace gearbx {
namespace {

class StackMatvec : public Operation {
 public:
  StackMatvec(mx::Stream s, StackForm form) : Operation(s), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs[0], [m = form_.matrix(inputs), n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_stack_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxStackMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return form_ == static_cast<const StackMatvec&>(other).form_;
  }

 private:
  StackForm form_;
};

// A matmul with symmetric codes. Inputs: x, weight, scales.
class SymmetricMatvec : public Operation {
 public:
  SymmetricMatvec(mx::Stream s, int bits, int x_bits) : Operation(s), bits_(bits), x_bits_(x_bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array &weight = inputs[1], &scales = inputs[2];
    const gearbx_stack m = symmetric_of(weight, scales, inputs[0].shape(-1), bits_, x_bits_);
    dispatch(inputs, outputs[0], [m, n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_stack_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxSymmetricMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const SymmetricMatvec&>(other);
    return bits_ == o.bits_ && x_bits_ == o.x_bits_;
  }

 private:
  int bits_;
  int x_bits_;
};

// Inputs: x, weights.
class DenseMatvec : public Operation {
 public:
  DenseMatvec(mx::Stream s, int x_bits) : Operation(s), x_bits_(x_bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const gearbx_dense matrix = dense_of(inputs[1], x_bits_);
    dispatch(inputs, outputs[0], [m = matrix, n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_dense_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxDenseMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return x_bits_ == static_cast<const DenseMatvec&>(other).x_bits_;
  }

 private:
  int x_bits_;
};

mx::array stack_matvec(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                       const std::vector<mx::array>& biases, const std::vector<int>& widths, int group, int rest,
                       int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  StackForm form(widths, group, rest, x_bits, scales);
  auto inputs = form.inputs(x, weights, scales, biases, 2, s);
  return output(x.shape(), form.rows(scales), std::make_shared<StackMatvec>(s, form), std::move(inputs));
}

// weight: rows of bytes. scales: one for each row, or for each group of 32 inputs.
mx::array symmetric_matvec(const mx::array& x, const mx::array& weight, const mx::array& scales, int bits, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(x.ndim() >= 1, "x must have at least one vector");
  check_x(x, x.shape(-1));
  check_symmetric(weight, scales, x.shape(-1), bits, x_bits);
  return output(x.shape(), weight.shape(0), std::make_shared<SymmetricMatvec>(s, bits, x_bits),
                {in_float32(x, s), in_rows(weight, s), in_rows(scales, s)});
}

mx::array dense_matvec(const mx::array& x, const mx::array& weight, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 2, "weights must be a matrix");
  type_of(weight);
  check_x_bits(x_bits);
  check_x(x, weight.shape(1));
  return output(x.shape(), weight.shape(0), std::make_shared<DenseMatvec>(s, x_bits),
                {in_float32(x, s), in_rows(weight, s)});
}

// Matmuls of mixtures of experts: mx::gather_mm and mx::gather_qmm for single vectors.

class StackExperts : public Experts {
 public:
  StackExperts(mx::Stream s, std::vector<int32_t> vectors, StackForm form)
      : Experts(s, std::move(vectors)), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], form_.matrix(inputs), gearbx_stack_experts);
  }

  const char* name() const override { return "GearbxStackExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const StackExperts&>(other);
    return form_ == o.form_ && vectors_ == o.vectors_;
  }

 private:
  StackForm form_;
};

class DenseExperts : public Experts {
 public:
  DenseExperts(mx::Stream s, std::vector<int32_t> vectors, int x_bits)
      : Experts(s, std::move(vectors)), x_bits_(x_bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], dense_of(inputs[1], x_bits_), gearbx_dense_experts);
  }

  const char* name() const override { return "GearbxDenseExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const DenseExperts&>(other);
    return vectors_ == o.vectors_ && x_bits_ == o.x_bits_;
  }

 private:
  int x_bits_;
};

mx::array stack_experts(const mx::array& x, const std::vector<mx::array>& weights, const mx::array& scales,
                        const std::vector<mx::array>& biases, const std::vector<int>& widths, int group,
                        int rest, mx::array indices, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  StackForm form = {widths, group, rest, x_bits};
  auto inputs = form.inputs(x, weights, scales, biases, 3, s);
  const auto pairs = broadcast(x, indices, s);
  inputs.push_back(indices);
  return finish(x, pairs, scales.shape(1), std::make_shared<StackExperts>(s, vectors_of_pairs(x, pairs), form),
                std::move(inputs));
}

mx::array dense_experts(const mx::array& x, const mx::array& weight, mx::array indices, int x_bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(weight.ndim() == 3, "weights must be a matrix for each expert");
  type_of(weight);
  check_x_bits(x_bits);
  check_x(x, weight.shape(2));
  const auto pairs = broadcast(x, indices, s);
  return finish(x, pairs, weight.shape(1), std::make_shared<DenseExperts>(s, vectors_of_pairs(x, pairs), x_bits),
                {in_float32(x, s), in_rows(weight, s), indices});
}

typedef void (*OfRows)(const float* x, int64_t rows, int64_t count, float* y);

// A reduction of each row of logits or log-probabilities.
class Reading : public Operation {
 public:
  Reading(mx::Stream s, OfRows read) : Operation(s), read_(read) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int64_t count = inputs[0].shape(-1), rows = static_cast<int64_t>(inputs[0].size()) / count;
    dispatch(inputs, outputs[0], [=, read = read_](const float* x, float* y) { read(x, rows, count, y); });
  }

  const char* name() const override { return "GearbxReading"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return read_ == static_cast<const Reading&>(other).read_;
  }

 private:
  OfRows read_;
};

// `each` numbers per row (..., each); 0: one, without a separate axis.
template <OfRows read, int each>
mx::array reading(const mx::array& x) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(x.ndim() >= 1 && x.size() > 0, "there must be logits or log-probabilities of at least one token");
  auto shape = x.shape();
  shape.pop_back();
  if (each) shape.push_back(each);
  return mx::array(shape, mx::float32, std::make_shared<Reading>(s, read), {in_float32(x, s)});
}

// The token sampled from a row of logits (gearbx_sampled); the key (2,) is read together with the row.
class Sampled : public Operation {
 public:
  Sampled(mx::Stream s, gearbx_sampling how) : Operation(s), how_(how) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int64_t count = inputs[0].shape(-1);
    enqueue<uint32_t>(inputs, outputs[0],
                      [count, given = how_, x = Rows(inputs[0]), key = inputs[1].data<uint32_t>(),
                       second = inputs[1].strides(0)](uint32_t* y) {
                        std::vector<float> copy;
                        gearbx_sampling how = given;
                        how.key[0] = key[0], how.key[1] = key[second];
                        *y = static_cast<uint32_t>(gearbx_sampled(x.read(copy), count, &how, nullptr));
                      });
  }

  const char* name() const override { return "GearbxSampled"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  gearbx_sampling how_;
};

mx::array sampled_token_of(const mx::array& logprobs, const mx::array& key, float temp, float top_p, float min_p,
                           int top_k) {
  const auto s = mx::default_stream(mx::Device::cpu);
  require(logprobs.ndim() == 2 && logprobs.shape(0) == 1 && logprobs.size() > 0, "there must be one row");
  require(key.dtype() == mx::uint32 && key.ndim() == 1 && key.size() == 2, "a key has two numbers of uint32");
  require(temp > 0, "the temperature must be above 0");
  const gearbx_sampling how = {temp, top_p, min_p, top_k, {0, 0}};
  return mx::array({1}, mx::uint32, std::make_shared<Sampled>(s, how), {in_float32(logprobs, s), key});
}

// For timing, and therefore computed at once. `words`: evaluated, contiguous uint32.
uint32_t read_sum(const mx::array& words) {
  require(words.dtype() == mx::uint32 && words.is_available() && words.flags().row_contiguous,
          "words must be evaluated, contiguous uint32");
  return gearbx_read_sum(words.data<uint32_t>(), static_cast<int64_t>(words.size()));
}

}  // namespace
}  // namespace gearbx

NB_MODULE(_gearbx_cpu, m) {
  using namespace gearbx;
  m.def("stack_matvec", &stack_matvec, "x"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a,
        "rest"_a = 0, "x_bits"_a = 0);
  m.def("symmetric_matvec", &symmetric_matvec, "x"_a, "weight"_a, "scales"_a, "bits"_a, "x_bits"_a = 0);
  m.def("dense_matvec", &dense_matvec, "x"_a, "weight"_a, "x_bits"_a = 0);
  m.def("entropy_bits", &reading<gearbx_entropy_bits, 0>, "logprobs"_a);
  m.def("logsumexp", &reading<gearbx_logsumexp, 1>, "logits"_a);
  m.def("choices", &reading<gearbx_choices, 5>, "logits"_a);
  m.def("sampled", &sampled_token_of, "logprobs"_a, "key"_a, "temp"_a, "top_p"_a, "min_p"_a, "top_k"_a);
  m.def("stack_experts", &stack_experts, "x"_a, "weights"_a, "scales"_a, "biases"_a, "widths"_a, "group"_a,
        "rest"_a, "indices"_a, "x_bits"_a = 0);
  m.def("dense_experts", &dense_experts, "x"_a, "weight"_a, "indices"_a, "x_bits"_a = 0);
  bind_codebooks(m);
  bind_gguf(m);
  bind_mapped(m);
  bind_exact_encode(m);
  bind_exact(m);
  bind_attention(m);
  bind_fused(m);
  bind_blocks(m);
  m.def("read_sum", &read_sum, "words"_a);
  m.def("panel_rows", &gearbx_panel_rows);
  m.def("rounds_to_bf16", [] { return gearbx_rounds_to_bf16() != 0; });
  m.def("tiles", &gearbx_tiles);
  m.def("threads", &gearbx_threads);
}
