// A weight of bf16, bit for bit, from the value that its code stands for and what that leaves open.
//
// The upper half of the value's bits is the weight's or close to it, and the low byte of the weight says which neighbor it
// is. Near zero the value says little: such a weight has its high byte in `high`. So have all weights of a group without a
// scale.
//
// Nothing here is rounded in a way that a compiler may choose: of scale * code + offset, the product is exact. On Apple's
// cores an addition, a comparison that selects or a bitwise operation takes one cycle, but a shift or a conversion four: so
// codes become numbers without either, and halves of 32 bits are named, not shifted.

enum { NOT_A_NUMBER = 0x7fc0 };  // a weight whose byte is not there: the file lies

enum { WINDOW = 144, HIGH_BYTE = 0xff00 };
#define NEAR(value, scale) !(fabs(value) > fabs(scale) * 0.5f)

inline float float_of(ushort bits) {
    ushort2 halves;
    halves.x = 0;
    halves.y = bits;
    return as_type<float>(halves);
}

// Code i of a word, as a number. Where the code lies in its half of the word, it is part of the significand of a number that
// is large enough for the code to count ones; that number is subtracted.
inline float code_value(uint word, int i) {
    const int place = i % 4 * CODE_BITS;
    const uint large = (127u + 23 - place) << 23;  // 2^(23 - place)
    const uint code = as_type<ushort2>(word)[i / 4] & ((1u << CODE_BITS) - 1) << place;
    return as_type<float>(large | code) - as_type<float>(large);
}

// What CODES codes stand for. The result is how many of them are near zero.
inline uint find_values(uint word, float scale, float offset, thread float* values) {
    uint near = 0;
    UNROLL for (int i = 0; i < CODES; i++) {
        values[i] = fma(scale, code_value(word, i), offset);
        near += NEAR(values[i], scale) ? 1 : 0;
    }
    return near;
}

// The weight that ends in `low`: far from zero the one of 256 neighbors of the value, of which the first is WINDOW below it,
// near zero the one that begins with `high`, a byte in its place.
inline float weight_of(float value, bool near, ushort high, ushort low) {
    const ushort far = (as_type<ushort2>(value).y + (255 - WINDOW) - low) & HIGH_BYTE;
    return float_of((near ? high : far) | low);
}

// Values become weights. All lanes call it together. `high`: where the bytes of all of them begin, `total` bytes, of which
// `left` are there; `first`, which one is this lane's first.
//
// Two bytes of each lane are nearly always enough: lanes load them side by side, and take theirs from each other. Else each
// lane reads its own, and where one is not there, the weight is no number.
inline void find_weights(
    thread float* values, const thread ushort* lows, float scale, const device uchar* high, uint first, uint total,
    uint left, uint lane) {
    const uint there = min(left, total);
    uint place = first;
    if (total == there && total <= 2 * LANES) {
        ushort2 bytes;
        bytes.x = 0;
        bytes.y = 0;
        if (lane < total) {
            bytes.x = high[lane];
        }
        if (lane + LANES < total) {
            bytes.y = high[lane + LANES];
        }
        const uint held = as_type<uint>(bytes) << 8;
        UNROLL for (int i = 0; i < CODES; i++) {
            const ushort2 two = as_type<ushort2>(simd_shuffle(held, ushort(place % LANES)));
            const bool near = NEAR(values[i], scale);
            values[i] = weight_of(values[i], near, place < LANES ? two.x : two.y, lows[i]);
            place += near ? 1 : 0;
        }
    } else {
        UNROLL for (int i = 0; i < CODES; i++) {
            const bool near = NEAR(values[i], scale);
            const bool found = near && place < there;
            const ushort upper = found ? uint(high[place]) << 8 : 0;
            values[i] = near && !found ? float_of(NOT_A_NUMBER) : weight_of(values[i], near, upper, lows[i]);
            place += near ? 1 : 0;
        }
    }
}
