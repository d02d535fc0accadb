// A pool of threads that share work in small pieces.

#pragma once

#include <cstdint>

namespace gearbx {

// The number of threads that work on one call of share_out, the caller's included: GEARBX_THREADS, where it is a number;
// else one for each fast core, and with "all" one for each core.
int thread_count();

// Calls work(context, i) once for each i below `pieces` (at most 65535), on several threads, and returns when all calls
// have. Each thread takes a range of pieces one after the other, since memory is read fastest in order, and then helps
// the others, so that a thread which the system does not run delays only its own piece. If two threads call at once,
// the second call runs on its own thread alone.
void share_out(int pieces, void (*work)(const void* context, int piece), const void* context);

// How many fast cores this process may run on, where a machine has fast and slow ones; 0: all are alike, or the system does not say.
//
// On a Mac these are the performance cores. On Linux `devices` is /sys/devices, or stands for it: Intel's hybrid
// processors name their performance cores there, and ARM's give each core a capacity. A core counts as fast from half of
// the greatest capacity on, so that of three kinds only the smallest is left out.
int fast_cores(const char* devices = "/sys/devices");

}  // namespace gearbx
