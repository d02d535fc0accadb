// Matmuls over codebooks as operations of MLX's graph.

#include "codebook.h"
#include "graph.h"

namespace gearbx {
namespace {

enum { X, WEIGHT, CODEBOOK, OUTLIERS, COLUMNS, OFFSETS, ENTRIES, SCALES, MIDPOINTS };  // the last three: of libraries

// The matrix, or the first expert's.
gearbx_codebook matrix_of(const std::vector<mx::array>& inputs, bool library, int bits, int rows) {
  const auto halves = [&](int i) { return static_cast<const uint16_t*>(inputs[i].data<void>()); };
  const int words_of_bits = bits == 5 ? 2 : 1;  // 5-bit codes have 16-bit words
  gearbx_codebook m = {};
  m.rows = rows;
  m.columns = inputs[X].shape(-1);
  m.bits = bits;
  m.row_words = inputs[WEIGHT].shape(-1) / words_of_bits;
  m.weights = static_cast<const uint32_t*>(inputs[WEIGHT].data<void>());
  m.codebook = halves(CODEBOOK);
  m.outliers = halves(OUTLIERS);
  m.outlier_columns = halves(COLUMNS);
  m.outlier_offsets = inputs[OFFSETS].data<uint32_t>();
  m.most_outliers = inputs[OUTLIERS].shape(-1);
  if (library) {
    m.entries = inputs[ENTRIES].data<uint8_t>();
    m.scales = halves(SCALES);
    m.midpoints = halves(MIDPOINTS);
  }
  return m;
}

class CodebookMatvec : public Operation {
 public:
  CodebookMatvec(mx::Stream s, bool library, int bits) : Operation(s), library_(library), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const gearbx_codebook m = matrix_of(inputs, library_, bits_, outputs[0].shape(-1));
    dispatch(inputs, outputs[0], [m, n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_codebook_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxCodebookMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const CodebookMatvec&>(other);
    return library_ == o.library_ && bits_ == o.bits_;
  }

 private:
  bool library_;
  int bits_;
};

class CodebookExperts : public Experts {
 public:
  CodebookExperts(mx::Stream s, std::vector<int32_t> vectors, bool library, int bits)
      : Experts(s, std::move(vectors)), library_(library), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    multiply(inputs, outputs[0], matrix_of(inputs, library_, bits_, outputs[0].shape(-1)), gearbx_codebook_experts);
  }

  const char* name() const override { return "GearbxCodebookExperts"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const CodebookExperts&>(other);
    return library_ == o.library_ && bits_ == o.bits_ && vectors_ == o.vectors_;
  }

 private:
  bool library_;
  int bits_;
};

// Requires an array of this type and shape, after the number of experts if there are experts.
void require_array(const mx::array& a, mx::Dtype dtype, mx::Shape shape, const mx::Shape& experts, const char* what) {
  shape.insert(shape.begin(), experts.begin(), experts.end());
  require(a.dtype() == dtype && a.shape() == shape, what);
}

// Validates the arrays of a matrix or of experts, and makes their rows contiguous. Returns the inputs after x.
std::vector<mx::array> checked(const mx::array& x, const std::vector<mx::array>& arrays, int bits, int dimensions,
                               mx::Stream s) {
  require(arrays.size() == OFFSETS || arrays.size() == MIDPOINTS, "there must be 5 arrays, or 8 of a library");
  const bool library = arrays.size() == MIDPOINTS;
  const mx::array &weight = arrays[WEIGHT - 1], &outliers = arrays[OUTLIERS - 1], &columns = arrays[COLUMNS - 1];
  require(bits >= 2 && bits <= (library ? 4 : 6),
          library ? "libraries have codes of 2 to 4 bits" : "codebooks have codes of 2 to 6 bits");
  require(static_cast<int>(weight.ndim()) == dimensions && x.ndim() >= 1,
          dimensions == 2 ? "packed codes must be a matrix" : "packed codes must be a matrix for each expert");
  const int rows = weight.shape(-2), groups = (x.shape(-1) + GEARBX_CODEBOOK_GROUP - 1) / GEARBX_CODEBOOK_GROUP;
  const mx::Shape experts(weight.shape().begin(), weight.shape().end() - 2);
  const auto has = [&](int i, mx::Dtype dtype, mx::Shape shape, const char* what) {
    require_array(arrays[i - 1], dtype, std::move(shape), experts, what);
  };
  const int codes = bits == 5 ? 6 : 32 / bits, words = (x.shape(-1) + codes - 1) / codes * (bits == 5 ? 2 : 1);
  has(WEIGHT, bits == 5 ? mx::uint16 : mx::uint32, {rows, library ? groups * 4 * bits : words},
      "packed codes do not fit the width of x");
  if (library) {
    has(CODEBOOK, mx::float16, {GEARBX_CODEBOOK_LIBRARY, 1 << bits}, "a library must have 32 float16 codebooks");
    has(ENTRIES, mx::uint8, {rows, groups}, "there must be a uint8 entry for each group");
    has(SCALES, mx::float16, {rows, groups}, "there must be a float16 scale for each group");
    has(MIDPOINTS, mx::float16, {rows, groups}, "there must be a float16 midpoint for each group");
  } else {
    has(CODEBOOK, mx::float16, {rows, 1 << bits}, "there must be a float16 codebook for each row");
  }
  require(outliers.ndim() == experts.size() + 1, "outliers must be float16 values with as many uint16 columns");
  has(OUTLIERS, mx::float16, {outliers.shape(-1)}, "outliers must be float16 values with as many uint16 columns");
  has(COLUMNS, mx::uint16, {outliers.shape(-1)}, "outliers must be float16 values with as many uint16 columns");
  has(OFFSETS, mx::uint32, {rows + 1}, "there must be an outlier offset for each row, and one more");
  check_x(x, x.shape(-1));
  std::vector<mx::array> inputs = {in_float32(x, s)};
  for (const mx::array& array : arrays) inputs.push_back(in_rows(array, s));
  return inputs;
}

mx::array matvec(const mx::array& x, const std::vector<mx::array>& arrays, int bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  auto inputs = checked(x, arrays, bits, 2, s);
  return output(x.shape(), arrays[0].shape(0), std::make_shared<CodebookMatvec>(s, arrays.size() >= MIDPOINTS, bits),
                std::move(inputs));
}

mx::array experts(const mx::array& x, const std::vector<mx::array>& arrays, int bits, mx::array indices) {
  const auto s = mx::default_stream(mx::Device::cpu);
  auto inputs = checked(x, arrays, bits, 3, s);
  const auto pairs = broadcast(x, indices, s);
  inputs.push_back(indices);
  const bool library = arrays.size() >= MIDPOINTS;
  return finish(x, pairs, arrays[0].shape(1),
                std::make_shared<CodebookExperts>(s, vectors_of_pairs(x, pairs), library, bits), std::move(inputs));
}

}  // namespace

void bind_codebooks(nb::module_& m) {
  m.def("codebook_matvec", &matvec, "x"_a, "arrays"_a, "bits"_a);
  m.def("codebook_experts", &experts, "x"_a, "arrays"_a, "bits"_a, "indices"_a);
}

}  // namespace gearbx
