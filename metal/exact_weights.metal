// A weight of bf16, bit for bit, from the value that its code stands for and what that leaves open.
//
// The upper half of the value's bits is the weight's or close to it, and the LOW_BITS lowest bits of the weight say which
// neighbour it is. Near zero the value says little: such a weight has its high byte in `high`. So have all weights of a
// group without a scale.
//
// Nothing here is rounded in a way that a compiler may choose: of scale * code + offset, the product is exact.

enum { NOT_A_NUMBER = 0x7fc0 };  // a weight whose byte is not there: the file lies

enum { LOW_BITS = 8, WINDOW = 144 };
#define NEAR(value, scale) !(fabs(value) > fabs(scale) * 0.5f)

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

// The one of 2^LOW_BITS neighbours of the value that ends in `low`; the first is WINDOW below the value.
inline uint neighbour(float value, uint low) {
    const uint first = (as_type<uint>(value) >> 16) - WINDOW;
    return first + ((low - first) & ((1u << LOW_BITS) - 1));
}

// The bits of CODES weights. `at`: of their first byte in `high`; `there`: whether `high` has all of them.
inline void find_weights(
    const thread float* values, const thread ushort* lows, uint near, const device uchar* high, size_t at, bool there,
    thread ushort* weights) {
    UNROLL for (int i = 0; i < CODES; i++) {
        const uint low = code_from<LOW_BITS>(lows, i * LOW_BITS);
        uint bits = NOT_A_NUMBER;
        if (!(near >> i & 1)) {
            bits = neighbour(values[i], low);
        } else {
            if (there) {
                bits = uint(high[at]) << 8 | low;
            }
            at++;
        }
        weights[i] = ushort(bits);
    }
}
