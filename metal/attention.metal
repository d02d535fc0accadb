// Attention of up to 16 queries of a sequence, the first of two launches: each block of keys by itself.
//
// A threadgroup has one block of one KV head, and of the query heads that share it the HEADS that are its own. It goes
// through the block by tiles of 32 keys: copies the keys into its memory, where each lane multiplies one key with a
// query, then the values, where each lane adds up its dimensions. So keys and values are read once for all queries, and a
// number of the tile once for those of a SIMD group.
//
// Blocks begin at multiples of BLOCK keys, and a block in which a query sees nothing leaves no trace in its result; nor does a
// key that it does not see, whatever is there. So a query's result has the same bits whichever other queries are in the
// call, and whatever keys come after those that it sees. `fma` is written out, so that no compiler chooses where to round.
//
// With PLANES, the first positions are nested planes, which the copying unpacks (kv_planes.metal), rounded to T.
//
// Buffers: queries (B, H, L, D) T; with ENTRIES, keys and values (B, KV, S, D) T, of which the positions of planes are not
//     read; of MASKED, mask (B, H, L, S) bool, true for keys that a query sees; all by their strides. scale, a number.
//     With PLANES, of keys and of values: _coarse and, of two, _finer (B, KV, positions, words) uint; _scales and _offsets
//     (B, KV, positions, groups) T. The positions are all S, or with ENTRIES a multiple of TILE.
//     out (B, H, L, blocks, D + 2) float: of each query and block the sum of exp(score - best) value over the keys that it
//     sees, the sum of exp(score - best), and best.
// Macros: DIMS, a multiple of 4; HEADS; BLOCK; QUERIES, of a SIMD group at most; SIMD_GROUPS; CAUSAL; MASKED; PADDING,
//     elements between keys in threadgroup memory, so that lanes find theirs in different banks; TILE, 32; ENTRIES; PLANES,
//     0 to 2.
// The grid is whole threadgroups of SIMD_GROUPS * 32 threads: of each sequence, KV head, part of its heads, and block.

enum { SLICES = (DIMS + 31) / 32, WIDTH = DIMS + PADDING };

const int lane = thread_index_in_simdgroup;
const int simd_group = simdgroup_index_in_threadgroup;
const int length = queries_shape[2];
#if ENTRIES
const int key_count = keys_shape[2];
const int kv_heads = keys_shape[1];
#else
const int key_count = keys_coarse_shape[2];
const int kv_heads = keys_coarse_shape[1];
#endif
const int blocks = (key_count + BLOCK - 1) / BLOCK;
const int parts = queries_shape[1] / kv_heads / HEADS;

const int block = threadgroup_position_in_grid.x % blocks;
const int part = threadgroup_position_in_grid.x / blocks % parts;
const int kv_head = threadgroup_position_in_grid.x / blocks / parts % kv_heads;
const int batch = threadgroup_position_in_grid.x / blocks / parts / kv_heads;
const int first_head = (kv_head * parts + part) * HEADS;

// Where this head's positions begin in an array.
#define HEAD_OF(array, strides) (array + batch * strides[0] + kv_head * strides[1])
// Take a tile of positions from `begin` on: of entries, four numbers at a time, or of planes.
#define COPY_ENTRIES(array, strides)                                                                   \
    for (int i = thread_index_in_threadgroup * 4; i < count * DIMS; i += THREADS * 4) {                \
        T four[4];                                                                                     \
        const device T* of_tile = HEAD_OF(array, strides) + begin * strides[2];                        \
        const device T* from = of_tile + i / DIMS * int(strides[2]) + i % DIMS * int(strides[3]);      \
        load_apart<4>(from, strides[3], four);                                                         \
        UNROLL for (int j = 0; j < 4; j++) {                                                           \
            tile[i / DIMS * WIDTH + i % DIMS + j] = four[j];                                           \
        }                                                                                              \
    }
#if PLANES
#define POSITIONS(array, strides) {HEAD_OF(array, strides), size_t(strides[2]), size_t(strides[3])}
#if PLANES == 2
#define CODES(first, first_strides, second, second_strides) \
    {POSITIONS(first, first_strides), POSITIONS(second, second_strides)}
#else
#define CODES(first, first_strides, second, second_strides) {POSITIONS(first, first_strides)}
#endif
const Nested nested_keys = {CODES(keys_coarse, keys_coarse_strides, keys_finer, keys_finer_strides),
                            POSITIONS(keys_scales, keys_scales_strides), POSITIONS(keys_offsets, keys_offsets_strides)};
const Nested nested_values = {CODES(values_coarse, values_coarse_strides, values_finer, values_finer_strides),
                              POSITIONS(values_scales, values_scales_strides),
                              POSITIONS(values_offsets, values_offsets_strides)};
#define COPY_PLANES(array) unpack(nested_##array, tile, begin, count, thread_index_in_threadgroup, lane);
#if ENTRIES
const int packed = keys_coarse_shape[2];
#define COPY(array, strides)          \
    if (begin < packed) {             \
        COPY_PLANES(array)            \
    } else {                          \
        COPY_ENTRIES(array, strides)  \
    }
