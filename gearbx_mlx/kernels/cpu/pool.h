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

}  // namespace gearbx
