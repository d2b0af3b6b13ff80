// The gated delta rule, once for each instruction set. A token's bits depend on its own row and on
// the tokens before it alone: not on which rows a step has. All lanes, those behind the last column
// included, go the same way.
//
// The matrix S of a head is as its chunk of kChunk tokens found it; chunks begin at multiples of
// that. Behind the tokens j of the chunk so far it would be
//     d S + sum_j w_j k_j (x) u_j
// where d and w_j are what decays have left. So a token reads S, for its key and its query at once,
// and several tokens of a chunk read it together; only the last one of a chunk writes it.

#include "../isa/build_name.h"
#include "../isa/sigmoid.h"
#include "kernel.h"

namespace pdserve::recurrent {

namespace {

constexpr float kLeastSquares = 1e-6f;  // added to those of queries and keys
constexpr float kLeastShare = 1e-30f;
constexpr int kTogether = 4;            // rows of a chunk that read a matrix together
constexpr int kRead = kRegisters == 32 ? 8 : 4;  // vectors of columns that a lone row reads
constexpr int kColumns = 4;                         // of those that are summed over a chunk
constexpr int kWritten = kRegisters == 32 ? 4 : 2;  // rows of a matrix that are written together

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

// Up to whole vectors; zeros behind the end.
PDSERVE_INLINE FloatLanes load_until(const float* from, int64_t count) {
    if (count >= kLanes) return load(from);
    float lanes[kLanes] = {};
    __builtin_memcpy(lanes, from, count * sizeof(float));
    return load(lanes);
}

PDSERVE_INLINE float dot(const float* a, const float* b, int64_t size) {
    FloatLanes sum = {};
    for (int64_t i = 0; i < size; i += kLanes) sum = multiply_add(sum, load(a + i), load(b + i));
    return sum_of(sum);
}

// What of the scratch memory is whose. Sizes are those of whole vectors.
struct Scratch {
    int64_t keys, values;
    float* queries;   // [kChunk, keys]
    float* mixed;     // [kChunk, channels], convolved
    float* known;     // [kChunk, values]: the matrix times a key
    float* made;      // likewise, a query
    float* by_key;    // [kChunk, kChunk]: keys of the chunk times a row's
    float* by_query;  // likewise, its query
    float* decays;    // [kChunk], as betas
    float* betas;
    float* value;  // [values]
    float* past;  // [kernel - 1, channels]