#else
#define COPY(array, strides) COPY_PLANES(array)
#endif
#else
#define COPY(array, strides) COPY_ENTRIES(array, strides)
#endif

// Query q of this SIMD group: a head and a token.
#define QUERY(q) (simd_group + (q) * SIMD_GROUPS)
#define HEAD(q) (first_head + QUERY(q) / length)
#define TOKEN(q) (QUERY(q) % length)
#if MASKED
#define SEES(q, key) \
    mask[batch * mask_strides[0] + HEAD(q) * mask_strides[1] + TOKEN(q) * mask_strides[2] + (key) * mask_strides[3]]
#elif CAUSAL
#define SEES(q, key) ((key) <= key_count - length + TOKEN(q))
#else
#define SEES(q, key) true
#endif

const int query_step = queries_strides[3];
// Multiply this lane's key with the queries, of which LOAD makes four numbers `held`.
#define ADD_PRODUCTS(LOAD)                                          \
    for (int d = 0; d < DIMS; d += 4) {                             \
        float key[4];                                               \
        UNROLL for (int i = 0; i < 4; i++) {                        \
            key[i] = float(own_key[d + i]);                         \
        }                                                           \
        UNROLL for (int q = 0; q < QUERIES; q++) {                  \
            float held[4];                                          \
            LOAD;                                                   \
            UNROLL for (int i = 0; i < 4; i++) {                    \
                weights[q] = fma(held[i], key[i], weights[q]);      \
            }                                                       \
        }                                                           \
    }

threadgroup T tile[TILE * WIDTH];
const threadgroup T* own_key = tile + lane * WIDTH;
int own[QUERIES];  // where a query begins; the last one where there are fewer
float best[QUERIES];
float total[QUERIES];
float weights[QUERIES];  // of this lane's key of the tile
float sums[QUERIES][SLICES];
UNROLL for (int q = 0; q < QUERIES; q++) {
    const int query = min(QUERY(q), HEADS * length - 1);
    own[q] = batch * queries_strides[0] + (first_head + query / length) * queries_strides[1] +
             query % length * queries_strides[2];
    best[q] = -INFINITY;
    total[q] = 0.0f;
    UNROLL for (int s = 0; s < SLICES; s++) {
        sums[q][s] = 0.0f;
    }
}

const int end = min(key_count, (block + 1) * BLOCK);
for (int begin = block * BLOCK; begin < end; begin += TILE) {
    const int count = min(int(TILE), end - begin);
    COPY(keys, keys_strides)
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int q = 0; q < QUERIES; q++) {
        weights[q] = 0.0f;
    }
    if (lane < count && QUERY(0) < HEADS * length) {
        if (query_step == 1) {
            ADD_PRODUCTS(load_numbers<4>(queries + d + own[q], held))
        } else {
            ADD_PRODUCTS(load_apart<4>(queries + d * query_step + own[q], query_step, held))
        }
    }
    UNROLL for (int q = 0; q < QUERIES; q++) {
        const float score = fma(weights[q], scale, 0.0f);  // a product alone could become part of the subtraction below
        weights[q] = 0.0f;
        if (QUERY(q) < HEADS * length) {
            const bool sees = lane < count && SEES(q, begin + lane);
            if (simd_any(sees)) {
                const float before = best[q];
                best[q] = max(before, simd_max(sees ? score : -INFINITY));
                weights[q] = sees ? precise::exp(score - best[q]) : 0.0f;
                const float shrunk = total[q] == 0.0f ? 0.0f : precise::exp(before - best[q]);
                total[q] = fma(total[q], shrunk, simd_sum(weights[q]));
                UNROLL for (int s = 0; s < SLICES; s++) {
                    sums[q][s] *= shrunk;
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    COPY(values, values_strides)
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int key = 0; key < (QUERY(0) < HEADS * length ? count : 0); key++) {
        const threadgroup T* value = tile + key * WIDTH;
        float values_of_key[SLICES];
        UNROLL for (int s = 0; s < SLICES; s++) {
            const int d = s * 32 + lane;
            values_of_key[s] = DIMS % 32 == 0 || d < DIMS ? float(value[d]) : 0.0f;
        }
        UNROLL for (int q = 0; q < QUERIES; q++) {
            const float weight = simd_broadcast(weights[q], ushort(key));
            if (weight != 0.0f) {
                UNROLL for (int s = 0; s < SLICES; s++) {
                    sums[q][s] = fma(weight, values_of_key[s], sums[q][s]);
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

UNROLL for (int q = 0; q < QUERIES; q++) {
    if (QUERY(q) < HEADS * length) {
        const size_t to =
            ((size_t(batch * queries_shape[1] + HEAD(q)) * length + TOKEN(q)) * blocks + block) * (DIMS + 2);
        UNROLL for (int s = 0; s < SLICES; s++) {
            const int d = s * 32 + lane;
            if (d < DIMS) {
                out[to + d] = sums[q][s];
            }
        }
        if (lane == 0) {
            out[to + DIMS] = total[q];
            out[to + DIMS + 1] = best[q];
        }
    }
}
