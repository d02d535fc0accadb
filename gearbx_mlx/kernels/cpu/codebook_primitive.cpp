// Products over codebooks as operations of MLX's graph.

#include "codebook.h"
#include "graph.h"

namespace gearbx {
namespace {

enum { X, WEIGHT, CODEBOOK, OUTLIERS, COLUMNS, OFFSETS, ENTRIES, SCALES, MIDPOINTS };  // inputs; three are a library's

class CodebookMatvec : public Operation {
 public:
  CodebookMatvec(mx::Stream s, int bits) : Operation(s), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto halves = [&](int i) { return static_cast<const uint16_t*>(inputs[i].data<void>()); };
    gearbx_codebook m = {};
    m.rows = outputs[0].shape(-1);
    m.columns = inputs[X].shape(-1);
    m.bits = bits_;
    m.row_words = static_cast<int64_t>(inputs[WEIGHT].nbytes()) / 4 / m.rows;
    m.weights = static_cast<const uint32_t*>(inputs[WEIGHT].data<void>());
    m.codebook = halves(CODEBOOK);
    m.outliers = halves(OUTLIERS);
    m.outlier_columns = halves(COLUMNS);
    m.outlier_offsets = inputs[OFFSETS].data<uint32_t>();
    if (inputs.size() > ENTRIES) {
      m.entries = inputs[ENTRIES].data<uint8_t>();
      m.scales = halves(SCALES);
      m.midpoints = halves(MIDPOINTS);
    }
    dispatch(inputs, outputs[0], [m, n = vectors_of(inputs[0])](const float* x, float* y) {
      gearbx_codebook_product(&m, x, n, y);
    });
  }

  const char* name() const override { return "GearbxCodebookMatvec"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return bits_ == static_cast<const CodebookMatvec&>(other).bits_;
  }

 private:
  int bits_;
};

void require_array(const mx::array& a, mx::Dtype dtype, const mx::Shape& shape, const char* what) {
  require(a.dtype() == dtype && a.shape() == shape, what);
}

mx::array product(const std::vector<mx::array>& arrays, int rows, int bits) {
  const auto s = mx::default_stream(mx::Device::cpu);
  const mx::array &x = arrays[X], &outliers = arrays[OUTLIERS], &columns = arrays[COLUMNS];
  require(outliers.dtype() == mx::float16 && columns.dtype() == mx::uint16 && outliers.ndim() == 1 &&
              outliers.shape() == columns.shape(),
          "outliers must be float16 values with as many uint16 columns");
  require_array(arrays[OFFSETS], mx::uint32, {rows + 1}, "there must be an outlier offset for each row, and one more");
  check_x(x, x.shape(-1));
  std::vector<mx::array> inputs = {in_float32(x, s)};
  for (size_t i = WEIGHT; i < arrays.size(); i++) inputs.push_back(in_rows(arrays[i], s));
  return output(x.shape(), rows, std::make_shared<CodebookMatvec>(s, bits), std::move(inputs));
}

mx::array codebook_matvec(const mx::array& x, const mx::array& weight, const mx::array& codebook,
                          const mx::array& outliers, const mx::array& columns, const mx::array& offsets, int bits) {
  require(bits >= 2 && bits <= 6, "codebooks have codes of 2 to 6 bits");
  require(weight.ndim() == 2 && x.ndim() >= 1, "packed codes must be a matrix");
  const int codes = bits == 5 ? 6 : 32 / bits;
  const auto row_bytes = static_cast<int64_t>(weight.shape(1)) * static_cast<int64_t>(weight.itemsize());
  require(weight.dtype() == (bits == 5 ? mx::uint16 : mx::uint32) && row_bytes == (x.shape(-1) + codes - 1) / codes * 4,
          "packed codes do not fit the width of x");
  const int rows = weight.shape(0);
  require_array(codebook, mx::float16, {rows, 1 << bits}, "there must be a float16 codebook for each row");
  return product({x, weight, codebook, outliers, columns, offsets}, rows, bits);
}

mx::array library_matvec(const mx::array& x, const mx::array& weight, const mx::array& library,
                         const mx::array& outliers, const mx::array& columns, const mx::array& offsets,
                         const mx::array& entries, const mx::array& scales, const mx::array& midpoints, int bits) {
  require(bits >= 2 && bits <= 4, "libraries have codes of 2 to 4 bits");
  require(weight.ndim() == 2 && x.ndim() >= 1, "packed codes must be a matrix");
  const int rows = weight.shape(0), groups = (x.shape(-1) + 127) / 128;
  require_array(weight, mx::uint32, {rows, groups * 4 * bits}, "packed codes do not fit the width of x");
  require_array(library, mx::float16, {32, 1 << bits}, "a library must have 32 float16 codebooks");
  require_array(entries, mx::uint8, {rows, groups}, "there must be a uint8 entry for each group");
  require_array(scales, mx::float16, {rows, groups}, "there must be a float16 scale for each group");
  require_array(midpoints, mx::float16, {rows, groups}, "there must be a float16 mid-point for each group");
  return product({x, weight, library, outliers, columns, offsets, entries, scales, midpoints}, rows, bits);
}

}  // namespace

void bind_codebooks(nb::module_& m) {
  m.def("codebook_matvec", &codebook_matvec, "x"_a, "weight"_a, "codebook"_a, "outliers"_a, "outlier_columns"_a,
        "outlier_offsets"_a, "bits"_a);
  m.def("library_matvec", &library_matvec, "x"_a, "weight"_a, "library"_a, "outliers"_a, "outlier_columns"_a,
        "outlier_offsets"_a, "entries"_a, "scales"_a, "midpoints"_a, "bits"_a);
}

}  // namespace gearbx
