// Rows of numbers that have been rounded to codes, as those codes, and back: without loss.

#include "row_codes.h"

#include "../../../isa/build_name.h"
#include "stored_rows.h"

namespace pdserve::attention {
namespace {

template <class T, class C>
bool same_row(const T* row, const C* codes, float scale, int row_dim) {
    bool is_same = true;
    each_of_row(row, row_dim, [&](int d, FloatLanes x, int count) {
        const int lanes = count == kLanes ? kLanes : 1;
        T found[kLanes];
        if (lanes == kLanes) {
            store(found, load_row(codes + d) * splat(scale));
        } else {
            assign(found[0], element_of(codes[d]) * scale);
        }
        is_same &= __builtin_memcmp(found, row + d, lanes * sizeof(T)) == 0;
    });
    return is_same;
}

template <class T, class C>
bool code_rows(const void* numbers, int64_t num_rows, int row_dim, void* coded) {
    const T* row = static_cast<const T*>(numbers);
    C* to = static_cast<C*>(coded);
    for (int64_t i = 0; i < num_rows; ++i, row += row_dim, to += row_dim + sizeof(float)) {
        const float scale = scale_of_rounded(row, row_dim, C{});
        __builtin_memcpy(to + row_dim, &scale, sizeof scale);
        if (scale > 0.0f) {
            each_of_row(row, row_dim, [&](int d, FloatLanes x, int count) {
                const auto codes =
                    __builtin_convertvector(encode(x / splat(scale), C{}), ByteLanes);
                __builtin_memcpy(to + d, &codes, count);
            });
        } else {
            __builtin_memset(to, 0, row_dim);
        }
        if (!same_row(row, to, scale, row_dim)) return false;
    }
    return true;
}

template <class T, class C>
void decode_rows(const void* coded, int64_t num_rows, int row_dim, void* numbers) {
    const C* from = static_cast<const C*>(coded);
    T* row = static_cast<T*>(numbers);
    for (int64_t i = 0; i < num_rows; ++i, row += row_dim, from += row_dim + sizeof(float)) {
        const float scale = scale_of(from, row_dim);
        int d = 0;
        for (; d + kLanes <= row_dim; d += kLanes) {
            store(row + d, load_row(from + d) * splat(scale));
        }
        for (; d < row_dim; ++d) assign(row[d], element_of(from[d]) * scale);
    }
}

}  // namespace

const RowCodeKernels PDSERVE_OF_THIS_BUILD(RowCodeKernels) = {
    {{code_rows<float, Int8>, decode_rows<float, Int8>},
        {code_rows<float, Fp8>, decode_rows<float, Fp8>}},
    {{code_rows<BFloat16, Int8>, decode_rows<BFloat16, Int8>},
        {code_rows<BFloat16, Fp8>, decode_rows<BFloat16, Fp8>}}};

}  // namespace pdserve::attention
