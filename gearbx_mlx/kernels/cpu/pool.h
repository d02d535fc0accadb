// Threads that wait for work, and share it out in small pieces.

#pragma once

#include <cstdint>

namespace gearbx {

// Threads that work on one call of share_out, the caller's included.
int thread_count();

// Call work(context, i) once for each i below `pieces` (65535 at most), on several threads, and return when all are
// done. Pieces are taken by whoever is free: a thread that the system is not running delays nothing but the piece that
// it has in hand. Of two calls at one time, the second runs on its own thread alone.
void share_out(int pieces, void (*work)(const void* context, int piece), const void* context);

}  // namespace gearbx
