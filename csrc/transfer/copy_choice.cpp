// Copies scattered spans that are in no cache, as those of a KV pool are, in each way in turn. The
// best of several rounds counts, so that a busy neighbour does not decide.

#include "copy_choice.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>

#include <sys/mman.h>

namespace pdserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kCopiedBytes = 128 << 10;  // per measurement
constexpr int kRounds = 3;

// Source and destination: a huge page each, as pools have, where the kernel has them.
class Scratch {
public:
    Scratch() : memory_(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, 2 * kHugePage))) {
        if (!memory_) throw std::bad_alloc();
        madvise(memory_.get(), 2 * kHugePage, MADV_HUGEPAGE);
        std::memset(memory_.get(), 1, 2 * kHugePage);  // no measurement waits for the kernel
    }

    // Seconds to copy kCopiedBytes in spans of this size that lie apart, each time elsewhere.
    template <class CopySpan>
    double time(CopySpan copy, size_t span_bytes) {
        const size_t count = kCopiedBytes / span_bytes;
        next_ -= next_ % span_bytes;  // a span ends where the page does, at the latest
        std::array<size_t, kCopiedBytes / kSpanBytes[0]> places;
        for (size_t i = 0; i < count; ++i) {
            places[i] = (i * (kHugePage / count) + next_) % kHugePage;
            evict_span(places[i], span_bytes);
        }
        next_ += span_bytes;
        evictions_end();
        const auto start = Clock::now();
        for (size_t i = 0; i < count; ++i)
            copy(memory_.get() + kHugePage + places[i], memory_.get() + places[i], span_bytes);
        copies_end();
        return std::chrono::duration<double>(Clock::now() - start).count();
    }

private:
    struct Free {
        void operator()(uint8_t* memory) const { std::free(memory); }
    };

    void evict_span(size_t place, size_t nbytes) {
        for (size_t i = place; i < place + nbytes; i += kLine) {
            evict(memory_.get() + i);
            evict(memory_.get() + kHugePage + i);
        }
    }

    std::unique_ptr<uint8_t[], Free> memory_;
    size_t next_ = 0;
};

CopyChoice measure() {
    Scratch scratch;
    CopyChoice choice{};
    for (size_t size = 0; size < kSpanBytes.size(); ++size) {
        auto &plain = choice.plain.rates[size], &summed = choice.summed.rates[size];
        BlockSum sum(0);
        for (int round = 0; round < kRounds; ++round)
            for (size_t way = 0; way < kCopyWays.size(); ++way) {
                const auto sums = [&](uint8_t* to, const uint8_t* from, size_t nbytes) {
                    kCopyWays[way].summed(to, from, nbytes, sum);
                };
                const double plain_s = scratch.time(kCopyWays[way].copy, kSpanBytes[size]);
                const double summed_s = scratch.time(sums, kSpanBytes[size]);
                plain[way] = std::max(plain[way], kCopiedBytes / plain_s);
                summed[way] = std::max(summed[way], kCopiedBytes / summed_s);
            }
        for (WayRates* kind : {&choice.plain, &choice.summed}) {
            const auto& rates = kind->rates[size];
            kind->fastest[size] =
                &kCopyWays[std::max_element(rates.begin(), rates.end()) - rates.begin()];
        }
    }
    return choice;
}

}  // namespace

const CopyChoice& copy_choice() {
    static const CopyChoice choice = measure();
    return choice;
}

}  // namespace pdserve
