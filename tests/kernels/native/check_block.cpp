// Transformer blocks without Python or MLX, to be built with sanitizers: over buffers of exactly the size that is needed,
// against the same operations one by one, bit for bit.

#include <cstdio>
#include <cstring>
#include <vector>

#include "block.h"

using namespace gearbx;
typedef std::vector<float> Floats32;

static uint64_t state = 1;
static int failures = 0, results = 0;

static float random_float() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<float>(static_cast<int32_t>(state >> 32)) / 1073741824.0f;
}

static Floats32 random_floats(int64_t count) {
  Floats32 values(static_cast<size_t>(count));
  for (float& value : values) value = random_float();
  return values;
}

static void same_bits(const Floats32& found, const Floats32& expected) {
  results += static_cast<int>(found.size());
  if (found.size() != expected.size() || std::memcmp(found.data(), expected.data(), 4 * found.size())) failures++;
}

// Matrices of a block, with and without biases, and its norms.
struct Weights {
  std::vector<Floats32> kept;

  const float* floats(int64_t count) { return kept.emplace_back(random_floats(count)).data(); }

  Linear linear(int64_t rows, int64_t columns, bool bias) {
    Linear made;
    made.matrix = gearbx_dense{rows, columns, floats(rows * columns), GEARBX_FLOAT32};
    if (bias) made.bias = floats(rows);
    return made;
  }
  Norm norm(int64_t width) { return {floats(width), GEARBX_FLOAT32, 1e-5f}; }
};

static Floats32 times(const Linear& linear, const Floats32& x, int64_t vectors) {
  const auto& m = std::get<gearbx_dense>(linear.matrix);
  Floats32 y(static_cast<size_t>(vectors * m.rows));
  gearbx_dense_product(&m, x.data(), vectors, y.data());
  const float* bias = static_cast<const float*>(linear.bias);
  for (size_t i = 0; bias && i < y.size(); i++) y[i] += bias[i % static_cast<size_t>(m.rows)];
  return y;
}

static Floats32 normed(const Norm& by, const Floats32& x, int64_t columns) {
  Floats32 y(x.size());
  gearbx_rms_norm(x.data(), static_cast<int64_t>(x.size()) / columns, columns, by.weight, by.type, by.eps, y.data());
  return y;
}

static Floats32 added(const Floats32& x, const Norm& by, Floats32 branch, int64_t columns) {
  if (by.weight) branch = normed(by, branch, columns);
  for (size_t i = 0; i < x.size(); i++) branch[i] = x[i] + branch[i];
  return branch;
}

// Rows `first` to `end` of vectors of `rows` numbers.
static Floats32 part(const Floats32& x, int64_t rows, int64_t first, int64_t end) {
  Floats32 y;
  for (auto at = x.begin(); at != x.end(); at += rows) y.insert(y.end(), at + first, at + end);
  return y;
}

// (length, heads, width) to (heads, length, width), or back with the two lengths exchanged.
static Floats32 swapped(const Floats32& x, int64_t length, int64_t heads, int64_t width) {
  Floats32 y(x.size());
  for (int64_t t = 0; t < length; t++)
    for (int64_t h = 0; h < heads; h++)
      std::memcpy(&y[static_cast<size_t>((h * length + t) * width)], &x[static_cast<size_t>((t * heads + h) * width)],
                  static_cast<size_t>(width) * 4);
  return y;
}

static Floats32 turned(const Block& b, const Floats32& x, int64_t length, int64_t heads, int64_t offset) {
  Floats32 y(x.size());
  const gearbx_rotation rotation = {{1, heads, length, b.width}, {0, b.width, heads * b.width, 1},
                                    b.rotation.frequencies, b.rotation.dims, b.rotation.traditional,
                                    b.rotation.scale, offset};
  gearbx_rope(&rotation, x.data(), y.data());
  return y;
}

constexpr int64_t SIZE = 40, HEADS = 4, SHARED = 2, WIDTH = 12, HIDDEN = 56, ROWS = (HEADS + 2 * SHARED) * WIDTH;

