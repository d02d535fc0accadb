// Packed codes, CODES at a time: the unit of work of one lane.
//
// Most formats pack codes as a little-endian bit stream, and start rows at a 16-bit word. Then CODES is 16: for any WIDTH,
// 16 codes fill exactly WIDTH words, so that lanes share no word. Codes of a row's codebook are at the bits PLACE(i), as
// many as two words hold.

enum { LANES = 32 };

// Elements in memory, with zeros beyond `left` elements.
template <typename T, typename P>
struct Cut {
    P from;
    int left;
    T operator[](int i) const {
        return i < left ? T(from[i]) : T(0);
    }
};

// The rest of a row, with `left` elements; a kernel for RAGGED rows may read more.
#if RAGGED
template <typename T, typename P>
inline Cut<T, P> rest_of_row(P from, int left) {
    return Cut<T, P>{from, left};
}
#else
template <typename T, typename P>
inline P rest_of_row(P from, int left) {
    return from;
}
#endif

// `Words` is a pointer to ushort, or a Cut of one.
template <int WIDTH, typename Words>
inline void load_codes(Words packed, thread ushort* words) {
    UNROLL for (int i = 0; i < WIDTH; i++) {
        words[i] = packed[i] ^ SIGN_BITS;
    }
}

// The value of the code at a bit; the code may span two words.
template <int WIDTH, typename Words>
inline uint code_from(Words words, int bit) {
    const int word = bit / 16;
    const int shift = bit % 16;
    uint pair = words[word];
    if (shift + WIDTH > 16) {
        pair |= uint(words[word + 1]) << 16;
    }
    return (pair >> shift) & ((1u << WIDTH) - 1);
}

// Code i of a stream.
template <int WIDTH>
inline float code_at(const thread ushort* words, int i) {
    const int bit = i * WIDTH;
    return float(code_from<WIDTH>(words, bit));
}

#if TABLES
// Look up the values of CODES codes.
inline void look_up(const thread ushort* words, const threadgroup float* entries, thread float* values) {
    UNROLL for (int i = 0; i < CODES; i++) {
        values[i] = entries[code_from<BITS>(words, PLACE(i))];
    }
}
#endif

template <typename A, typename B>
inline float dot_all(A a, B b) {
    float total = 0.0f;
    UNROLL for (int i = 0; i < CODES; i++) {
        total = fma(float(a[i]), float(b[i]), total);
    }
    return total;
}

// 16 codes of one plane from their words. Codes that do not span words are masked in place, without a shift: each is
// 2^place times too large.
template <int WIDTH>
inline void mask_codes(const thread ushort* words, thread float* masked) {
    const int per_word = 16 / WIDTH;
    UNROLL for (int i = 0; i < CODES; i++) {
        const uint mask = ((1u << WIDTH) - 1) << (i % per_word * WIDTH);
        masked[i] = 16 % WIDTH == 0 ? float(words[i / per_word] & mask) : code_at<WIDTH>(words, i);
    }
}

// The sum over 16 codes from `mask_codes` of code * x. `X` is a pointer into any address space, or a Cut of one. The sum
// over one place is scaled down once, by a power of two, without rounding.
template <int WIDTH, typename X>
inline float dot_masked(const thread float* masked, X x) {
    if (16 % WIDTH != 0) {
        return dot_all(masked, x);
    }
    const int per_word = 16 / WIDTH;
    float total = 0.0f;
    UNROLL for (int place = 0; place < per_word; place++) {
        float sum = 0.0f;
        UNROLL for (int step = 0; step < CODES / per_word; step++) {
            const int i = step * per_word + place;
            sum = fma(masked[i], float(x[i]), sum);
        }
        total = fma(sum, 1.0f / float(1u << (place * WIDTH % 16)), total);
    }
    return total;
}

// codes += 2^-SHIFT * the codes of one plane: exact, since all planes together have 8 bits.
template <int WIDTH, int SHIFT>
inline void add_codes(const thread ushort* words, thread float* codes) {
    UNROLL for (int i = 0; i < CODES; i++) {
        codes[i] = fma(code_at<WIDTH>(words, i), 1.0f / float(1u << SHIFT), codes[i]);
    }
}

template <typename X>
inline float sum_all(X x) {
    float total = 0.0f;
    UNROLL for (int i = 0; i < CODES; i++) {
        total += float(x[i]);
    }
    return total;
}
