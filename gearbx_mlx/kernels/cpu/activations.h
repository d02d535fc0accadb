// Activations in the order in which tiles (tile.h) read them.

#pragma once

#include <type_traits>
#include <vector>

#include "pool.h"
#include "sixteen.h"

namespace gearbx {

// The sums of a row and a vector are PARTS registers. A tile has as many vectors as the registers hold the sums of.
#ifdef GEARBX_AVX512
typedef F16 Lanes;
constexpr int PARTS = 1, TILE_VECTORS = 8;
inline EvenOdd join_parts(const F16* parts) { return in_halves(*parts); }
#elif defined(GEARBX_AVX2)
typedef F8 Lanes;
constexpr int PARTS = 1, TILE_VECTORS = 4;
inline EvenOdd join_parts(const F8* parts) { return {parts[0], zero8()}; }
#else
typedef F8 Lanes;
constexpr int PARTS = 2, TILE_VECTORS = 4;
inline EvenOdd join_parts(const F8* parts) { return {parts[0], parts[1]}; }
#endif
constexpr int LANES = sizeof(Lanes) / sizeof(float);

// A register of activations of type X, and how many it holds; LOADS of them are added to a sum in one step. Weights are
// loaded into registers of the same kind.
template <class X>
struct Register {
  typedef Lanes type;
  static constexpr int64_t COUNT = LANES;
  static constexpr int LOADS = 1;
};

inline void pack(const float* from, float* to) { std::memcpy(to, from, LANES * sizeof(float)); }

#if defined(GEARBX_AVX2) && !defined(GEARBX_AVX512)
// Float32 for weights of bf16: of sixteen columns the even ones, then the odd ones. One operation each makes floats of the
// even weights, and of the odd ones, of a register.
struct Split {
  float value;
};
typedef Split ForBf16;

template <>
struct Register<Split> {
  typedef F8 type;
  static constexpr int64_t COUNT = LANES;
  static constexpr int LOADS = 2;
};

inline void pack(const float* from, Split* to) {
  const F8 some = load8(from), others = load8(from + 8);
  const auto in_order = [](F8 a) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8)); };
  store8(&to->value, in_order(_mm256_shuffle_ps(some, others, 0x88)));
  store8(&to[8].value, in_order(_mm256_shuffle_ps(some, others, 0xdd)));
}
#else
typedef float ForBf16;
#endif

// Activations are float32. For weights of bf16 they may be rounded to it, as MLX rounds them in a model of that type,
// where the processor adds up pairs of products of bf16.
#ifdef GEARBX_PAIRS
typedef Bf16 RoundedForBf16;
#else
typedef ForBf16 RoundedForBf16;
#endif

#ifdef GEARBX_PAIRS
template <>
struct Register<Bf16> {
  typedef Pairs type;
  static constexpr int64_t COUNT = 32;
  static constexpr int LOADS = 1;
};

inline void pack(const float* from, Bf16* to) { _mm512_storeu_si512(to, round32(from)); }
#endif

// A row is multiplied in steps of this many columns.
template <class X>
constexpr int64_t STEP = PARTS * Register<X>::COUNT * Register<X>::LOADS;

template <class X>
int64_t whole_steps(int64_t columns) {
  return columns / STEP<X> * STEP<X>;
}

// Room for `count` numbers in `memory`, from the beginning of a line of the cache on, so that no load needs two lines.
template <class X>
X* reserve(std::vector<X>& memory, int64_t count) {
  constexpr size_t LINE = 64;
  const size_t needed = static_cast<size_t>(count) + LINE / sizeof(X);
  if (memory.size() < needed) memory.resize(needed);
  return memory.data() + (LINE - reinterpret_cast<uintptr_t>(memory.data()) % LINE) % LINE / sizeof(X);
}

// Vectors (vectors, columns), in groups of at most TILE_VECTORS whose sizes differ by at most one.
//
// Packed, the vectors of a group are neighbours: first the first register of the first step, vector after vector, then
// that of the next step; and after all of these the other registers of each step. Rows of a power of two apart would
// compete for the same lines of the cache. Columns after the last whole step are not packed.
template <class X>
struct Activations {
  const float* x;
  int64_t vectors, columns;
  const X* packed;

  // Packs vectors into memory of the calling thread, which its next call overwrites. A single one that is not to be
  // rounded stays as it is.
  Activations(const float* from, int64_t count, int64_t width) : x(from), vectors(count), columns(width) {
    if constexpr (std::is_same_v<X, float>) packed = x;
    if (vectors == 1 && std::is_same_v<X, float>) return;
    static thread_local std::vector<X> memory;
    packed = room_ = reserve(memory, vectors * whole_steps<X>(columns));
    share_out(static_cast<int>(groups()), pack_group, this);
  }

  int64_t groups() const { return (vectors + TILE_VECTORS - 1) / TILE_VECTORS; }
  int64_t first(int64_t group) const { return group * vectors / groups(); }
  const X* packed_group(int64_t group) const { return packed + first(group) * whole_steps<X>(columns); }

 private:
  X* room_ = nullptr;

  static void pack_group(const void* context, int group) {
    constexpr int64_t COUNT = Register<X>::COUNT * Register<X>::LOADS;
    const auto& a = *static_cast<const Activations*>(context);
    const int64_t first = a.first(group), count = a.first(group + 1) - first;
    X* to = a.room_ + first * whole_steps<X>(a.columns);
    for (int p = 0; p < PARTS; p++)
      for (int64_t i = p * COUNT; i < whole_steps<X>(a.columns); i += STEP<X>)
        for (int64_t v = first; v < first + count; v++, to += COUNT) pack(a.x + v * a.columns + i, to);
  }
};

}  // namespace gearbx
