#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace gearbx {
namespace {

// How long a thread polls for work before it sleeps: about the time between two layers of one token.
constexpr std::chrono::microseconds PATIENCE(50);
constexpr int MAX_THREADS = 256;

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls ready() and returns true once it does; false after PATIENCE.
template <class Ready>
bool spin_until(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + PATIENCE;
  do {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      breathe();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; i++) std::thread(&Pool::serve, this).detach();
  }

  void run(int pieces, void (*work)(const void*, int), const void* context) {
    work_ = work;
    context_ = context;
    unfinished_.store(pieces, std::memory_order_relaxed);
    turn_++;
    ticket_.store(static_cast<uint64_t>(turn_) << 32 | static_cast<uint64_t>(pieces) << 16);
    if (asleep_.load() > 0) {
      { std::lock_guard lock(mutex_); }
      awake_.notify_all();
    }
    while (take_piece()) {
    }
    const auto finished = [this] { return unfinished_.load() == 0; };
    if (spin_until(finished)) return;
    std::unique_lock lock(mutex_);
    finished_.wait(lock, finished);
  }

 private:
  // A ticket is turn << 32 | pieces << 16 | next piece, in one word. So a piece that a thread takes belongs to the turn
  // that the thread has read, and work_ and context_ cannot change before that piece is finished.
  static bool is_open(uint64_t ticket) { return (ticket & 0xffff) < ((ticket >> 16) & 0xffff); }

  bool take_piece() {
    uint64_t ticket = ticket_.load();
    while (is_open(ticket)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
      work_(context_, static_cast<int>(ticket & 0xffff));
      if (unfinished_.fetch_sub(1) == 1) {
        { std::lock_guard lock(mutex_); }
        finished_.notify_one();
      }
      return true;
    }
    return false;
  }

  void serve() {
    const auto open = [this] { return is_open(ticket_.load()); };
    for (;;) {
      while (take_piece()) {
      }
      if (spin_until(open)) continue;
      std::unique_lock lock(mutex_);
      asleep_++;
      awake_.wait(lock, open);
      asleep_--;
    }
  }

  void (*work_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  uint32_t turn_ = 0;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> unfinished_{0};
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable awake_, finished_;
};

// Never destroyed, because its threads may run while the process ends. A forked child has no such threads and makes its
// own.
struct Shared {
  std::mutex busy;
  Pool pool{thread_count()};
  pid_t process = getpid();
};

std::atomic<Shared*> shared{nullptr};
std::mutex* making = new std::mutex;

Shared* get_shared() {
  Shared* now = shared.load();
  if (now && now->process == getpid()) return now;
  std::unique_lock lock(*making, std::try_to_lock);
  if (!lock) return nullptr;
  now = shared.load();
  if (!now || now->process != getpid()) shared.store(now = new Shared);
  return now;
}

}  // namespace

int thread_count() {
  static const int count = [] {
    const char* variable = std::getenv("GEARBX_THREADS");
    const long named = variable ? std::strtol(variable, nullptr, 10) : 0;
    const long cores = static_cast<long>(std::thread::hardware_concurrency());
    const long threads = named > 0 ? named : cores;
    return static_cast<int>(threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads);
  }();
  return count;
}

void share_out(int pieces, void (*work)(const void*, int), const void* context) {
  Shared* now = pieces > 1 && thread_count() > 1 ? get_shared() : nullptr;
  std::unique_lock<std::mutex> lock;
  if (now) lock = std::unique_lock(now->busy, std::try_to_lock);
  if (lock) {
    now->pool.run(pieces, work, context);
    return;
  }
  for (int i = 0; i < pieces; i++) work(context, i);
}

}  // namespace gearbx
