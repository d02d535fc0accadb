// Values of C++ that Python only passes on. Not classes of nanobind: a process may load the kernels twice, and can
// register a class once.

#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <utility>

namespace gearbx {

template <class T>
nanobind::capsule in_capsule(const char* name, T value) {
  return nanobind::capsule(new T(std::move(value)), name, [](void* p) noexcept { delete static_cast<T*>(p); });
}

template <class T>
const T& from_capsule(const char* name, const nanobind::capsule& capsule) {
  return *static_cast<const T*>(capsule.data(name));
}

}  // namespace gearbx
