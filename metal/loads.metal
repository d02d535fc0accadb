// Elements that lie side by side in memory, four to an instruction.
//
// A packed vector may begin at any element, as an element itself may. MLX promises no more of an array: it may be a part of
// another one.

// What elements of so many bytes are loaded as.
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

// COUNT elements, a multiple of 4, become numbers of another type.
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

// The same of the rest of a row, which has `there` elements. What it has not is 0.
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
