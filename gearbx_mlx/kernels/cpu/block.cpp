#include "block.h"

#include <cstring>
#include <memory>

#include "simd.h"
#include "split.h"

namespace gearbx {
namespace {

constexpr int64_t KEPT = 1 << 20;           // numbers of scratch memory that a thread keeps between blocks

// Temporary memory of a block, not filled with zeros.
class Scratch {
 public:
  explicit Scratch(int64_t numbers) {
    static thread_local std::unique_ptr<float[]> kept;
    if (numbers > KEPT) own_.reset(new float[static_cast<size_t>(numbers)]);
    else if (!kept) kept.reset(new float[static_cast<size_t>(KEPT)]);
    next_ = own_ ? own_.get() : kept.get();
  }

  float* take(int64_t numbers) {
    float* taken = next_;
    next_ += numbers;
    return taken;
  }

 private:
  std::unique_ptr<float[]> own_;
  float* next_;
};

template <class Bias>
void add_bias(const Bias* bias, int64_t rows, int64_t vectors, float* y) {
  for (int64_t v = 0; v < vectors; v++, y += rows)
    for (int64_t i = 0; i < rows; i++) y[i] += to_float(bias[i]);
}

void add_bias(const Linear& linear, int64_t vectors, float* y) {
  const int64_t rows = linear.rows();
  if (!linear.bias) return;
  if (linear.bias_type == GEARBX_BFLOAT16) return add_bias(static_cast<const Bf16*>(linear.bias), rows, vectors, y);
  if (linear.bias_type == GEARBX_FLOAT16) return add_bias(static_cast<const Fp16*>(linear.bias), rows, vectors, y);
  add_bias(static_cast<const float*>(linear.bias), rows, vectors, y);
}

struct Product {
  const float* x;
  int64_t vectors;
  float* y;
  void operator()(const gearbx_stack& m) const { gearbx_stack_product(&m, x, vectors, y); }
  void operator()(const gearbx_dense& m) const { gearbx_dense_product(&m, x, vectors, y); }
  void operator()(const gearbx_exact& m) const { gearbx_exact_product(&m, x, vectors, y); }
};

constexpr size_t MAX_MATRICES = 3;

// Computes the products of all layers at once, if all have matrices of this kind.
template <class Matrix>
bool multiply_together(void (*product)(const Matrix* const*, int, const float*, int64_t, float* const*),
                       const std::vector<Linear>& linears, const float* x, int64_t vectors, float* const* y) {
  const Matrix* matrices[MAX_MATRICES];
  for (size_t i = 0; i < linears.size(); i++)
    if (!(matrices[i] = std::get_if<Matrix>(&linears[i].matrix))) return false;
  product(matrices, static_cast<int>(linears.size()), x, vectors, y);
  return true;
}

// The results of several matrices for the same x, in sequence: y (vectors, rows) of each.
void multiply(const std::vector<Linear>& linears, const float* x, int64_t vectors, float* y) {
  float* results[MAX_MATRICES];
  for (size_t i = 0; i < linears.size(); y += vectors * linears[i++].rows()) results[i] = y;
  const bool done = multiply_together(gearbx_stack_products, linears, x, vectors, results) ||
                    multiply_together(gearbx_dense_products, linears, x, vectors, results) ||
                    multiply_together(gearbx_exact_products, linears, x, vectors, results);
  for (size_t i = 0; i < linears.size(); i++)
    done ? add_bias(linears[i], vectors, results[i]) : multiply(linears[i], x, vectors, results[i]);
}

// Results of the projections to one kind of heads: `first`, and the distance from vector to vector.
struct Projected {
  float* first;
  int64_t stride;
};

void norm_heads(const Norm& by, const Projected& from, int64_t vectors, int64_t heads, int64_t width) {
  if (!by.weight) return;
  if (from.stride == heads * width) return norm(by, from.first, vectors * heads, width, from.first);
  for (float* x = from.first; x < from.first + vectors * from.stride; x += from.stride) norm(by, x, heads, width, x);
}

void copy_heads(const Positions& at, int64_t heads, int64_t width, const float* from, const int64_t (&strides)[3],
                const Heads& to) {
  for (int64_t b = 0; b < at.batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t t = 0; t < at.length; t++)
        std::memcpy(to.first + b * to.batch_stride + h * to.head_stride + t * width,
                    from + b * strides[0] + h * strides[1] + t * strides[2], static_cast<size_t>(width) * 4);
}

// scratch: numbers of these heads
void rotate(const Rotation& by, const Positions& at, const Projected& from, int64_t heads, int64_t width,
            float* scratch, const Heads& to) {
  const gearbx_rotation rotation = {{at.batch, heads, at.length, width},
                                    {at.length * from.stride, width, from.stride, 1},
                                    by.frequencies, by.dims, by.traditional, by.scale, at.offset, at.padding};
  gearbx_rope(&rotation, from.first, scratch);
  const int64_t head = at.length * width;
  copy_heads(at, heads, width, scratch, {heads * head, head, width}, to);
}

// sum = x + the branch's result (vectors, columns), normed first if the block does so.
void add(const float* x, const Norm& by, float* branch, int64_t vectors, int64_t columns, float* sum) {
  if (by.weight) norm(by, branch, vectors, columns, branch);
  for (int64_t i = 0; i < vectors * columns; i++) sum[i] = x[i] + branch[i];
}

// silu(gate) * up, or gelu(gate) * up, for each vector; `projected` is the output of multiply for block.gates.
void gate(const Block& block, const float* projected, int64_t vectors, float* y) {
  const int64_t hidden = block.hidden();
  const auto gated = block.gelu ? gearbx_geglu : gearbx_swiglu;
  if (block.gates.size() == 2) return gated(projected, projected + vectors * hidden, vectors * hidden, y);
  for (int64_t v = 0; v < vectors; v++, projected += 2 * hidden)
    gated(projected, projected + hidden, hidden, y + v * hidden);
}

}  // namespace

void multiply(const Linear& linear, const float* x, int64_t vectors, float* y) {
  std::visit(Product{x, vectors, y}, linear.matrix);
  add_bias(linear, vectors, y);
}

void norm(const Norm& by, const float* x, int64_t vectors, int64_t columns, float* y) {
  if (!by.plus_one) return gearbx_rms_norm(x, vectors, columns, by.weight, by.type, by.eps, y);
  static thread_local std::vector<float> multiplier;
  multiplier.resize(static_cast<size_t>(columns));
  gearbx_add_one(by.weight, columns, by.type, multiplier.data());
  gearbx_rms_norm(x, vectors, columns, multiplier.data(), GEARBX_FLOAT32, by.eps, y);
}

int64_t rows_of(const std::vector<Linear>& linears) {
  int64_t rows = 0;
  for (const Linear& linear : linears) rows += linear.rows();
  return rows;
}

Linear some_rows(const Linear& linear, int64_t first, int64_t count) {
  Linear some = linear;
  std::visit([&](auto& m) { SkipRows{first}(m), m.rows = count; }, some.matrix);
  advance(some.bias, first * size_of(some.bias_type));
  return some;
}

int64_t rows_at_once(const Linear& linear) {
  if (const auto* stack = std::get_if<gearbx_stack>(&linear.matrix)) return std::max(stack->panel_rows, 1);
  if (const auto* exact = std::get_if<gearbx_exact>(&linear.matrix)) return std::max(exact->panel_rows, 1);
  return 1;
}

int64_t Linear::rows() const {
  return std::visit([](const auto& m) { return m.rows; }, matrix);
}

int64_t Linear::inputs() const {
  if (const auto* stack = std::get_if<gearbx_stack>(&matrix)) return inputs_of(*stack);
  return std::visit([](const auto& m) { return m.columns; }, matrix);
}

void project(const Block& block, const Positions& at, const float* x, Heads queries, Heads keys, Heads values,
             const float* embedded) {
  const int64_t n = at.count(), width = block.width, rows = rows_of(block.projections), size = block.inputs();
  Scratch scratch(n * (block.projected() + rows + block.heads * width));
  float* normed = scratch.take(n * block.projected());
  if (!embedded) norm(block.before_attention, x, n, size, normed);
  for (int64_t i = 0; embedded && i < n; i++) {
    norm(block.of_embedding, embedded + i * size, 1, size, normed + 2 * i * size);
    norm(block.before_attention, x + i * size, 1, size, normed + (2 * i + 1) * size);
  }
  float* y = scratch.take(n * rows);
  multiply(block.projections, normed, n, y);

  const int64_t own = block.heads * width, shared = block.key_heads * width;
  const bool joined = block.projections.size() == 1;
  const int64_t each_first = joined ? 1 : n;  // from the first queries to the first keys: their rows, or n times these
  const Projected q = {y, joined ? rows : own}, k = {y + each_first * own, joined ? rows : shared},
                  v = {y + each_first * (own + shared), joined ? rows : shared};
  norm_heads(block.of_queries, q, n, block.heads, width);
  norm_heads(block.of_keys, k, n, block.key_heads, width);
  float* turned = scratch.take(n * own);
  rotate(block.rotation, at, q, block.heads, width, turned, queries);
  rotate(block.rotation, at, k, block.key_heads, width, turned, keys);
  copy_heads(at, block.key_heads, width, v.first, {at.length * v.stride, width, v.stride}, values);
}

void finish(const Block& block, const gearbx_attention& attention, const float* x, const float* queries,
            const float* keys, const float* values, float* y) {
  const int64_t n = attention.batch * attention.length, size = block.inputs(), width = block.heads * block.width;
  const int64_t hidden = block.hidden();
  Scratch scratch(n * (2 * width + 2 * size + rows_of(block.gates) + hidden));
  float *seen = scratch.take(n * width), *by_vector = seen;
  gearbx_attend(&attention, queries, keys, values, seen);
  if (attention.length > 1) {  // (batch, heads, length, width) to (batch, length, heads, width)
    by_vector = scratch.take(n * width);
    const int64_t length = attention.length;
    copy_heads({attention.batch, block.heads, 0}, length, block.width, seen,
               {length * width, block.width, length * block.width}, {by_vector, length * width, width});
  }
  float *branch = scratch.take(n * size), *sum = scratch.take(n * size);
  multiply(block.output, by_vector, n, branch);
  add(x, block.after_attention, branch, n, size, sum);

  norm(block.before_mlp, sum, n, size, branch);
  float *projected = scratch.take(n * rows_of(block.gates)), *gated = scratch.take(n * hidden);
  multiply(block.gates, branch, n, projected);
  gate(block, projected, n, gated);
  multiply(block.down, gated, n, branch);
  add(sum, block.after_mlp, branch, n, size, y);
}

gearbx_attention attention_over(const Block& block, const Positions& at, int64_t room, bool causal) {
  gearbx_attention form = {};
  form.batch = at.batch;
  form.heads = block.heads;
  form.shared = block.heads / block.key_heads;
  form.length = at.length;
  form.keys = at.offset + at.length;
  form.width = block.width;
  form.scale = block.scale;
  form.causal = causal;
  for (auto* strides : {form.key_strides, form.value_strides}) {
    strides[0] = block.key_heads * room * block.width;
    strides[1] = room * block.width;
    strides[2] = block.width;
  }
  form.query_strides[0] = block.heads * at.length * block.width;
  form.query_strides[1] = at.length * block.width;
  form.query_strides[2] = block.width;
  return form;
}

void run_block(const Block& block, const Positions& at, const gearbx_attention& attention, const Entries& entries,
               const float* x, float* y, const float* embedded) {
  static thread_local std::vector<float> queries;
  queries.resize(static_cast<size_t>(at.count() * block.heads * block.width));
  const int64_t head = entries.room * block.width, all = block.key_heads * head, first = at.offset * block.width;
  project(block, at, x, {queries.data(), attention.query_strides[0], attention.query_strides[1]},
          {entries.keys + first, all, head}, {entries.values + first, all, head}, embedded);
  finish(block, attention, x, queries.data(), entries.keys, entries.values, y);
}

}  // namespace gearbx
