// The memory bandwidth of this machine, to compare kernels with: a plain sum on all threads.

#include <atomic>

#include "matvec.h"
#include "pool.h"

namespace gearbx {
namespace {

constexpr int64_t PIECE = 1 << 18;  // words of 4 bytes: 1 MiB

struct Job {
  const uint32_t* words;
  int64_t count;
  std::atomic<uint32_t>* total;
};

void do_piece(const void* context, int piece) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t first = piece * PIECE;
  const int64_t end = first + PIECE < job.count ? first + PIECE : job.count;
  uint32_t sum = 0;
  for (int64_t i = first; i < end; i++) sum += job.words[i];
  job.total->fetch_add(sum, std::memory_order_relaxed);
}

}  // namespace
}  // namespace gearbx

extern "C" uint32_t gearbx_read_sum(const uint32_t* words, int64_t count) {
  using namespace gearbx;
  std::atomic<uint32_t> total{0};
  const Job job = {words, count, &total};
  share_out(static_cast<int>((count + PIECE - 1) / PIECE), do_piece, &job);
  return total.load();
}