static Block block_of(Weights& weights, bool joined, bool sandwich, bool norms_of_heads) {
  weights.kept.reserve(64);
  Block b = {};
  b.heads = HEADS, b.key_heads = SHARED, b.width = WIDTH, b.scale = 0.3f, b.gelu = sandwich;
  b.rotation = {weights.floats(4), 8, 0, 1.0f};
  b.before_attention = weights.norm(SIZE), b.before_mlp = weights.norm(SIZE);
  if (sandwich) b.after_attention = weights.norm(SIZE), b.after_mlp = weights.norm(SIZE);
  if (norms_of_heads) b.of_queries = weights.norm(WIDTH), b.of_keys = weights.norm(WIDTH);
  if (joined) {
    b.projections = {weights.linear(ROWS, SIZE, true)};
    b.gates = {weights.linear(2 * HIDDEN, SIZE, false)};
  } else {
    for (int64_t heads : {HEADS, SHARED, SHARED}) b.projections.push_back(weights.linear(heads * WIDTH, SIZE, true));
    b.gates = {weights.linear(HIDDEN, SIZE, true), weights.linear(HIDDEN, SIZE, false)};
  }
  b.output = weights.linear(SIZE, HEADS * WIDTH, false), b.down = weights.linear(SIZE, HIDDEN, true);
  return b;
}

static void check_block(int64_t length, int64_t offset, bool joined, bool sandwich, bool norms_of_heads) {
  Weights weights;
  const Block b = block_of(weights, joined, sandwich, norms_of_heads);
  const int64_t seen = offset + length, head = seen * WIDTH, own = length * WIDTH;
  const Floats32 x = random_floats(length * SIZE);
  Floats32 queries(static_cast<size_t>(HEADS * own)), keys = random_floats(SHARED * head), values = keys, y(x.size());
  Floats32 expected_keys = keys, expected_values = values;
  project(b, {1, length, offset}, x.data(), {queries.data(), HEADS * own, own},
          {keys.data() + offset * WIDTH, SHARED * head, head}, {values.data() + offset * WIDTH, SHARED * head, head});
  gearbx_attention form = {1, HEADS, HEADS / SHARED, length, seen, WIDTH, {HEADS * own, own, WIDTH},
                           {SHARED * head, head, WIDTH}, {SHARED * head, head, WIDTH}, b.scale, 1, nullptr, {},
                           nullptr, 0, {}, {}};
  finish(b, form, x.data(), queries.data(), keys.data(), values.data(), y.data());

  const Floats32 before = normed(b.before_attention, x, SIZE);
  Floats32 all[3];
  for (int i = 0, first = 0; i < 3; i++) {
    const int rows = (i ? SHARED : HEADS) * WIDTH;
    all[i] = joined ? part(times(b.projections[0], before, length), ROWS, first, first + rows)
                    : times(b.projections[static_cast<size_t>(i)], before, length);
    first += rows;
  }
  if (norms_of_heads) all[0] = normed(b.of_queries, all[0], WIDTH), all[1] = normed(b.of_keys, all[1], WIDTH);
  same_bits(queries, turned(b, all[0], length, HEADS, offset));
  const Floats32 new_keys = turned(b, all[1], length, SHARED, offset), new_values = swapped(all[2], length, SHARED, WIDTH);
  for (int64_t h = 0; h < SHARED; h++) {
    std::memcpy(&expected_keys[static_cast<size_t>(h * head + offset * WIDTH)], &new_keys[static_cast<size_t>(h * own)],
                static_cast<size_t>(own) * 4);
    std::memcpy(&expected_values[static_cast<size_t>(h * head + offset * WIDTH)],
                &new_values[static_cast<size_t>(h * own)], static_cast<size_t>(own) * 4);
  }
  same_bits(keys, expected_keys), same_bits(values, expected_values);

  Floats32 attended(queries.size());
  gearbx_attend(&form, queries.data(), keys.data(), values.data(), attended.data());
  const Floats32 output = times(b.output, swapped(attended, HEADS, length, WIDTH), length);
  const Floats32 sum = added(x, b.after_attention, output, SIZE), inner = normed(b.before_mlp, sum, SIZE);
  const Floats32 both = times(b.gates[0], inner, length);
  const Floats32 gate = joined ? part(both, 2 * HIDDEN, 0, HIDDEN) : both;
  const Floats32 up = joined ? part(both, 2 * HIDDEN, HIDDEN, 2 * HIDDEN) : times(b.gates[1], inner, length);
  Floats32 gated(gate.size());
  (sandwich ? gearbx_geglu : gearbx_swiglu)(gate.data(), up.data(), static_cast<int64_t>(gate.size()), gated.data());
  same_bits(y, added(sum, b.after_mlp, times(b.down, gated, length), SIZE));
}

