// Rotary positions: pairs of values of each head, turned by an angle that grows with the position.
//
// A thread turns one pair, or copies one of the values behind the first DIMS. The angle of a position is the same, whichever
// other positions are in the call, and `fma` is written out, so that no compiler chooses where to round.
//
// Buffers: x (B, H, L, D) T, by its strides; frequencies (DIMS / 2) float, radians from position to position; offset, the
//     position of the first token; scale, of positions; out (B, H, L, D) T.
// Macros: DIMS, how many values of D are turned; TRADITIONAL, whether a pair's values stand side by side.
// The grid is a thread for each pair and each value to copy, of every head and token.

const int turned = DIMS / 2;
const int dims = x_shape[3];
const int threads = dims - turned;
const int i = thread_position_in_grid.x % threads;
const int row = thread_position_in_grid.x / threads;
const int token = row % x_shape[2];
const int head = row / x_shape[2] % x_shape[1];
const int batch = row / x_shape[2] / x_shape[1];
const size_t from = batch * x_strides[0] + head * x_strides[1] + token * x_strides[2];
const size_t to = size_t(row) * dims;

if (i < turned) {
    const int first = TRADITIONAL ? 2 * i : i;
    const int second = TRADITIONAL ? 2 * i + 1 : i + turned;
    const float angle = float(offset + token) * scale * frequencies[i];
    const float cosine = precise::cos(angle);
    const float sine = precise::sin(angle);
    const float a = float(x[from + first * x_strides[3]]);
    const float b = float(x[from + second * x_strides[3]]);
    out[to + first] = T(fma(a, cosine, -(b * sine)));
    out[to + second] = T(fma(a, sine, b * cosine));
} else {
    out[to + i + turned] = x[from + (i + turned) * x_strides[3]];
}
