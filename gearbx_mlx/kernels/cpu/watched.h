// Sees whether a module still has the modules and arrays that it had.

#pragma once

#include <nanobind/nanobind.h>

namespace gearbx {
void bind_watched(nanobind::module_& m);
}
