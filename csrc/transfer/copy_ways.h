// The ways of copying data that is not read soon. Stores past the caches (non-temporal) avoid reading
// the destination lines before writing them, which is a third of the memory traffic. How the source
// is best read meanwhile differs between processors: on a Zen 4 a prefetch past the caches pays, on
// an Intel Xeon it costs more than it gains, and reading four pages at a time keeps four of the
// hardware's prefetchers busy. So copy_choice.h measures.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pdserve {

using Copy = void (*)(uint8_t* to, const uint8_t* from, size_t nbytes);

struct CopyWay {
    const char* name;
    Copy copy;
};

inline void copy_cached(uint8_t* to, const uint8_t* from, size_t nbytes) {
    std::memcpy(to, from, nbytes);
}

#if defined(__SSE2__)

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;  // a hardware prefetcher follows one stream in a page

// `to` is aligned to a line.
inline void stream_line(uint8_t* to, const uint8_t* from) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* destination = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, a);
    _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c);
    _mm_stream_si128(destination + 3, d);
}

// Copies up to the first line border of `to`, and returns how much that was.
inline size_t copy_head(uint8_t* to, const uint8_t* from, size_t nbytes) {
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
    if (head > nbytes) return 0;
    std::memcpy(to, from, head);
    return head;
}

// Past the caches line by line; the source is prefetched past them too.
inline void copy_prefetched(uint8_t* to, const uint8_t* from, size_t nbytes) {
    constexpr size_t kAhead = 1024;
    size_t i = copy_head(to, from, nbytes);
    for (; i + kLine <= nbytes; i += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i + kAhead), _MM_HINT_NTA);
        stream_line(to + i, from + i);
    }
    std::memcpy(to + i, from + i, nbytes - i);
}

// Past the caches, two lines from each of `kPages` pages in turn.
template <size_t kPages>
size_t copy_pages(uint8_t* to, const uint8_t* from, size_t nbytes) {
    size_t begin = 0;
    for (; begin + kPages * kPage <= nbytes; begin += kPages * kPage)
        for (size_t i = begin; i < begin + kPage; i += 2 * kLine)
            for (size_t at = i; at < i + kPages * kPage; at += kPage) {
                stream_line(to + at, from + at);
                stream_line(to + at + kLine, from + at + kLine);
            }
    return begin;
}

inline void copy_interleaved(uint8_t* to, const uint8_t* from, size_t nbytes) {
    size_t i = copy_head(to, from, nbytes);
    i += copy_pages<4>(to + i, from + i, nbytes - i);
    i += copy_pages<2>(to + i, from + i, nbytes - i);
    std::memcpy(to + i, from + i, nbytes - i);
}

inline constexpr std::array<CopyWay, 3> kCopyWays{{
    {"cached", copy_cached},
    {"prefetched", copy_prefetched},
    {"interleaved", copy_interleaved},
}};

// Non-temporal stores are weakly ordered: call this before telling others that the data is there.
inline void copies_end() { _mm_sfence(); }

// Makes the next access to a line one to memory.
inline void evict(const uint8_t* line) { _mm_clflush(line); }
inline void evictions_end() { _mm_mfence(); }

#else

constexpr size_t kLine = 64;

inline constexpr std::array<CopyWay, 1> kCopyWays{{{"cached", copy_cached}}};

inline void copies_end() {}
inline void evict(const uint8_t*) {}
inline void evictions_end() {}

#endif

}  // namespace pdserve
