// Matmuls of all layouts that have a kernel for matrix tiles, under what may happen to a process: a fork after the first
// matmul, threads that appear later, signals in the middle, and a system that refuses tiles. 1 to 16 vectors together
// have the bits of each alone.
//
// Prints a hash of all results, which matrix tiles and their twin share. With an argument, it also prints the steps of
// the time stamp counter in each matmul: on some emulators, instructions.

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__linux__) && defined(__x86_64__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <x86intrin.h>
#define HAS_FILTERS  // of system calls
#define STEPS __rdtsc()
#else
#define STEPS 0
#endif

#include "exact.h"
#include "matvec.h"
#include "no_fork.h"
#include "products.h"

namespace {

constexpr int VECTORS[] = {1, 2, 5, 8, 9, 16};

struct Random {
  uint64_t state = 1;
  uint32_t bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state >> 32);
  }
  template <class T>
  std::vector<T> numbers(int64_t count) {
    std::vector<T> found(static_cast<size_t>(count));
    for (T& each : found) each = static_cast<T>(bits());
    return found;
  }
  // bf16 from 2^-7 to 2^-4, either sign.
  std::vector<uint16_t> halves(int64_t count) {
    auto found = numbers<uint16_t>(count);
    for (uint16_t& each : found) each = static_cast<uint16_t>((each & 0x807f) | (120 + bits() % 4) << 7);
    return found;
  }
};

float widened(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Layout {
  std::string name;
  std::function<void(const float* x, int vectors, float* y)> multiply;
};

// Random weights in all layouts, of `rows` (a multiple of a panel's) and `columns` (a multiple of 64).
struct Weights {
  int64_t rows, columns;
  std::vector<uint16_t> dense, scales, biases;
  std::vector<uint32_t> codes, offsets;
  std::vector<uint8_t> low, high;
  gearbx_dense of_bf16;
  gearbx_exact of_exact = {};
  std::vector<Layout> layouts;

  Weights(int64_t height, int64_t width) : rows(height), columns(width) {
    Random random;
    dense = random.halves(rows * columns);
    scales = random.halves(rows * columns / 32), biases = random.halves(rows * columns / 32);
    codes = random.numbers<uint32_t>(rows * columns / 4);
    low = random.numbers<uint8_t>(rows * columns);
    of_bf16 = {rows, columns, dense.data(), GEARBX_BFLOAT16, 16};
    layouts.push_back({"bf16", [this](const float* x, int n, float* y) { gearbx_dense_product(&of_bf16, x, n, y); }});
    make_exact(random);
    layouts.push_back({"exact", [this](const float* x, int n, float* y) { gearbx_exact_product(&of_exact, x, n, y); }});
    for (int bits : {8, 4}) {
      add("affine", bits, GEARBX_AFFINE, 64, 0);
      add("panels", bits, GEARBX_AFFINE, 64, gearbx_panel_rows());
      add("groupwise", bits, GEARBX_SYMMETRIC_GROUPS, 32, 0);
      add("rowwise", bits, GEARBX_SYMMETRIC_ROWS, 32, 0);
    }
  }
  Weights(const Weights&) = delete;

  void make_exact(Random& random) {
    gearbx_exact& m = of_exact;
    m.rows = rows, m.columns = columns, m.group = 64, m.x_bits = 16;
    m.codes = reinterpret_cast<const uint8_t*>(codes.data());
    m.scales = scales.data(), m.biases = biases.data(), m.low = low.data();
    for (int64_t i = 0; i < rows * columns; i++) {
      if (i % columns == 0) offsets.push_back(static_cast<uint32_t>(m.count));
      const unsigned code = m.codes[i / 2] >> i % 2 * 4 & 15;
      const float scale = widened(scales[static_cast<size_t>(i / 64)]), product = scale * static_cast<float>(code);
      const float value = product + widened(biases[static_cast<size_t>(i / 64)]);
      m.count += !(std::fabs(value) > std::fabs(scale) * 0.5f);
    }
    offsets.push_back(static_cast<uint32_t>(m.count));
    high = random.numbers<uint8_t>(m.count);
    for (uint8_t& each : high) each = static_cast<uint8_t>((each & 0x80) | 0x3c);
    m.offsets = offsets.data(), m.high = high.data();
  }

  void add(const char* name, int bits, int kind, int group, int panel_rows) {
    gearbx_stack m = {};
    m.rows = rows, m.columns = m.inputs = columns, m.group = group, m.planes = 1, m.widths[0] = bits;
    m.weights[0] = codes.data(), m.scales = scales.data(), m.row_bytes = columns * bits / 8;
    m.biases[0] = kind == GEARBX_AFFINE ? biases.data() : nullptr;
    m.scale_type = GEARBX_BFLOAT16, m.kind = kind, m.x_bits = 8, m.panel_rows = panel_rows;
    const auto multiply = [m](const float* x, int n, float* y) { gearbx_stack_matvec(&m, x, n, y); };
    layouts.push_back({std::to_string(bits) + " bits " + name, multiply});
  }
};

struct Results {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a of all results
  int products = 0, wrong = 0;

  void add(const std::vector<float>& y) {
    for (float value : y) {
      wrong += !std::isfinite(value);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      hash = (hash ^ bits) * 1099511628211ull;
    }
    products++;
  }
};

Results multiplied(const Weights& weights, bool shows_steps = false) {
  Results found;
  std::vector<float> x(static_cast<size_t>(16 * weights.columns));
  Random random;
  for (float& value : x) value = static_cast<float>(static_cast<int>(random.bits() % 2001) - 1000) / 500.0f;
  for (const Layout& layout : weights.layouts)
    for (int vectors : VECTORS) {
      const size_t rows = static_cast<size_t>(weights.rows);
      std::vector<float> y(static_cast<size_t>(vectors) * rows), one(rows);
      if (shows_steps) layout.multiply(x.data(), vectors, y.data());  // so that pages are in memory
      const uint64_t start = STEPS;
      layout.multiply(x.data(), vectors, y.data());
      if (shows_steps) std::printf("%s, %d vectors: %llu steps\n", layout.name.c_str(), vectors, STEPS - start + 0ull);
      found.add(y);
      for (int v = 0; v < vectors; v++) {
        layout.multiply(x.data() + v * weights.columns, 1, one.data());
        found.wrong += std::memcmp(one.data(), y.data() + static_cast<size_t>(v) * rows, 4 * rows) != 0;
      }
    }
  return found;
}

// Whether a forked child gets the right results. refuse: the child's system refuses matrix tiles, so it may use none but
// the twin's, and its hash is another one.
bool right_in_child(const Weights& weights, uint64_t hash, bool refuse) {
#ifdef NO_FORK
  return true;
#else
  const pid_t child = fork();
  if (child == 0) {
#ifdef HAS_FILTERS
    constexpr uint32_t NUMBER = 0, FIRST_ARGUMENT = 16, REQUEST = 0x1023;  // of tiles, to arch_prctl
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, NUMBER),         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, FIRST_ARGUMENT), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, REQUEST, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program = {6, rules};
    if (refuse && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)))
      _exit(0);  // a sandbox without filters
