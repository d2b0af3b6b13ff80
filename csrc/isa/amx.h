// The tile registers of AMX: eight, each of 16 rows of 64 bytes.
//
// Compiled for AMX these are its instructions, and else plain loops with the same result but for
// rounding, so that kernels on tiles can be tested on any CPU. The kernels use whole tiles only,
// padded with zeros: that costs no time, since few rows wait for memory, and tiles need not be
// configured again and again.
//
// Everything has internal linkage; see element.h for why.
#pragma once

#include <cstdint>
#include <utility>

#include "simd.h"

namespace pdserve {
namespace {

constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = 16 * kTileRowBytes;

#if defined(__AMX_BF16__)

// While one is alive, this thread may use tiles. Idle threads have none, so that they need not be
// saved when threads take turns on a core.
class Tiles {
public:
    Tiles() {
        struct alignas(64) Configuration {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t num_rows[16] = {};
        };
        Configuration configuration;
        for (int tile = 0; tile < 8; ++tile) {
            configuration.row_bytes[tile] = kTileRowBytes;
            configuration.num_rows[tile] = 16;
        }
        asm volatile("ldtilecfg %0" : : "m"(configuration));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int kTile>
    [[gnu::always_inline]] void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
    }

    // Rows of 64 bytes, `stride` bytes apart.
    template <int kTile>
    [[gnu::always_inline]] void load(const void* start, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(start), "r"(stride), "i"(kTile)
                     : "memory");
    }

    template <int kTile>
    [[gnu::always_inline]] void store(void* start, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(start), "r"(stride), "i"(kTile)
                     : "memory");
    }

    // sums[m][n] += the sum over k of a[m][2k] b[k][2n] + a[m][2k + 1] b[k][2n + 1]. The order and
    // the roundings are the same for every m and n, and for a and b exchanged.
    template <int kSums, int kA, int kB>
    [[gnu::always_inline]] void multiply_bfloat16() {
        asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kB), "i"(kA), "i"(kSums));
    }

    // sums[m][n] += the sum over k < 64 of a[m][k], signed, times b[k / 4][4n + k % 4], unsigned.
    template <int kSums, int kA, int kB>
    [[gnu::always_inline]] void multiply_bytes() {
        asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kB), "i"(kA), "i"(kSums));
    }
};

#else

class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int kTile>
    void zero() {
        __builtin_memset(tiles_[kTile], 0, kTileBytes);
    }

    template <int kTile>
    void load(const void* start, int64_t stride) {
        for (int row = 0; row < 16; ++row) {
            __builtin_memcpy(tiles_[kTile] + row * kTileRowBytes,
                static_cast<const char*>(start) + row * stride, kTileRowBytes);
        }
    }

    template <int kTile>
    void store(void* start, int64_t stride) {
        for (int row = 0; row < 16; ++row) {
            __builtin_memcpy(static_cast<char*>(start) + row * stride,
                tiles_[kTile] + row * kTileRowBytes, kTileRowBytes);
        }
    }

    template <int kSums, int kA, int kB>
    void multiply_bfloat16() {
        float even[16][16] = {}, odd[16][16] = {};
        float b[2][16][16];
        for (int k = 0; k < 16; ++k) {
            for (int n = 0; n < 16; ++n) {
                b[0][k][n] = element(kB, k, 2 * n);
                b[1][k][n] = element(kB, k, 2 * n + 1);
            }
        }
        for (int m = 0; m < 16; ++m) {
            for (int k = 0; k < 16; ++k) {
                const float low = element(kA, m, 2 * k), high = element(kA, m, 2 * k + 1);
                for (int n = 0; n < 16; ++n) {
                    even[m][n] += low * b[0][k][n];
                    odd[m][n] += high * b[1][k][n];
                }
            }
        }
        auto* sums = reinterpret_cast<float*>(tiles_[kSums]);
        for (int i = 0; i < 16 * 16; ++i) sums[i] += even[i / 16][i % 16] + odd[i / 16][i % 16];
    }

    template <int kSums, int kA, int kB>
    void multiply_bytes() {
        auto* sums = reinterpret_cast<int32_t*>(tiles_[kSums]);
        for (int m = 0; m < 16; ++m) {
            const auto* a = reinterpret_cast<const int8_t*>(tiles_[kA] + m * kTileRowBytes);
            for (int k = 0; k < kTileRowBytes; ++k) {
                const uint8_t* b = tiles_[kB] + k / 4 * kTileRowBytes + k % 4;
                for (int n = 0; n < 16; ++n) sums[m * 16 + n] += a[k] * b[4 * n];
            }
        }
    }

private:
    float element(int tile, int row, int index) const {
        BFloat16 value;
        __builtin_memcpy(&value, tiles_[tile] + row * kTileRowBytes + index * 2, 2);
        return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
    }

    alignas(64) unsigned char tiles_[8][kTileBytes];
};

#endif

// The numbers of tile registers have to be constants.
template <int i>
struct Index {
    constexpr operator int() const { return i; }
};

// Calls body(Index<i>) for i in [0, N).
template <int N, class Body>
PDSERVE_INLINE void unrolled(const Body& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (body(Index<i>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

}  // namespace
}  // namespace pdserve
