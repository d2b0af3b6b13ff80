// The gated delta rule, token by token, once for each instruction set. A token's bits depend on its
// own row and on the state before it alone: not on which rows a step has. All lanes, those behind
// the last column included, go the same way.

#include "../isa/build_name.h"
#include "../isa/sigmoid.h"
#include "kernel.h"

namespace pdserve::recurrent {

namespace {

constexpr float kLeastSquares = 1e-6f;  // added to those of queries and keys
constexpr int kColumns = 4;             // vectors of a state's columns at a time

int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// exp(x), of any finite x.
PDSERVE_INLINE FloatLanes exp_of(FloatLanes x) {
    const FloatLanes magnitude = x < splat(0.0f) ? -x : x;
    const FloatLanes small = exp2_of_nonpositive(magnitude * splat(-kLog2E));
    return x < splat(0.0f) ? small : splat(1.0f) / small;
}

// log(1 + exp(x)): with s = e / (2 + e), log(1 + e) is twice s + s³/3 + s⁵/5 + ...
PDSERVE_INLINE FloatLanes softplus(FloatLanes x) {
    const FloatLanes magnitude = x < splat(0.0f) ? -x : x;
    const FloatLanes small = exp2_of_nonpositive(magnitude * splat(-kLog2E));
    const FloatLanes s = small / (splat(2.0f) + small), square = s * s;
    FloatLanes p = splat(1.0f / 15.0f);
#pragma GCC unroll 7
    for (int odd = 13; odd > 0; odd -= 2) {
        p = multiply_add(splat(1.0f / static_cast<float>(odd)), p, square);
    }
    return (x < splat(0.0f) ? splat(0.0f) : x) + (s + s) * p;
}

PDSERVE_INLINE float one(FloatLanes lanes) { return lanes[0]; }

// x [size] becomes x / |x|, times `scale`. What is behind it, to whole vectors, is 0.
void normalise(float* x, int64_t size, float scale) {
    FloatLanes squares = {};
    for (int64_t i = 0; i < padded(size); i += kLanes) {
        squares = multiply_add(squares, load(x + i), load(x + i));
    }
    const float factor = scale / __builtin_sqrtf(sum_of(squares) + kLeastSquares);
    for (int64_t i = 0; i < padded(size); i += kLanes) store(x + i, load(x + i) * splat(factor));
}

// Decays and corrects some columns of a state [key_dim, width], and multiplies them by the query.
template <int kVectors>
void go_on(float* state, int64_t width, int64_t key_dim, const float* query, const float* key,
    const float* value, float decay, float beta, float* out) {
    FloatLanes known[kVectors] = {}, made[kVectors] = {}, delta[kVectors];
    for (int64_t i = 0; i < key_dim; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            known[v] = multiply_add(known[v], load(state + i * width + v * kLanes), splat(key[i]));
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        delta[v] = (load(value + v * kLanes) - known[v] * splat(decay)) * splat(beta);
    }
    for (int64_t i = 0; i < key_dim; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            float* const at = state + i * width + v * kLanes;
            const FloatLanes next =
                multiply_add(load(at) * splat(decay), splat(key[i]), delta[v]);
            store(at, next);
            made[v] = multiply_add(made[v], next, splat(query[i]));
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, made[v]);
}

void go_on_all(float* state, int64_t width, int64_t key_dim, const float* query, const float* key,
    const float* value, float decay, float beta, float* out) {
    int64_t column = 0;
    for (; column + kColumns * kLanes <= width; column += kColumns * kLanes) {
        go_on<kColumns>(state + column, width, key_dim, query, key, value + column, decay, beta,
            out + column);
    }
    for (; column < width; column += kLanes) {
        go_on<1>(state + column, width, key_dim, query, key, value + column, decay, beta,
            out + column);
    }
}

// What of the scratch memory is whose.
struct Scratch {
    float* query;   // padded key_dim, as key
    float* key;
    float* value;   // padded value_dim, as made
    float* made;
    float* mixed;   // channels, convolved
    float* past;    // [kernel - 1, channels]
    float* states;  // [group_size, key_dim, padded value_dim]

