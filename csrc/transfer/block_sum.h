// Sums over KV by which a reader finds bytes that are not what was announced.
//
// Each word of 8 bytes adds to a sum what depends on its value and its place, so words may be added
// in any order, and the sum of a block is that of its parts. A word is the product of its halves,
// after a key of its place has changed them, and the word itself, for a half that is 0. It detects
// faults of memory, networks and plans; it does not protect against forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pdserve {

class BlockSum {
public:
    // `word`: the place of the next word.
    explicit BlockSum(uint64_t word) { seek(word); }

    uint64_t value() const {
#if defined(__SSE2__)
        return both(products_) + both(words_) * kOfWords;
#else
        return products_ + words_ * kOfWords;
#endif
    }

#if defined(__SSE2__)
    void seek(uint64_t word) {
        const uint64_t key = kFirst + word * kStep;
        key_ = _mm_set_epi64x(static_cast<int64_t>(key + kStep), static_cast<int64_t>(key));
    }

    // Goes on so many bytes further on, or back: signed, as a wrapped number has no eighth.
    void skip(int64_t nbytes) {
        const uint64_t words = static_cast<uint64_t>(nbytes / 8);
        key_ = _mm_add_epi64(key_, _mm_set1_epi64x(static_cast<int64_t>(words * kStep)));
    }

    // The next two words.
    void add(__m128i pair) {
        const __m128i mixed = _mm_xor_si128(pair, key_);
        products_ = _mm_add_epi64(products_, _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32)));
        words_ = _mm_add_epi64(words_, pair);
        key_ = _mm_add_epi64(key_, _mm_set1_epi64x(static_cast<int64_t>(2 * kStep)));
    }
#else
    void seek(uint64_t word) { key_ = kFirst + word * kStep; }
#endif

    // The next words; what is missing of the last one counts as 0.
    void add(const uint8_t* from, size_t nbytes) {
#if defined(__SSE2__)
        size_t i = 0;
        for (; i + sizeof(__m128i) <= nbytes; i += sizeof(__m128i))
            add(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        if (i < nbytes) {
            alignas(16) uint8_t rest[sizeof(__m128i)] = {};
            std::memcpy(rest, from + i, nbytes - i);
            add(_mm_load_si128(reinterpret_cast<const __m128i*>(rest)), nbytes - i > 8);
        }
#else
        for (size_t i = 0; i < nbytes; i += sizeof(uint64_t)) {
            uint64_t word = 0;
            std::memcpy(&word, from + i, nbytes - i < sizeof word ? nbytes - i : sizeof word);
            const uint64_t mixed = word ^ key_;
            products_ += (mixed & 0xffffffff) * (mixed >> 32);
            words_ += word;
            key_ += kStep;
        }
#endif
    }

private:
    static constexpr uint64_t kFirst = 0x6a09e667f3bcc909u;  // of the square root of 2
    static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;   // of the golden ratio
    static constexpr uint64_t kOfWords = 0xbb67ae8584caa73bu;  // of the square root of 3

#if defined(__SSE2__)
    // Of two words, the second one only if it is there.
    void add(__m128i pair, bool both_words) {
        if (!both_words) {
            const __m128i first = _mm_set_epi64x(0, -1);
            const __m128i mixed = _mm_and_si128(_mm_xor_si128(pair, key_), first);
            products_ = _mm_add_epi64(products_, _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32)));
            words_ = _mm_add_epi64(words_, pair);
            return;
        }
        add(pair);
    }

    static uint64_t both(__m128i lanes) {
        alignas(16) uint64_t halves[2];
        _mm_store_si128(reinterpret_cast<__m128i*>(halves), lanes);
        return halves[0] + halves[1];
    }

    __m128i key_, products_ = _mm_setzero_si128(), words_ = _mm_setzero_si128();
#else
    uint64_t key_, products_ = 0, words_ = 0;
#endif
};

}  // namespace pdserve