#endif
    const Results found = multiplied(weights);
#if defined(HAS_FILTERS) && !defined(GEARBX_TILE_TWIN)
    if (refuse && gearbx_tiles() > 0) _exit(1);
#endif
    _exit(found.wrong != 0 || (!refuse && found.hash != hash));
  }
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
#endif
}

void count_in_floats(int) {  // with the registers that a matmul uses
  volatile float sum = 0;
  for (int i = 0; i < 64; i++) sum = sum + 1.5f;
}

}  // namespace

int main(int arguments, char**) {
  const bool shows_steps = arguments > 1;
  const Weights weights(shows_steps ? 576 : 80, shows_steps ? 1536 : 320);
  bool right = right_in_child(weights, 0, true);  // before this process asks for tiles
  const Results found = multiplied(weights, shows_steps);
  right &= right_in_child(weights, found.hash, false);

  bool later[3];
  std::vector<std::thread> threads;
  for (bool& each : later) threads.emplace_back([&] { each = multiplied(weights).hash == found.hash; });
  for (std::thread& each : threads) each.join();
  right &= later[0] && later[1] && later[2];

  std::signal(SIGALRM, count_in_floats);
  itimerval often = {{0, 1000}, {0, 1000}};  // every millisecond
  setitimer(ITIMER_REAL, &often, nullptr);
  for (int times = 0; times < 3; times++) right &= multiplied(weights).hash == found.hash;
  often = {};
  setitimer(ITIMER_REAL, &often, nullptr);

  const int wrong = found.wrong + !right;
  std::printf("results %016llx, tiles %d\n", found.hash + 0ull, gearbx_tiles());
  std::printf("%d products, %d wrong, %d threads\n", found.products, wrong, gearbx_threads());
  return wrong != 0;
}