    Scratch(const Shape& shape, float* memory) {
        const auto carve = [&](int64_t size) {
            float* const start = memory;
            memory += padded(size);
            return start;
        };
        const int64_t channels = 2 * shape.key_dim + shape.group_size * shape.value_dim;
        query = carve(shape.key_dim);
        key = carve(shape.key_dim);
        value = carve(shape.value_dim);
        made = carve(shape.value_dim);
        mixed = carve(channels);
        past = carve((shape.kernel - 1) * channels);
        states = memory;
    }
};

void copy_padded(float* to, const float* from, int64_t size) {
    __builtin_memcpy(to, from, size * sizeof(float));
    for (int64_t i = size; i < padded(size); ++i) to[i] = 0.0f;
}

// Convolves row `r`; of those before the first one, the state has the inputs.
void convolve(const Rows& rows, int64_t r, const float* past, int64_t channels, float* mixed) {
    const int64_t before = rows.shape.kernel - 1;
    for (int64_t c = 0; c < padded(channels); c += kLanes) {
        const int64_t count = channels - c < kLanes ? channels - c : kLanes;
        FloatLanes sum = {};
        for (int64_t tap = 0; tap <= before; ++tap) {
            const int64_t row = r + tap - before;
            const float* const from =
                row < 0 ? past + (row + before) * channels : rows.inputs + row * rows.stride;
            float input[kLanes] = {}, weight[kLanes] = {};
            __builtin_memcpy(input, from + c, count * sizeof(float));
            __builtin_memcpy(
                weight, rows.weights.taps + tap * channels + c, count * sizeof(float));
            sum = multiply_add(sum, load(input), load(weight));
        }
        store(mixed + c, sum * sigmoid_of(sum));
    }
}

// The norm of what a head has made, weighed by its gates.
template <class T>
void write_out(const Rows& rows, const float* made, const float* gates, T* out) {
    const int64_t size = rows.shape.value_dim;
    FloatLanes squares = {};
    for (int64_t i = 0; i < padded(size); i += kLanes) {
        squares = multiply_add(squares, load(made + i), load(made + i));
    }
    const float mean = sum_of(squares) / static_cast<float>(size);
    const float factor = 1.0f / __builtin_sqrtf(mean + rows.weights.norm_eps);
    for (int64_t i = 0; i < padded(size); i += kLanes) {
        const int64_t count = size - i < kLanes ? size - i : kLanes;
        float gate[kLanes] = {}, weight[kLanes] = {};
        __builtin_memcpy(gate, gates + i, count * sizeof(float));
        __builtin_memcpy(weight, rows.weights.value_norm + i, count * sizeof(float));
        const FloatLanes z = load(gate);
        float result[kLanes];
        store(result, load(made + i) * splat(factor) * load(weight) * (z * sigmoid_of(z)));
        for (int64_t j = 0; j < count; ++j) assign(out[i + j], result[j]);
    }
}

template <class T>
void mix(const Rows& rows) {
    const Shape& shape = rows.shape;
    const int64_t key_dim = shape.key_dim, value_dim = shape.value_dim;
    const int64_t width = padded(value_dim), before = shape.kernel - 1;
    const int64_t channels = 2 * key_dim + shape.group_size * value_dim;
    const Scratch scratch(shape, rows.scratch);
    float* const heads = rows.state + before * channels;
    const int64_t num_state_rows = shape.group_size * key_dim;
    __builtin_memcpy(scratch.past, rows.state, before * channels * sizeof(float));
    for (int64_t i = 0; i < num_state_rows; ++i) {
        copy_padded(scratch.states + i * width, heads + i * value_dim, value_dim);
    }
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(key_dim));
    for (int64_t r = 0; r < rows.num_rows; ++r) {
        convolve(rows, r, scratch.past, channels, scratch.mixed);
        copy_padded(scratch.query, scratch.mixed, key_dim);
        copy_padded(scratch.key, scratch.mixed + key_dim, key_dim);
        normalise(scratch.query, key_dim, query_scale);
        normalise(scratch.key, key_dim, 1.0f);
        const float* const betas = rows.betas + r * rows.stride;
        const float* const gates = rows.inputs + r * rows.stride + channels;
        T* const out = static_cast<T*>(rows.out) + r * rows.out_stride;
        for (int64_t h = 0; h < shape.group_size; ++h) {
            copy_padded(scratch.value, scratch.mixed + 2 * key_dim + h * value_dim, value_dim);
            const float step = one(softplus(
                splat(betas[shape.group_size + h] + rows.weights.decay_bias[h])));
            const float rate = one(exp_of(splat(rows.weights.decay[h])));
            const float decay = one(exp_of(splat(-rate * step)));
            go_on_all(scratch.states + h * key_dim * width, width, key_dim, scratch.query,
                scratch.key, scratch.value, decay, one(sigmoid_of(splat(betas[h]))), scratch.made);
            write_out<T>(rows, scratch.made, gates + h * value_dim, out + h * value_dim);
        }
    }
    for (int64_t i = 0; i < num_state_rows; ++i) {
        __builtin_memcpy(heads + i * value_dim, scratch.states + i * width,
            value_dim * sizeof(float));
    }
    for (int64_t i = 0; i < before; ++i) {
        const int64_t row = rows.num_rows + i - before;
        const float* const from = row < 0 ? scratch.past + (row + before) * channels
                                          : rows.inputs + row * rows.stride;
        __builtin_memcpy(rows.state + i * channels, from, channels * sizeof(float));
    }
}

}  // namespace

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {mix<float>, mix<BFloat16>};

}  // namespace pdserve::recurrent