// What a sequence gets whose keys and values are at keys[at], and what becomes of these.
static void run(const Block& b, const Positions& at, int64_t room, const float* x, float* keys, float* values, float* y) {
  const int64_t own = at.length * WIDTH, head = room * WIDTH, each = SHARED * head, place = at.offset * WIDTH;
  Floats32 queries(static_cast<size_t>(at.batch * HEADS * own));
  project(b, at, x, {queries.data(), HEADS * own, own}, {keys + place, each, head}, {values + place, each, head});
  const gearbx_attention form = {at.batch, HEADS, HEADS / SHARED, at.length, at.offset + at.length, WIDTH,
                                 {HEADS * own, own, WIDTH}, {each, head, WIDTH}, {each, head, WIDTH}, b.scale, 1,
                                 nullptr, {}, at.padding};
  finish(b, form, x, queries.data(), keys, values, y);
}

// The sequences of a batch, behind padding, have the bits that they have alone.
static void check_batch(int64_t length, int64_t offset, bool joined, bool sandwich) {
  Weights weights;
  const Block b = block_of(weights, joined, sandwich, !joined);
  const int32_t padding[] = {static_cast<int32_t>(offset), 0, 3};
  const int64_t room = offset + length, each = SHARED * room * WIDTH, size = length * SIZE;
  const Floats32 x = random_floats(3 * size);
  Floats32 keys = random_floats(3 * each), values = random_floats(3 * each), y(x.size());
  const Floats32 keys_before = keys, values_before = values;
  run(b, {3, length, offset, padding}, room, x.data(), keys.data(), values.data(), y.data());
  for (int64_t row = 0; row < 3; row++) {
    const int64_t own = room - padding[row], skipped = padding[row] * WIDTH;
    Floats32 alone(static_cast<size_t>(size)), its_keys, its_values, left_keys, left_values;
    for (int64_t h = 0; h < SHARED; h++) {
      const int64_t from = row * each + h * room * WIDTH + skipped, to = from + own * WIDTH;
      its_keys.insert(its_keys.end(), &keys_before[0] + from, &keys_before[0] + to);
      its_values.insert(its_values.end(), &values_before[0] + from, &values_before[0] + to);
      left_keys.insert(left_keys.end(), &keys[0] + from, &keys[0] + to);
      left_values.insert(left_values.end(), &values[0] + from, &values[0] + to);
    }
    run(b, {1, length, offset - padding[row]}, own, x.data() + row * size, its_keys.data(), its_values.data(),
        alone.data());
    same_bits({y.begin() + row * size, y.begin() + (row + 1) * size}, alone);
    same_bits(left_keys, its_keys), same_bits(left_values, its_values);
  }
}

int main() {
  for (int64_t length : {1, 4, 16})
    for (int form = 0; form < 4; form++) check_batch(length, 300, form & 1, form & 2);
  for (int64_t length : {1, 3, 17, 150})
    for (int64_t offset : {0, 5})
      for (int form = 0; form < 8; form++) check_block(length, offset, form & 1, form & 2, (form & 4) && !(form & 1));
  printf("%d results, %d wrong, %d threads\n", results, failures, gearbx_threads());
  return failures != 0;
}
