// A pool of threads that share work in small pieces.

#pragma once

#include <cstdint>

namespace gearbx {

// The number of threads of one call of share_out, with the caller's: GEARBX_THREADS if it is a number; by default one
// per fast core, and with "all" one per core.
int thread_count();

// Calls work(context, i) once for each i below `pieces`, on several threads, and returns after all calls. Each thread takes a range of consecutive pieces, since memory is read fastest in order. Then it helps the
// others, so that a thread that the system suspends delays only its own piece. If two threads call at once, the second
// call runs on its own thread only.
void share_out(int pieces, void (*work)(const void* context, int piece), const void* context);

// The number of fast cores for this process if a machine has fast and slow ones; 0 if all are alike, or it is unknown.
//
// On a Mac these are the performance cores. On Linux `devices` is /sys/devices or its replacement: Intel's hybrid
// processors list their performance cores there, and ARM's cores have capacities. A core is fast from half of the
// greatest capacity on: of three kinds, only the smallest is slow.
int fast_cores(const char* devices = "/sys/devices");

}  // namespace gearbx
