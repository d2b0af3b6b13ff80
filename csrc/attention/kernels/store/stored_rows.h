// Rows as pools store them: numbers, or codes of 8 bits with one scale behind them,
//     number = code * scale.
// Or numbers of a type, rounded to what such codes can hold, so that they can be sent as codes.
// A scale belongs to one token in one head. So what is stored of a token depends on nothing else.
#pragma once

#include "../../../isa/simd.h"
#include "store.h"

namespace pdserve::attention {
namespace {

template <class S>
constexpr bool kIsCoded = false;
template <>
constexpr bool kIsCoded<Int8> = true;
template <>
constexpr bool kIsCoded<Fp8> = true;

// A number of type T, rounded to a code C times a scale.
template <class T, class C>
struct Rounded {
    T number;
};

typedef int8_t ByteLanes __attribute__((vector_size(kLanes)));

// The numbers of the codes in the lowest byte of each lane.
PDSERVE_INLINE FloatLanes decode(PairLanes lanes, Int8) {
    return __builtin_convertvector((IntLanes)(lanes << 24) >> 24, FloatLanes);
}

// The bits, moved to where float32 has them, are too small by 2**120.
PDSERVE_INLINE FloatLanes decode(PairLanes lanes, Fp8) {
    const auto magnitude = (FloatLanes)((lanes & 0x7f) << 20) * splat(0x1p120f);
    return (FloatLanes)((PairLanes)magnitude | (lanes & 0x80) << 24);
}

PDSERVE_INLINE PairLanes load_bytes(const void* source) {
#if defined(__AVX512F__)
    return (PairLanes)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(source)));
#elif defined(__AVX2__) && !defined(PDSERVE_TILES)
    return (PairLanes)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(source)));
#else
    return (PairLanes)__builtin_convertvector(
        load_as<ByteLanes>(static_cast<const char*>(source)), IntLanes);
#endif
}

// The next kLanes elements of a row, without their scale.
PDSERVE_INLINE FloatLanes load_row(const float* source) { return load(source); }
PDSERVE_INLINE FloatLanes load_row(const BFloat16* source) { return load(source); }
PDSERVE_INLINE FloatLanes load_row(const Int8* source) {
    return __builtin_convertvector((IntLanes)load_bytes(source), FloatLanes);
}
PDSERVE_INLINE FloatLanes load_row(const Fp8* source) { return decode(load_bytes(source), Fp8{}); }

PDSERVE_INLINE float element_of(float value) { return value; }
PDSERVE_INLINE float element_of(BFloat16 value) { return to_float(value); }
PDSERVE_INLINE float element_of(Int8 code) { return code.code; }
PDSERVE_INLINE float element_of(Fp8 code) { return decode(splat(uint32_t{code.code}), code)[0]; }

template <class S>
PDSERVE_INLINE float scale_of(const S* row, int head_dim) {
    float scale;
    __builtin_memcpy(&scale, row + head_dim, sizeof(scale));
    return scale;
}

// A row as bfloat16: of codes without their scale, exactly.
PDSERVE_INLINE void copy_row(const BFloat16* row, int head_dim, BFloat16* target) {
    __builtin_memcpy(target, row, head_dim * sizeof(BFloat16));
}
template <class S>
PDSERVE_INLINE void copy_row(const S* row, int head_dim, BFloat16* target, float scale = 1.0f) {
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
        store(target + d, load_row(row + d) * splat(scale));
    }
    for (; d < head_dim; ++d) assign(target[d], element_of(row[d]) * scale);
}

// Pairs of bfloat16, of numbers that are such.
PDSERVE_INLINE PairLanes exact_pairs(FloatLanes low, FloatLanes high) {
    return (PairLanes)low >> 16 | ((PairLanes)high & 0xffff0000u);
}

// The largest number of which there is a code.
PDSERVE_INLINE float largest_code(Int8) { return 127.0f; }
PDSERVE_INLINE float largest_code(Fp8) { return 448.0f; }

// Codes of numbers that are no larger than that, rounded to nearest, ties to even: in the lowest
// byte of each lane. Adding 1.5 * 2**23 rounds to an integer, which then stands in the low bits.
PDSERVE_INLINE IntLanes encode(FloatLanes x, Int8) { return (IntLanes)(x + splat(12582912.0f)); }