    Scratch(const Shape& shape, float* memory)
        : keys(padded(shape.key_dim)), values(padded(shape.value_dim)) {
        const auto carve = [&](int64_t size) {
            float* const start = memory;
            memory += padded(size);
            return start;
        };
        const int64_t channels = 2 * shape.key_dim + shape.group_size * shape.value_dim;
        queries = carve(kChunk * keys);
        mixed = carve(kChunk * padded(channels));
        known = carve(kChunk * values);
        made = carve(kChunk * values);
        by_key = carve(kChunk * kChunk);
        by_query = carve(kChunk * kChunk);
        decays = carve(kChunk);
        betas = carve(kChunk);
        value = carve(values);
        past = carve((shape.kernel - 1) * channels);
    }
};

// A row of `width` numbers, of which the first `size` are given.
void copy_padded(float* to, const float* from, int64_t size, int64_t width) {
    __builtin_memcpy(to, from, size * sizeof(float));
    for (int64_t i = size; i < width; ++i) to[i] = 0.0f;
}

// x [size] becomes x / |x|, times `scale`. What is behind it, to whole vectors, is 0.
void normalise(float* x, int64_t size, float scale) {
    const float factor = scale / __builtin_sqrtf(dot(x, x, size) + kLeastSquares);
    for (int64_t i = 0; i < size; i += kLanes) store(x + i, load(x + i) * splat(factor));
}

// Convolves row `r`; of those before the first one, the state has the inputs.
void convolve(const Rows& rows, int64_t r, const float* past, int64_t channels, float* mixed) {
    const int64_t before = rows.shape.kernel - 1;
    for (int64_t c = 0; c < channels; c += kLanes) {
        FloatLanes sum = {};
        for (int64_t tap = 0; tap <= before; ++tap) {
            const int64_t row = r + tap - before;
            const float* const from =
                row < 0 ? past + (row + before) * channels : rows.inputs + row * rows.stride;
            sum = multiply_add(sum, load_until(from + c, channels - c),
                load_until(rows.weights.taps + tap * channels + c, channels - c));
        }
        store(mixed + c, sum * sigmoid_of(sum));
    }
}

// Some columns of a matrix, times the keys and the queries of some rows.
template <int kRows, int kVectors>
void read_columns(float* const* matrix, int64_t column, int64_t key_dim, float* const* keys,
    const float* queries, const Scratch& scratch, int64_t first) {
    FloatLanes known[kRows][kVectors] = {}, made[kRows][kVectors] = {};
    for (int64_t i = 0; i < key_dim; ++i) {
        FloatLanes at[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) at[v] = load(matrix[i] + column + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const FloatLanes key = splat(keys[r][i]), query = splat(queries[r * scratch.keys + i]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                known[r][v] = multiply_add(known[r][v], at[v], key);
                made[r][v] = multiply_add(made[r][v], at[v], query);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const int64_t at = (first + r) * scratch.values + column + v * kLanes;
            store(scratch.known + at, known[r][v]);
            store(scratch.made + at, made[r][v]);
        }
    }
}

template <int kRows, int kVectors>
void read_rows(float* const* matrix, int64_t key_dim, float* const* keys, const Scratch& scratch,
    int64_t first) {
    const float* const queries = scratch.queries + first * scratch.keys;
    int64_t column = 0;
    for (; column + kVectors * kLanes <= scratch.values; column += kVectors * kLanes) {
        read_columns<kRows, kVectors>(matrix, column, key_dim, keys, queries, scratch, first);
    }
    for (; column < scratch.values; column += kLanes) {
        read_columns<kRows, 1>(matrix, column, key_dim, keys, queries, scratch, first);
    }
}

// A head's matrix times keys and queries of `count` rows, those of the chunk from `before` on.
void read_matrix(const Rows& rows, int64_t head, int64_t before, int64_t count,
    const Scratch& scratch) {
    const int64_t key_dim = rows.shape.key_dim;
    float* const* const matrix = rows.state.matrices + head * key_dim;
    float* const* const keys = rows.state.keys + before;
    int64_t r = 0;
    for (; r + kTogether <= count; r += kTogether) {
        read_rows<kTogether, 2>(matrix, key_dim, keys + r, scratch, r);
    }
    for (; r < count; ++r) read_rows<1, kRead>(matrix, key_dim, keys + r, scratch, r);
}

// What a token adds to the matrix, and what its query makes of that, in some columns.
template <int kVectors>
void correct_columns(float* const* deltas, int64_t num_before, const float* of_key,
    const float* of_query, float left, float beta, const float* value, const float* known,
    float* made, int64_t column) {
    FloatLanes old[kVectors], result[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        old[v] = load(known + v * kLanes) * splat(left);
        result[v] = load(made + v * kLanes) * splat(left);
    }
    for (int64_t j = 0; j < num_before; ++j) {
        const FloatLanes key = splat(of_key[j]), query = splat(of_query[j]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const FloatLanes delta = load(deltas[j] + column + v * kLanes);
            old[v] = multiply_add(old[v], delta, key);
            result[v] = multiply_add(result[v], delta, query);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const FloatLanes delta = (load(value + v * kLanes) - old[v]) * splat(beta);
        store(deltas[num_before] + column + v * kLanes, delta);
        store(made + v * kLanes, multiply_add(result[v], delta, splat(of_query[num_before])));
    }
}

// Nothing, rather than a number so small that CPUs take a hundred times as long for it.
float what_is_left(float share, float decay) {
    const float left = share * decay;
    return left < kLeastShare ? 0.0f : left;
}

// Token `r` of those in scratch memory, the chunk's token `n`: its delta, and what it makes.
void correct(const Rows& rows, int64_t head, int64_t r, int64_t n, const float* value,
    const Scratch& scratch) {
    float* const shares = rows.state.shares[head];
    float* const* const deltas = rows.state.deltas + head * kChunk;
    const float decay = scratch.decays[r];
    float of_key[kChunk], of_query[kChunk];
    for (int64_t j = 0; j < n; ++j) shares[j] = what_is_left(shares[j], decay);
    shares[n] = 1.0f;
    shares[kChunk] = what_is_left(n == 0 ? 1.0f : shares[kChunk], decay);
    for (int64_t j = 0; j <= n; ++j) {
        of_key[j] = shares[j] * scratch.by_key[r * kChunk + j];
        of_query[j] = shares[j] * scratch.by_query[r * kChunk + j];
    }
    float* const known = scratch.known + r * scratch.values;
    float* const made = scratch.made + r * scratch.values;
    const float left = shares[kChunk], beta = scratch.betas[r];
    int64_t c = 0;
    for (; c + kColumns * kLanes <= scratch.values; c += kColumns * kLanes) {
        correct_columns<kColumns>(
            deltas, n, of_key, of_query, left, beta, value + c, known + c, made + c, c);
    }
    for (; c < scratch.values; c += kLanes) {
        correct_columns<1>(
            deltas, n, of_key, of_query, left, beta, value + c, known + c, made + c, c);
    }
}

template <int kRows, int kVectors>
void write_rows(float* const* matrix, float* const* keys, int64_t first, float* const* deltas,
    const float* shares, int64_t column) {
    FloatLanes sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            sum[i][v] = load(matrix[first + i] + column + v * kLanes) * splat(shares[kChunk]);
        }
    }
    for (int64_t j = 0; j < kChunk; ++j) {
        FloatLanes delta[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) delta[v] = load(deltas[j] + column + v * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
            const FloatLanes key = splat(shares[j] * keys[j][first + i]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                sum[i][v] = multiply_add(sum[i][v], delta[v], key);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            store(matrix[first + i] + column + v * kLanes, sum[i][v]);
        }
    }
}

template <int kVectors>
void write_columns(float* const* matrix, int64_t key_dim, float* const* keys,
    float* const* deltas, const float* shares, int64_t column) {
    int64_t i = 0;
    for (; i + kWritten <= key_dim; i += kWritten) {
        write_rows<kWritten, kVectors>(matrix, keys, i, deltas, shares, column);
    }
    for (; i < key_dim; ++i) write_rows<1, kVectors>(matrix, keys, i, deltas, shares, column);
}

// Behind a chunk, the matrix takes in what its tokens have added.
void write_matrix(const Rows& rows, int64_t head, int64_t width) {
    const int64_t key_dim = rows.shape.key_dim;
    float* const* const matrix = rows.state.matrices + head * key_dim;
    float* const* const deltas = rows.state.deltas + head * kChunk;
    const float* const shares = rows.state.shares[head];
    int64_t column = 0;
    for (; column + kColumns * kLanes <= width; column += kColumns * kLanes) {
        write_columns<kColumns>(matrix, key_dim, rows.state.keys, deltas, shares, column);
    }
    for (; column < width; column += kLanes) {
        write_columns<1>(matrix, key_dim, rows.state.keys, deltas, shares, column);
    }
}

// The norm of what a head has made, weighed by its gates.
template <class T>
void write_out(const Rows& rows, const float* made, const float* gates, T* out) {
    const int64_t size = rows.shape.value_dim;
    const float mean = dot(made, made, size) / static_cast<float>(size);
    const float factor = 1.0f / __builtin_sqrtf(mean + rows.weights.norm_eps);
    for (int64_t i = 0; i < size; i += kLanes) {
        const FloatLanes z = load_until(gates + i, size - i);
        const FloatLanes weight = load_until(rows.weights.value_norm + i, size - i);
        const FloatLanes result = load(made + i) * splat(factor) * weight * (z * sigmoid_of(z));
        if (size - i >= kLanes) {
            store(out + i, result);
            continue;
        }
        float last[kLanes];
        store(last, result);
        for (int64_t j = 0; j < size - i; ++j) assign(out[i + j], last[j]);
    }
}

// Queries and keys of `count` rows from `first` on, and keys of the chunk times both.
void begin(const Rows& rows, int64_t first, int64_t before, int64_t count,
    const Scratch& scratch) {
    const Shape& shape = rows.shape;
    const int64_t key_dim = shape.key_dim;
    const int64_t channels = 2 * key_dim + shape.group_size * shape.value_dim;
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(key_dim));
    for (int64_t r = 0; r < count; ++r) {
        float* const mixed = scratch.mixed + r * padded(channels);
        float* const query = scratch.queries + r * scratch.keys;
        float* const key = rows.state.keys[before + r];
        convolve(rows, first + r, scratch.past, channels, mixed);
        copy_padded(query, mixed, key_dim, scratch.keys);
        copy_padded(key, mixed + key_dim, key_dim, scratch.keys);
        normalise(query, key_dim, query_scale);
        normalise(key, key_dim, 1.0f);
        for (int64_t j = 0; j <= before + r; ++j) {
            scratch.by_key[r * kChunk + j] = dot(rows.state.keys[j], key, key_dim);
            scratch.by_query[r * kChunk + j] = dot(rows.state.keys[j], query, key_dim);
        }
    }
}

// Decays and betas of a head, of `count` rows from `first` on.
void weigh(const Rows& rows, int64_t head, int64_t first, int64_t count, const Scratch& scratch) {
    const int64_t size = rows.shape.group_size;
    float steps[kChunk] = {}, betas[kChunk] = {};
    for (int64_t r = 0; r < count; ++r) {
        const float* const row = rows.betas + (first + r) * rows.stride;
        betas[r] = row[head];
        steps[r] = row[size + head] + rows.weights.decay_bias[head];
    }
    const FloatLanes rate = exp_of(splat(rows.weights.decay[head]));
    for (int64_t r = 0; r < count; r += kLanes) {
        store(scratch.decays + r, exp_of(-rate * softplus(load(steps + r))));
        store(scratch.betas + r, sigmoid_of(load(betas + r)));
    }
}

template <class T>
void mix(const Rows& rows) {
    const Shape& shape = rows.shape;
    const int64_t value_dim = shape.value_dim, before = shape.kernel - 1;
    const int64_t channels = 2 * shape.key_dim + shape.group_size * value_dim;
    const Scratch scratch(shape, rows.scratch);
    for (int64_t i = 0; i < before; ++i) {
        __builtin_memcpy(
            scratch.past + i * channels, rows.state.inputs[i], channels * sizeof(float));
    }
    int64_t n = rows.num_before;
    for (int64_t first = 0; first < rows.num_rows;) {
        const int64_t left = rows.num_rows - first;
        const int64_t count = left < kChunk - n ? left : kChunk - n;
        begin(rows, first, n, count, scratch);
        for (int64_t h = 0; h < shape.group_size; ++h) {
            weigh(rows, h, first, count, scratch);
            read_matrix(rows, h, n, count, scratch);
            for (int64_t r = 0; r < count; ++r) {
                const int64_t row = first + r;
                const float* const mixed = scratch.mixed + r * padded(channels);
                copy_padded(scratch.value, mixed + 2 * shape.key_dim + h * value_dim, value_dim,
                    scratch.values);
                correct(rows, h, r, n + r, scratch.value, scratch);
                const float* const gates = rows.inputs + row * rows.stride + channels;
                T* const out = static_cast<T*>(rows.out) + row * rows.out_stride;
                write_out<T>(rows, scratch.made + r * scratch.values, gates + h * value_dim,
                    out + h * value_dim);
            }
            if (n + count == kChunk) write_matrix(rows, h, scratch.values);
        }
        first += count;
        n = (n + count) % kChunk;
    }
    for (int64_t i = 0; i < before; ++i) {
        const int64_t row = rows.num_rows + i - before;
        const float* const from = row < 0 ? scratch.past + (row + before) * channels
                                          : rows.inputs + row * rows.stride;
        __builtin_memcpy(rows.state.inputs[i], from, channels * sizeof(float));
    }
}

}  // namespace

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {mix<float>, mix<BFloat16>};

}  // namespace pdserve::recurrent
