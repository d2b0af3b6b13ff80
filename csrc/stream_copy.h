// memcpy for data that is not read soon. Non-temporal stores avoid reading the destination lines
// before writing them, which is a third of the memory traffic (measured: 1.5 times memcpy for
// scattered spans of 64 KiB to 2 MiB).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pdserve {

#if defined(__SSE2__)

// Shorter runs would leave too many half-filled write-combining buffers.
constexpr size_t kMinStreamBytes = 8 << 10;

inline void stream_copy(uint8_t* to, const uint8_t* from, size_t nbytes) {
    if (nbytes < kMinStreamBytes) {
        std::memcpy(to, from, nbytes);
        return;
    }
    const size_t head = -reinterpret_cast<uintptr_t>(to) % 64;
    std::memcpy(to, from, head);
    size_t i = head;
    for (; i + 64 <= nbytes; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i + 1024), _MM_HINT_NTA);
        const auto* source = reinterpret_cast<const __m128i*>(from + i);
        auto* destination = reinterpret_cast<__m128i*>(to + i);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(destination, a);
        _mm_stream_si128(destination + 1, b);
        _mm_stream_si128(destination + 2, c);
        _mm_stream_si128(destination + 3, d);
    }
    std::memcpy(to + i, from + i, nbytes - i);
}

// Non-temporal stores are weakly ordered: call this before telling others that the data is there.
inline void stream_copy_end() { _mm_sfence(); }

#else

inline void stream_copy(uint8_t* to, const uint8_t* from, size_t nbytes) {
    std::memcpy(to, from, nbytes);
}

inline void stream_copy_end() {}

#endif

}  // namespace pdserve
