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

#include "block_sum.h"

namespace pdserve {

using Copy = void (*)(uint8_t* to, const uint8_t* from, size_t nbytes);
// Adds to `sum`, whose next word is the first one of `from`, what it copies; so nbytes is a multiple
// of 8, unless they are the last ones.
using SummedCopy = void (*)(uint8_t* to, const uint8_t* from, size_t nbytes, BlockSum& sum);

struct CopyWay {
    const char* name;
    Copy copy;
    SummedCopy summed;
};

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;  // a hardware prefetcher follows one stream in a page

inline void copy_cached(uint8_t* to, const uint8_t* from, size_t nbytes) {
    std::memcpy(to, from, nbytes);
}

// Page by page, so that what is added up is in the cache.
inline void sum_cached(uint8_t* to, const uint8_t* from, size_t nbytes, BlockSum& sum) {
    for (size_t i = 0; i < nbytes; i += kPage) {
        const size_t piece = nbytes - i < kPage ? nbytes - i : kPage;
        sum.add(from + i, piece);
        std::memcpy(to + i, from + i, piece);
    }
}

#if defined(__SSE2__)

// In place of a sum where none is wanted.
struct NoSum {
    void add(__m128i) {}
    void skip(int64_t) {}
};

// `to` is aligned to a line.
template <class Sum>
inline void stream_line(uint8_t* to, const uint8_t* from, Sum& sum) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* destination = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, a);
    _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c);
    _mm_stream_si128(destination + 3, d);
    sum.add(a), sum.add(b), sum.add(c), sum.add(d);
}

// How many bytes of `to` there are before its first line border, if it has one.
inline size_t head_bytes(const uint8_t* to, size_t nbytes) {
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
    return head > nbytes ? 0 : head;
}

// Past the caches line by line; the source is prefetched past them too. Returns where it ended.
template <class Sum>
inline size_t prefetched_lines(uint8_t* to, const uint8_t* from, size_t i, size_t nbytes, Sum& sum) {
    constexpr size_t kAhead = 1024;
    for (; i + kLine <= nbytes; i += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i + kAhead), _MM_HINT_NTA);
        stream_line(to + i, from + i, sum);
    }
    return i;
}

// Past the caches, two lines from each of `kPages` pages in turn. Returns where it ended.
template <size_t kPages, class Sum>
inline size_t paged_lines(uint8_t* to, const uint8_t* from, size_t begin, size_t nbytes, Sum& sum) {
    for (; begin + kPages * kPage <= nbytes; begin += kPages * kPage) {
        for (size_t i = begin; i < begin + kPage; i += 2 * kLine) {
            for (size_t at = i; at < i + kPages * kPage; at += kPage) {
                stream_line(to + at, from + at, sum);
                stream_line(to + at + kLine, from + at + kLine, sum);
                sum.skip(kPage - 2 * kLine);
            }
            sum.skip(-(kPages * kPage) + 2 * kLine);
        }
        sum.skip((kPages - 1) * kPage);
    }
    return begin;
}

template <class Sum>
inline size_t interleaved_lines(uint8_t* to, const uint8_t* from, size_t i, size_t nbytes, Sum& sum) {
    i = paged_lines<4>(to, from, i, nbytes, sum);
    return paged_lines<2>(to, from, i, nbytes, sum);
}

using Lines = size_t (*)(uint8_t*, const uint8_t*, size_t, size_t, NoSum&);
using SummedLines = size_t (*)(uint8_t*, const uint8_t*, size_t, size_t, BlockSum&);

template <Lines lines>
void copy_lines(uint8_t* to, const uint8_t* from, size_t nbytes) {
    NoSum none;
    const size_t head = head_bytes(to, nbytes);
    std::memcpy(to, from, head);
    const size_t i = lines(to, from, head, nbytes, none);
    std::memcpy(to + i, from + i, nbytes - i);
}

template <SummedLines lines>
void sum_lines(uint8_t* to, const uint8_t* from, size_t nbytes, BlockSum& sum) {
    if (head_bytes(to, nbytes)) return sum_cached(to, from, nbytes, sum);  // blocks are aligned
    const size_t i = lines(to, from, 0, nbytes, sum);
    sum_cached(to + i, from + i, nbytes - i, sum);
}

inline constexpr std::array<CopyWay, 3> kCopyWays{{
    {"cached", copy_cached, sum_cached},
    {"prefetched", copy_lines<prefetched_lines>, sum_lines<prefetched_lines>},
    {"interleaved", copy_lines<interleaved_lines>, sum_lines<interleaved_lines>},
}};

// Non-temporal stores are weakly ordered: call this before telling others that the data is there.
inline void copies_end() { _mm_sfence(); }

// Makes the next access to a line one to memory.
inline void evict(const uint8_t* line) { _mm_clflush(line); }
inline void evictions_end() { _mm_mfence(); }

#else

inline constexpr std::array<CopyWay, 1> kCopyWays{{{"cached", copy_cached, sum_cached}}};

inline void copies_end() {}
inline void evict(const uint8_t*) {}
inline void evictions_end() {}

#endif

}  // namespace pdserve
