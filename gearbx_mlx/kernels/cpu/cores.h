// The cores of this machine that are worth a thread.

#pragma once

namespace gearbx {

// How many fast cores this process may run on, where a machine has fast and slow ones; 0: all are alike, or the system does not say.
//
// On a Mac these are the performance cores. On Linux `devices` is /sys/devices, or stands for it: Intel's hybrid
// processors name their performance cores there, and ARM's give each core a capacity. A core counts as fast from half of
// the greatest capacity on, so that of three kinds only the smallest is left out.
int fast_cores(const char* devices = "/sys/devices");

}  // namespace gearbx
