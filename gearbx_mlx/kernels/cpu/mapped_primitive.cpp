// Arrays over a mapped file: without copies, and only used pages take memory.
//
// The mapping is private: a write to an array gets new pages, and the file keeps its bytes. Each array has its own
// mapping, whose memory is free after the array's end. If a different process truncates the file, this process ends
// with a one-line message instead of only a signal.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>

#include "graph.h"

namespace gearbx {
namespace {

std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};  // range of all mappings so far

void end_with_a_line(int, siginfo_t* info, void*) {
  const auto place = reinterpret_cast<uintptr_t>(info->si_addr);
  if (place < lowest.load() || place >= highest.load()) {
    signal(SIGBUS, SIG_DFL);  // the same access fails again, with the default action
    return;
  }
  static const char line[] = "error: a file of the model was truncated during use; start again\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line, sizeof line - 1);
  _exit(1);
}

void watch(uintptr_t begin, uintptr_t end) {
  static const bool handled = [] {
    struct sigaction action = {};
    action.sa_sigaction = end_with_a_line;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGBUS, &action, nullptr) == 0;
  }();
  (void)handled;
  for (uintptr_t now = lowest.load(); begin < now && !lowest.compare_exchange_weak(now, begin);) {
  }
  for (uintptr_t now = highest.load(); end > now && !highest.compare_exchange_weak(now, end);) {
  }
}

// MLX's allocator notes the size of a buffer after its pointer, at this place.
size_t before_data() {
  static const size_t bytes = [] {
    auto buffer = mx::allocator::allocator().malloc(64);
    const auto found = static_cast<char*>(buffer.raw_ptr()) - static_cast<char*>(buffer.ptr());
    mx::allocator::allocator().free(buffer);
    return static_cast<size_t>(found);
  }();
  return bytes;
}

// An array of a shape and type, from byte `offset` of an open file. Throws if this version of MLX, or the alignment of
// the array, does not allow it.
mx::array map_array(int file, int64_t offset, const std::vector<int>& lengths, mx::Dtype dtype) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), note = before_data(), at = static_cast<size_t>(offset);
  const mx::Shape shape(lengths.begin(), lengths.end());
  size_t size = dtype.size();
  for (int length : shape) size *= static_cast<size_t>(length);
  require(note == 0 || note == sizeof(size_t), "this version of MLX has an unknown layout of buffers");
  require(size > 0 && offset >= static_cast<int64_t>(note) && at % dtype.size() == 0, "the array is misaligned for its type");
  const size_t first = (at - note) / page * page, length = at + size - first;
  void* pages = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, static_cast<off_t>(first));
  require(pages != MAP_FAILED, "the system cannot map the file");
  char* data = static_cast<char*>(pages) + (at - first);
  watch(reinterpret_cast<uintptr_t>(pages), reinterpret_cast<uintptr_t>(pages) + length);
  if (note) std::memcpy(data - note, &size, sizeof size);  // into a private page
  auto unmap = [pages, length](mx::allocator::Buffer) { munmap(pages, length); };
  return mx::array(mx::allocator::Data(mx::allocator::Buffer(data - note), unmap), shape, dtype);
}

// Let the system drop unwritten pages of mapped bytes; the next use reads them again.
void forget_bytes(const void* bytes, size_t count) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes), end = begin + count;
  const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void forget_pages(const mx::array& array) { forget_bytes(array.data<void>(), array.nbytes()); }

// Copies of mapped arrays, contiguous in one allocation, made by all cores. Its pages are large if available: weights
// that each token reads are read faster from them. Mapped pages are released once they are copied.
std::vector<mx::array> in_large_pages(const std::vector<mx::array>& arrays) {
  constexpr size_t LARGE = size_t{1} << 21, APART = 64, PIECE = size_t{1} << 22;
  const size_t note = before_data();
  require(note == 0 || note == sizeof(size_t), "this version of MLX has an unknown layout of buffers");
  struct Piece {
    size_t to;
    const char* from;
    size_t bytes;
  };
  std::vector<Piece> pieces;
  std::vector<size_t> places;
  size_t size = 0;
  for (const auto& array : arrays) {
    require_evaluated(array, array.dtype(), array.shape(), "arrays must be evaluated");
    size = (size + APART) / APART * APART + APART;
    places.push_back(size);
    for (size_t done = 0; done < array.nbytes(); done += PIECE)
      pieces.push_back({size + done, static_cast<const char*>(array.data<void>()) + done, std::min(PIECE, array.nbytes() - done)});
    size += array.nbytes();
  }
  const size_t length = size + LARGE;
  void* pages = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(pages != MAP_FAILED, "the system has no more memory");
  const std::shared_ptr<void> memory(pages, [length](void* all) { munmap(all, length); });
  char* first = static_cast<char*>(pages) + (LARGE - reinterpret_cast<uintptr_t>(pages) % LARGE) % LARGE;
#ifdef MADV_HUGEPAGE
  madvise(first, size, MADV_HUGEPAGE);
#endif
  std::atomic<size_t> next{0};
  const auto copy = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) {
      std::memcpy(first + pieces[i].to, pieces[i].from, pieces[i].bytes);
      forget_bytes(pieces[i].from, pieces[i].bytes);
    }
  };
  std::vector<std::thread> threads;
  try {
    for (unsigned i = 1; i < std::thread::hardware_concurrency(); i++) threads.emplace_back(copy);
  } catch (const std::system_error&) {  // the system refuses more threads
  }
  copy();
  for (auto& thread : threads) thread.join();
  std::vector<mx::array> copies;
  for (size_t i = 0; i < arrays.size(); i++) {
    char* data = first + places[i];
    const size_t bytes = arrays[i].nbytes();
    if (note) std::memcpy(data - note, &bytes, sizeof bytes);
    const auto keep = [memory](mx::allocator::Buffer) {};  // freed with the last of its arrays
    copies.emplace_back(mx::allocator::Data(mx::allocator::Buffer(data - note), keep), arrays[i].shape(), arrays[i].dtype());
  }
  return copies;
}

}  // namespace

void bind_mapped(nb::module_& m) {
  m.def("map_array", &map_array, "file"_a, "offset"_a, "shape"_a, "dtype"_a);
  m.def("forget_pages", &forget_pages, "array"_a);
  // Whether two arrays of Python are one of MLX, with one memory.
  m.def("is_same", [](const mx::array& a, const mx::array& b) { return a.id() == b.id(); }, "a"_a, "b"_a);
  m.def("in_large_pages", &in_large_pages, "arrays"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gearbx
