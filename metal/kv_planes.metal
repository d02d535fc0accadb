// Keys or values as nested planes (gearbx_mlx/formats/kv_cache.py), unpacked into threadgroup memory and nowhere else.
//
// A lane takes CHUNK numbers of a position: whole words of each plane, all of one group. Scale and offset of a group are
// read by the lane that has its first numbers, and handed to the others. So each byte is read once.
//
// Macros: DIMS; PADDING; FIRST_BITS, SECOND_BITS of the planes, the latter 0 where the gear reads one; CHUNK, 32 / the
//     fewest of them; GROUP, numbers that share a scale; TILE, positions; THREADS of a threadgroup, whole SIMD groups.

enum { CHUNKS = DIMS / CHUNK, SHARERS = GROUP / CHUNK };

// Positions of a head in an array: the first one, and the distances from position to position and between elements.
template <typename X>
struct Positions {
    const device X* first;
    size_t row;
    size_t column;
    const device X& at(int position, int element) const {
        return first[position * row + element * column];
    }
};

struct Nested {
    Positions<uint> planes[SECOND_BITS ? 2 : 1];
    Positions<T> scales;
    Positions<T> offsets;
};

// Put a plane's bits behind those that the codes of a chunk have already.
template <int BITS>
inline void append_bits(thread uint* codes, Positions<uint> plane, int position, int chunk) {
    UNROLL for (int i = 0; i < CHUNK; i++) {
        codes[i] <<= BITS;
    }
    UNROLL for (int w = 0; w < CHUNK * BITS / 32; w++) {
        const uint word = plane.at(position, chunk * (CHUNK * BITS / 32) + w);
        UNROLL for (int i = 0; i < 32 / BITS; i++) {
            codes[w * (32 / BITS) + i] |= word >> (i * BITS) & ((1u << BITS) - 1);
        }
    }
}

// Copy `count` positions, TILE at most, from `begin` on. All threads call it, since lanes hand scales to each other.
inline void unpack(Nested from, threadgroup T* tile, int begin, int count, int thread_index, int lane) {
    const float share = 1.0f / float(1 << SECOND_BITS);
    for (int i = thread_index; i < TILE * CHUNKS; i += THREADS) {
        const int position = i / CHUNKS;
        const int chunk = i % CHUNKS;
        const int leader = lane - chunk % SHARERS;
        uint codes[CHUNK] = {};
        float scale = 0.0f;
        float offset = 0.0f;
        if (position < count) {
            append_bits<FIRST_BITS>(codes, from.planes[0], begin + position, chunk);
#if SECOND_BITS
            append_bits<SECOND_BITS>(codes, from.planes[1], begin + position, chunk);
#endif
            if (lane == leader) {
                scale = float(from.scales.at(begin + position, chunk / SHARERS));
                offset = float(from.offsets.at(begin + position, chunk / SHARERS));
            }
        }
        scale = simd_shuffle(scale, ushort(leader));
        offset = fma(scale, (share - 1.0f) / 2.0f, simd_shuffle(offset, ushort(leader)));
        if (position < count) {
            UNROLL for (int c = 0; c < CHUNK; c++) {
                tile[position * (DIMS + PADDING) + chunk * CHUNK + c] = T(fma(scale * share, float(codes[c]), offset));
            }
        }
    }
}
