#include "pool.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>
#endif

namespace gearbx {

#if defined(__APPLE__)

int fast_cores(const char*) {
  int fast = 0;
  size_t size = sizeof fast;
  return sysctlbyname("hw.perflevel0.logicalcpu", &fast, &size, nullptr, 0) == 0 && fast > 0 ? fast : 0;
}

#elif defined(__linux__)

namespace {

// The cores available to this process.
std::vector<int> own_cores() {
  std::vector<int> cores;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; core++)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  return cores;
}

// Whether a list such as "0-7,16" contains a core.
bool contains(const std::string& list, int core) {
  const char* at = list.c_str();
  int first = 0, last = 0, read = 0;
  while (std::sscanf(at, "%d%n", &first, &read) == 1) {
    at += read;
    last = first;
    if (std::sscanf(at, "-%d%n", &last, &read) == 1) at += read;
    if (first <= core && core <= last) return true;
    if (*at != ',') return false;
    at++;
  }
  return false;
}

// For Intel's hybrid processors.
int named_cores(const std::string& devices, const std::vector<int>& cores) {
  std::string list;
  if (!std::getline(std::ifstream(devices + "/cpu_core/cpus"), list)) return 0;
  return static_cast<int>(std::count_if(cores.begin(), cores.end(), [&](int core) { return contains(list, core); }));
}

// For ARM.
int capable_cores(const std::string& devices, const std::vector<int>& cores) {
  std::vector<long> capacities;
  for (int core : cores) {
    long capacity = 0;
    std::ifstream(devices + "/system/cpu/cpu" + std::to_string(core) + "/cpu_capacity") >> capacity;
    capacities.push_back(capacity);
  }
  const auto greatest = std::max_element(capacities.begin(), capacities.end());
  if (greatest == capacities.end() || *greatest <= 0) return 0;
  return static_cast<int>(
      std::count_if(capacities.begin(), capacities.end(), [&](long one) { return 2 * one >= *greatest; }));
}

}  // namespace

int fast_cores(const char* devices) {
  const std::vector<int> cores = own_cores();
  const int named = named_cores(devices, cores);
  return named > 0 ? named : capable_cores(devices, cores);
}

#else

int fast_cores(const char*) { return 0; }

#endif

}  // namespace gearbx
