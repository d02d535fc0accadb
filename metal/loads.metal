// Loads of adjacent elements, four per instruction.
//
// A packed vector needs only the alignment of its elements. MLX guarantees no more, since an array may be a slice.

// The types that load elements of SIZE bytes.
template <int SIZE>
struct Loaded;
template <>
struct Loaded<1> {
    typedef uchar One;
    typedef packed_uchar4 Four;
};
template <>
struct Loaded<2> {
    typedef ushort One;
    typedef packed_ushort4 Four;
};
template <>
struct Loaded<4> {
    typedef uint One;
    typedef packed_uint4 Four;
};

// Load COUNT elements, a multiple of 4, as numbers of type N.
template <int COUNT, typename E, typename N>
inline void load_numbers(const device E* from, thread N* to) {
    typedef typename Loaded<sizeof(E)>::One One;
    typedef typename Loaded<sizeof(E)>::Four Four;
    UNROLL for (int i = 0; i < COUNT; i += 4) {
        const Four four = *(const device Four*)(from + i);
        UNROLL for (int j = 0; j < 4; j++) {
            to[i + j] = N(as_type<E>(One(four[j])));
        }
    }
}

// Load the rest of a row, which has `there` elements; the others are 0.
template <int COUNT, typename E, typename N>
inline void load_rest(const device E* from, int there, thread N* to) {
    if (there >= COUNT) {
        load_numbers<COUNT>(from, to);
    } else {
        UNROLL for (int i = 0; i < COUNT; i++) {
            to[i] = i < there ? N(from[i]) : N(0);
        }
    }
}
