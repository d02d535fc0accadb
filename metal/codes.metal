// Packed codes, 16 at a time: the unit of work of one lane.
//
// MLX packs codes of any width as a little-endian stream of bits. 16 codes of WIDTH bits are WIDTH words of 16 bits
// exactly, whatever the width, so that lanes neither share a word nor need a tail.

enum { CODES = 16, LANES = 32 };

template <int WIDTH>
inline void load_codes(const device uint* packed, size_t chunk, thread ushort* words) {
    const device ushort* from = (const device ushort*)packed + chunk * WIDTH;
    for (int i = 0; i < WIDTH; i++) {
        words[i] = from[i];
    }
}

// Code i, shifted down to its value. It may lie across two words.
template <int WIDTH>
inline float code_at(const thread ushort* words, int i) {
    const int bit = i * WIDTH;
    const int word = bit / 16;
    const int shift = bit % 16;
    uint pair = words[word];
    if (shift + WIDTH > 16) {
        pair |= uint(words[word + 1]) << 16;
    }
    return float((pair >> shift) & ((1u << WIDTH) - 1));
}

// The sum over 16 codes of code * x. `X` is a pointer into any address space.
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
inline float dot_16(A a, B b) {
    float total = 0.0f;
    for (int i = 0; i < CODES; i++) {
        total += float(a[i]) * float(b[i]);
    }
    return total;
}

template <typename X>
inline float sum_16(X x) {
    float total = 0.0f;
    for (int i = 0; i < CODES; i++) {
        total += float(x[i]);
    }
    return total;
}
