// A weight of bf16, bit for bit, from the value that its codes stand for and what they leave open.
//
// The upper half of the value's bits is the weight's or close to it, and the LOW_BITS lowest bits of the weight say which
// neighbour it is. Near zero the value says little: such a weight has a byte of its own in `high`, which holds what the
// low bits do not. A group without a scale has no values, and lies in `high` as it is.
//
// Nothing here is rounded in a way that a compiler may choose: of scale * code + offset, the product is exact.

enum { NOT_A_NUMBER = 0x7fc0 };  // a weight whose byte is not there: the file lies

#if MIDDLE_GEAR  // over codes of 8 bits, whose first 4 are the low gear
enum { LOW_BITS = 5, WINDOW = 16 };
#define NEAR(value, scale) !(fabs(value) >= 8.8f * (fabs(scale) * 0.0625f))
#define WHOLE(scale) (((scale) & 0x7fff) == 0)
#else
enum { LOW_BITS = 8, WINDOW = 144 };
#define NEAR(value, scale) !(fabs(value) > fabs(scale) * 0.5f)
#define WHOLE(scale) false  // a scale of 0 puts every value near zero
#endif

inline float float_of(uint bits) {
    return as_type<float>(bits << 16);
}

// Codes become values. The result has a bit for each that is near zero.
inline uint find_values(thread float* codes, float scale, float offset) {
    uint near = 0;
    UNROLL for (int i = 0; i < CODES; i++) {
        codes[i] = fma(scale, codes[i], offset);
        near |= uint(NEAR(codes[i], scale)) << i;
    }
    return near;
}

// Bytes of `high` that CODES weights take.
inline uint count_bytes(uint near, uint scale) {
    return WHOLE(scale) ? 2 * CODES : popcount(near);
}

// The one of 2^LOW_BITS neighbours of the value that ends in `low`; the first is WINDOW below the value.
inline uint neighbour(float value, uint low) {
    const uint first = (as_type<uint>(value) >> 16) - WINDOW;
    return first + ((low - first) & ((1u << LOW_BITS) - 1));
}

#if MIDDLE_GEAR
// The byte: the sign, and 7 of 12 bits of how far the magnitude lies below 16 steps, which are one scale.
inline uint near_zero(uint byte, uint low, uint scale) {
    const uint top = scale & 0x7fff;
    const uint below = (byte & 0x7f) << 5 | ((top - low) & 31);
    return byte >> 7 << 15 | (below >= 0xf80 ? 0 : (top - below) & 0x7fff);
}
#else
inline uint near_zero(uint byte, uint low, uint scale) {
    return byte << 8 | low;
}
#endif

// The bits of CODES weights. `at`: of their first byte in `high`; `there`: whether `high` has all of them.
inline void find_weights(
    const thread float* values, const thread ushort* lows, uint near, uint scale, const device uchar* high, size_t at,
    bool there, thread ushort* weights) {
    UNROLL for (int i = 0; i < CODES; i++) {
        const uint low = code_from<LOW_BITS>(lows, i * LOW_BITS);
        uint bits = NOT_A_NUMBER;
        if (WHOLE(scale)) {
            if (there) {
                bits = high[at] | uint(high[at + 1]) << 8;
            }
            at += 2;
        } else if (near >> i & 1) {
            if (there) {
                bits = near_zero(high[at], low, scale);
            }
            at++;
        } else {
            bits = neighbour(values[i], low);
        }
        weights[i] = ushort(bits);
    }
}