PDSERVE_INLINE IntLanes encode(FloatLanes x, Fp8) {
    const auto sign = (PairLanes)x >> 24 & 0x80;
    const PairLanes bits = (PairLanes)x & 0x7fffffffu;
    const PairLanes normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const FloatLanes magnitude = (FloatLanes)bits;
    const auto denormal = (PairLanes)(magnitude * splat(512.0f) + splat(12582912.0f)) & 0xf;
    return (IntLanes)((magnitude < splat(0x1p-6f) ? denormal : normal) | sign);
}

// Where the row of a token's first head is stored.
template <class S>
PDSERVE_INLINE S* row_of(const StoredTo& to, int64_t token) {
    const int64_t slot = to.slots[token];
    return static_cast<S*>(to.layer_pool) + slot / to.block_size * to.block_stride
        + slot % to.block_size * to.row_elements;
}

// Stores a row.
template <class T>
PDSERVE_INLINE void store_row(const T* row, int head_dim, T* target) {
    __builtin_memcpy(target, row, head_dim * sizeof(T));
}

// Calls body(first, numbers, how many) for all numbers of a row.
template <class T, class Body>
PDSERVE_INLINE void each_of_row(const T* row, int head_dim, const Body& body) {
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) body(d, load(row + d), kLanes);
    for (; d < head_dim; ++d) body(d, splat(to_float(row[d])), 1);
}

// With which the largest number of a row has the largest code: NaN if one is not finite, 0 if it
// were less than `least`.
template <class T>
PDSERVE_INLINE float scale_for(const T* row, int head_dim, float largest_code, float least) {
    FloatLanes largest = {}, not_finite = {};
    each_of_row(row, head_dim, [&](int, FloatLanes x, int) {
        largest = max_of(x < splat(0.0f) ? -x : x, largest);
        not_finite += x * splat(0.0f);
    });
    float scale = largest_of(largest) / largest_code;
    if (scale < least) scale = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (not_finite[lane] != 0.0f) scale = __builtin_nanf("");
    }
    return scale;
}

// Stores a row as codes. Every build stores the same bits. What is not finite makes the scale NaN.
template <class T, class S>
void store_row(const T* row, int head_dim, S* target) {
    static_assert(kIsCoded<S>);
    const float scale =
        scale_for(row, head_dim, largest_code(S{}), 0x1p-126f);  // smaller ones have too few bits
    __builtin_memcpy(target + head_dim, &scale, sizeof(scale));
    if (!(scale > 0.0f)) {
        __builtin_memset(target, 0, head_dim);
        return;
    }
    // A true quotient: its bits are the same everywhere, and nothing can be fused with it.
    each_of_row(row, head_dim, [&](int d, FloatLanes x, int count) {
        const auto codes = __builtin_convertvector(encode(x / splat(scale), S{}), ByteLanes);
        __builtin_memcpy(target + d, &codes, count);
    });
}

// Of 16 bits, so that its products with codes are exact in float32; 0 or NaN as it is. Then a row
// that has been rounded has the same scale, and the same codes, again. None is so small that a
// product would be denormal.
template <class T, class C>
PDSERVE_INLINE float scale_of_rounded(const T* row, int head_dim, C) {
    const float scale = scale_for(row, head_dim, largest_code(C{}), 0x1p-100f);
    if (!(scale > 0.0f)) return scale;
    const uint32_t bits = __builtin_bit_cast(uint32_t, scale);
    return __builtin_bit_cast(float, (bits + 0x7fu + (bits >> 8 & 1)) & ~0xffu);
}

// Stores a row that is rounded. Every build stores the same bits. If one number is not finite, all
// are NaN.
template <class T, class C>
void store_row(const T* row, int head_dim, Rounded<T, C>* target) {
    T* const numbers = &target->number;
    const float scale = scale_of_rounded(row, head_dim, C{});
    if (!(scale > 0.0f)) {
        for (int d = 0; d < head_dim; ++d) assign(numbers[d], scale);
        return;
    }
    each_of_row(row, head_dim, [&](int d, FloatLanes x, int count) {
        const auto codes = (PairLanes)encode(x / splat(scale), C{});
        const FloatLanes rounded = decode(codes, C{}) * splat(scale);
        if (count == kLanes) return store(numbers + d, rounded);
        assign(numbers[d], rounded[0]);
    });
}

}  // namespace
}  // namespace pdserve::attention
