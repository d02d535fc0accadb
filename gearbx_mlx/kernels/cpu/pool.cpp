#include "pool.h"

#include <pthread.h>
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "matvec.h"

namespace gearbx {
namespace {

// The time for which a thread polls for work before it sleeps: about that between two layers of one token.
constexpr std::chrono::microseconds PATIENCE(50);
constexpr int MAX_THREADS = 256;

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls ready() and returns true when it does; false after PATIENCE. The clock is read only after some polls.
template <class Ready>
bool spin_until(Ready ready) {
  std::chrono::steady_clock::time_point end{};
  for (;;) {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      breathe();
    }
    const auto now = std::chrono::steady_clock::now();
    if (end == std::chrono::steady_clock::time_point{}) end = now + PATIENCE;
    if (now >= end) return false;
  }
}

// A Mac chooses cores by a thread's class: this class runs on performance cores while some are free.
void prefer_fast_cores() {
#if defined(__APPLE__)
  pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE, 0);
#endif
}

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), tickets_(new Ticket[static_cast<size_t>(threads)]) {
    try {
      for (int i = 1; i < threads; i++) std::thread(&Pool::serve, this, i).detach();
    } catch (const std::system_error&) {  // the system refuses more threads; the others take their pieces
    }
  }

  void run(int pieces, void (*work)(const void*, int), const void* context) {
    work_ = work;
    context_ = context;
    unfinished_.store(pieces, std::memory_order_relaxed);
    for (int t = 0, first = 0, end; t < threads_; t++, first = end) {
      end = static_cast<int>(int64_t{pieces} * (t + 1) / threads_);
      tickets_[t].value.store(static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first));
    }
    if (asleep_.load() > 0) {
      { std::lock_guard lock(mutex_); }
      awake_.notify_all();
    }
    const auto finished = [this] { return unfinished_.load() == 0; };
    take_pieces(0);
    if (spin_until(finished)) return;
    std::unique_lock lock(mutex_);
    waiting_.store(true);
    finished_.wait(lock, finished);
    waiting_.store(false);
  }

 private:
  // Every thread starts with its own range, since memory is read fastest in order; then it helps the others.
  //
  // A ticket is the range's end << 32 | next piece, in one word. A thread that adds 1 to it owns the piece that it
  // found, in any call of run(): work_ and context_ were written before the ticket, and cannot change before that piece
  // is finished. Threads read before they add, so that each adds at most once too often.
  static bool is_open(uint64_t ticket) { return (ticket & 0xffffffff) < ticket >> 32; }

  // Computes pieces until none is left, and counts them only at the end, because a count takes others' cache line.
  void take_pieces(int own) {
    int done = 0;
    for (int i = 0; i < threads_; i++) {
      std::atomic<uint64_t>& range = tickets_[(own + i) % threads_].value;
      while (is_open(range.load(std::memory_order_relaxed))) {
        const uint64_t ticket = range.fetch_add(1, std::memory_order_acquire);
        if (!is_open(ticket)) break;
        work_(context_, static_cast<int>(ticket & 0xffffffff));
        done++;
      }
    }
    if (done == 0 || unfinished_.fetch_sub(done) != done || !waiting_.load()) return;
    { std::lock_guard lock(mutex_); }
    finished_.notify_one();
  }

  void serve(int own) {
    prefer_fast_cores();
    const auto open = [this, own] { return is_open(tickets_[own].value.load()); };
    for (;;) {
      take_pieces(own);
      if (spin_until(open)) continue;
      std::unique_lock lock(mutex_);
      asleep_++;
      awake_.wait(lock, open);
      asleep_--;
    }
  }

  static constexpr size_t LINE = 64;  // bytes; writes to one line do not delay polls of the next

  struct alignas(LINE) Ticket {
    std::atomic<uint64_t> value{0};
  };

  const int threads_;
  const std::unique_ptr<Ticket[]> tickets_;
  void (*work_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  alignas(LINE) std::atomic<int> unfinished_{0};
  alignas(LINE) std::atomic<int> asleep_{0};
  std::atomic<bool> waiting_{false};  // whether the caller sleeps
  std::mutex mutex_;
  std::condition_variable awake_, finished_;
};

// Never destroyed, because its threads may run at the end of the process.
struct Shared {
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  Pool pool{thread_count()};
};

std::atomic<Shared*> shared{nullptr};
std::mutex* making = new std::mutex;

// A forked child has no such threads, and starts new ones.
void forget_threads() {
  shared.store(nullptr);
  making = new std::mutex;
}

const int registered = pthread_atfork(nullptr, nullptr, forget_threads);

Shared* get_shared() {
  Shared* now = shared.load(std::memory_order_acquire);
  if (now || registered != 0) return now;
  std::unique_lock lock(*making, std::try_to_lock);
  if (!lock) return nullptr;
  now = shared.load();
  if (!now) shared.store(now = new Shared);
  return now;
}

// Cores that justify a thread. Slow ones do not, because a call waits for its slowest piece (AION 6.2.5).
long count_cores(bool slow_ones_too) {
  const int fast = slow_ones_too ? 0 : fast_cores();
  return fast > 0 ? fast : static_cast<long>(std::thread::hardware_concurrency());
}

}  // namespace

int thread_count() {
  static const int count = [] {
    const char* variable = std::getenv("GEARBX_THREADS");
    const long named = variable ? std::strtol(variable, nullptr, 10) : 0;
    const long threads = named > 0 ? named : count_cores(variable && std::strcmp(variable, "all") == 0);
    return static_cast<int>(threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads);
  }();
  return count;
}

void share_out(int pieces, void (*work)(const void*, int), const void* context) {
  Shared* now = pieces > 1 && thread_count() > 1 ? get_shared() : nullptr;
  if (now && !now->busy.test_and_set(std::memory_order_acquire)) {
    now->pool.run(pieces, work, context);
    now->busy.clear(std::memory_order_release);
    return;
  }
  for (int i = 0; i < pieces; i++) work(context, i);
}

// The memory bandwidth of this machine, as reference for kernels: a plain sum on all threads.

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
