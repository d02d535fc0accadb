// A bf16 weight, bit for bit, from its code's value and additional bits.
//
// The value's upper 16 bits equal or neighbor the weight's, and the weight's low byte identifies the neighbor. Near zero,
// the value is too inexact, and the weight's high byte is in `high`; so is that of all weights in a group without a scale.
//
// No compiler chooses how to round here: in scale * code + offset, the product is exact. On Apple's cores, an addition, a
// selecting comparison or a bitwise operation takes one cycle, but a shift or a conversion takes four. So codes become
// numbers without either, and halves of 32 bits are accessed as vector components.

enum { NOT_A_NUMBER = 0x7fc0 };  // a weight without its byte, in a damaged file

enum { WINDOW = 144, HIGH_BYTE = 0xff00 };
#define NEAR(value, scale) !(fabs(value) > fabs(scale) * 0.5f)

inline float float_of(ushort bits) {
    ushort2 halves;
    halves.x = 0;
    halves.y = bits;
    return as_type<float>(halves);
}

// Code i of a word, as a number: unshifted, the code becomes part of the significand of a number so large that the code
// counts ones; then that number is subtracted.
inline float code_value(uint word, int i) {
    const int place = i % 4 * CODE_BITS;
    const uint large = (127u + 23 - place) << 23;  // 2^(23 - place)
    const uint code = as_type<ushort2>(word)[i / 4] & ((1u << CODE_BITS) - 1) << place;
    return as_type<float>(large | code) - as_type<float>(large);
}

// Decode the values of CODES codes, and return how many of them are near zero.
inline uint find_values(uint word, float scale, float offset, thread float* values) {
    uint near = 0;
    UNROLL for (int i = 0; i < CODES; i++) {
        values[i] = fma(scale, code_value(word, i), offset);
        near += NEAR(values[i], scale) ? 1 : 0;
    }
    return near;
}

// The weight with low byte `low`. Far from zero, it is one of 256 neighbors of the value, the first of which is WINDOW below
// it; near zero, its high byte is `high`, already shifted.
inline float weight_of(float value, bool near, ushort high, ushort low) {
    const ushort far = (as_type<ushort2>(value).y + (255 - WINDOW) - low) & HIGH_BYTE;
    return float_of((near ? high : far) | low);
}

// Turn values into weights; all lanes call it together. `high`: the lanes' bytes, `total` of them, of which `left` exist;
// `first`: index of this lane's first byte.
//
// Two bytes per lane are nearly always enough: lanes load adjacent bytes and exchange them. Otherwise each lane reads its
// own bytes, and a weight without its byte is NaN.
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
