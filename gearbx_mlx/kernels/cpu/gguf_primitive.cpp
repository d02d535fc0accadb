// Tensors of a GGUF file as arrays that are read when they are evaluated: all cores read pieces and unpack them.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <tuple>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "gguf.h"
#include "graph.h"
#include "pool.h"

namespace gearbx {
namespace {

// The tensor at byte `place` of an open file. It has no inputs, so it is computed at once and not on the stream, where an
// error would end the process.
class UnpackGguf : public mx::Primitive {
 public:
  UnpackGguf(mx::Stream s, std::shared_ptr<const int> file, const GgufType* type, int64_t place)
      : Primitive(s), file_(std::move(file)), type_(type), place_(place) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    constexpr int64_t PIECE_BYTES = 1 << 17;
    for (auto& out : outputs) out.set_data(mx::allocator::malloc(out.nbytes()));
    const bool in_codes = outputs.size() == 3;
    const auto weights = static_cast<int64_t>(in_codes ? outputs[1].size() * 32 : outputs[0].size());
    const int64_t blocks = weights / type_->weights;
    Job job{*this, outputs, blocks, PIECE_BYTES / type_->bytes};
    const auto work = [](const void* context, int piece) {
      const auto* job = static_cast<const Job*>(context);
      const int64_t first = piece * job->step;
      if (!job->tensor.unpack(first, std::min(job->step, job->blocks - first), job->outputs)) job->failed = true;
    };
    share_out(static_cast<int>((blocks + job.step - 1) / job.step), work, &job);
    if (job.failed) throw std::runtime_error("the GGUF file was cut off while it was in use; start again");
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("GGUF files are unpacked on the CPU");
  }

  const char* name() const override { return "GearbxUnpackGguf"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  struct Job {
    const UnpackGguf& tensor;
    std::vector<mx::array>& outputs;
    int64_t blocks, step;  // of the tensor, of a piece
    mutable std::atomic<bool> failed{false};
  };

  bool unpack(int64_t first, int64_t count, std::vector<mx::array>& outputs) const {
    thread_local std::vector<uint8_t> blocks;
    const auto size = static_cast<size_t>(count * type_->bytes);
    blocks.resize(size);
    for (size_t done = 0; done < size;) {
      const int64_t from = place_ + first * type_->bytes + static_cast<int64_t>(done);
      const auto read = pread(*file_, blocks.data() + done, size - done, from);
      if (read <= 0) return false;
      done += static_cast<size_t>(read);
    }
    const int64_t weights = first * type_->weights, groups = weights / 32;
    if (outputs.size() == 1)
      unpack_gguf_weights(*type_, blocks.data(), count, outputs[0].dtype() == mx::bfloat16, outputs[0].data<uint16_t>() + weights);
    else
      unpack_gguf_codes(*type_, blocks.data(), count, outputs[0].data<uint8_t>() + weights * type_->bits / 8,
                        outputs[1].data<uint16_t>() + groups, outputs[2].data<uint16_t>() + groups);
    return true;
  }

  std::shared_ptr<const int> file_;
  const GgufType* type_;
  int64_t place_;
};

// The arrays of tensors, each given by its type, its first byte in an open file and its shape. They are codes, scales and
// biases if `in_codes`, and the type has codes; else weights of the type `dtype`.
std::vector<std::vector<mx::array>> unpack_gguf(
    int file, const std::vector<std::tuple<std::string, int64_t, std::vector<int>>>& tensors, bool in_codes, mx::Dtype dtype) {
  require(dtype == mx::float16 || dtype == mx::bfloat16, "weights become float16 or bfloat16");
  const std::shared_ptr<const int> own(new int(dup(file)), [](const int* opened) {
    close(*opened);
    delete opened;
  });
  require(*own >= 0, "the process has too many open files");
  const auto s = mx::default_stream(mx::Device::cpu);
  std::vector<std::vector<mx::array>> found;
  for (const auto& [name, place, lengths] : tensors) {
    const GgufType* type = find_gguf_type(name.c_str());
    require(type && !lengths.empty() && lengths.back() % type->weights == 0, "not the shape of a known type");
    const mx::Shape shape(lengths.begin(), lengths.end());
    const bool codes = in_codes && type->bits;
    auto words = shape, groups = shape;
    groups.back() /= 32;
    words.back() = groups.back() * type->bits;
    std::vector<mx::Shape> shapes = codes ? std::vector{words, groups, groups} : std::vector{shape};
    const std::vector<mx::Dtype> types = codes ? std::vector{mx::uint32, mx::float16, mx::float16} : std::vector{dtype};
    found.push_back(mx::array::make_arrays(std::move(shapes), types, std::make_shared<UnpackGguf>(s, own, type, place), {}));
  }
  return found;
}

}  // namespace

void bind_gguf(nb::module_& m) {
  m.def("unpack_gguf", &unpack_gguf, "file"_a, "tensors"_a, "in_codes"_a, "dtype"_a);
}

}  // namespace gearbx
