// Packed codes, CODES at a time: the unit of work of one lane.
//
// Most formats pack codes as a little-endian stream of bits, and begin a row at a whole word of 16 bits. CODES is 16 then:
// 16 codes of WIDTH bits are WIDTH such words exactly, whatever the width, so that lanes share no word. Codes that name an
// entry of their row's codebook lie as PLACE says, as many as two words hold.

enum { LANES = 32 };

// What lies in memory from some place on, with zeros beyond `left` elements.
template <typename T, typename P>
struct Cut {
    P from;
    int left;
    T operator[](int i) const {
        return i < left ? T(from[i]) : T(0);
    }
};

// The rest of a row: it has `left` elements, of which CODES may want more if the kernel is for RAGGED rows.
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
    for (int i = 0; i < WIDTH; i++) {
        words[i] = packed[i] ^ SIGN_BITS;
    }
}

// The code that begins at a bit, shifted down to its value. It may lie across two words.
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
// What CODES codes stand for.
inline void look_up(const thread ushort* words, const threadgroup float* entries, thread float* values) {
    for (int i = 0; i < CODES; i++) {
        values[i] = entries[code_from<BITS>(words, PLACE(i))];
    }
}
#endif

// The sum over 16 codes of code * x. `X` is a pointer into any address space, or a Cut of one.
// Codes that do not lie across words are masked where they are, without a shift: each comes out 2^place times too
// large, and the sum of those of one place is scaled down once. Powers of two: nothing is rounded by it.
template <int WIDTH, typename X>
inline float dot_codes(const thread ushort* words, X x) {
    const int per_word = 16 / WIDTH;
    float total = 0.0f;
    if (16 % WIDTH == 0) {
        for (int place = 0; place < per_word; place++) {
            const uint mask = ((1u << WIDTH) - 1) << (place * WIDTH);
            float sum = 0.0f;
            for (int word = 0; word < WIDTH; word++) {
                sum += float(words[word] & mask) * float(x[word * per_word + place]);
            }
            total += sum * (1.0f / float(1u << (place * WIDTH)));
        }
    } else {
        for (int i = 0; i < CODES; i++) {
            total += code_at<WIDTH>(words, i) * float(x[i]);
        }
    }
    return total;
}

// codes += 2^-SHIFT * the codes of one plane: exact, since all planes together have 8 bits.
template <int WIDTH, int SHIFT>
inline void add_codes(const thread ushort* words, thread float* codes) {
    for (int i = 0; i < CODES; i++) {
        codes[i] += code_at<WIDTH>(words, i) * (1.0f / float(1u << SHIFT));
    }
}

template <typename A, typename B>
inline float dot_all(A a, B b) {
    float total = 0.0f;
    for (int i = 0; i < CODES; i++) {
        total += float(a[i]) * float(b[i]);
    }
    return total;
}

template <typename X>
inline float sum_all(X x) {
    float total = 0.0f;
    for (int i = 0; i < CODES; i++) {
        total += float(x[i]);
    }
    return total;
}
