// Memory that grows without keeping its content, aligned to cache lines. Unlike a vector, it is not filled with zeros.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace gearbx {

template <class T>
class Buffer {
 public:
  T* room_for(int64_t size) {
    constexpr size_t LINE = 64;  // bytes
    if (!values_ || size > size_) {
      const size_t lines = static_cast<size_t>(size) * sizeof(T) / LINE + 1;
      values_.reset(static_cast<T*>(std::aligned_alloc(LINE, lines * LINE)));
      if (!values_) std::abort();
      size_ = size;
    }
    return values_.get();
  }

 private:
  struct Free {
    void operator()(T* values) const { std::free(values); }
  };
  std::unique_ptr<T, Free> values_;
  int64_t size_ = 0;
};

}  // namespace gearbx
