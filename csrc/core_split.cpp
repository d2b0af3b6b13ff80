#include "core_split.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

namespace pdserve {

namespace {

constexpr size_t kWordBytes = 64;  // from one word to the next: a cache line each

// A word is the time in microseconds until which it holds, above the number of cores. The clock
// counts from the start of the machine, so it is the same for all its processes.
constexpr int kCoreBits = 16;

int64_t now_us() {
    using std::chrono::duration_cast, std::chrono::microseconds;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return duration_cast<microseconds>(now).count();
}

uint64_t pack(int num_cores, int64_t until_us) {
    return static_cast<uint64_t>(until_us) << kCoreBits | static_cast<uint64_t>(num_cores);
}

int cores_of(uint64_t word) { return static_cast<int>(word & ((1u << kCoreBits) - 1)); }

int64_t until_of(uint64_t word) { return static_cast<int64_t>(word >> kCoreBits); }

}  // namespace

CoreSplit::CoreSplit(int fd, bool takes_rest, int num_cores, std::chrono::microseconds lease)
    : takes_rest_(takes_rest), num_cores_(num_cores), lease_us_(lease.count()) {
    memory_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
}

CoreSplit::~CoreSplit() { munmap(memory_, kBytes); }

CoreSplit::Word& CoreSplit::word(bool of_rest) const {
    return *std::launder(
        reinterpret_cast<Word*>(static_cast<char*>(memory_) + (of_rest ? kWordBytes : 0)));
}

void CoreSplit::say(int num_cores, int64_t now_us) {
    word(takes_rest_) = pack(num_cores, now_us + lease_us_);
}

void CoreSplit::ask(int num_cores) {
    asked_ = num_cores;
    num_jobs_ = sum_cores_ = 0;
    say(num_cores, now_us());
}

void CoreSplit::release() {
    asked_ = 0;
    word(takes_rest_) = 0;
}

void CoreSplit::clear_other() { word(!takes_rest_) = 0; }

int CoreSplit::asked_by_other() const {
    const uint64_t other = word(!takes_rest_);
    // A time beyond any lease is of no clock of this machine.
    const int64_t left_us = until_of(other) - now_us();
    return 0 < left_us && left_us <= lease_us_ ? cores_of(other) : 0;
}

int CoreSplit::allowed() const {
    const int other = asked_by_other();
    if (other == 0) return num_cores_;
    return std::clamp(takes_rest_ ? num_cores_ - other : asked_.load(), 1, num_cores_);
}

int CoreSplit::begin_job() {
    const int asked = asked_;
    if (asked > 0) {
        const int64_t now = now_us();
        // Not in every job: the other process has this line in its cache.
        if (until_of(word(takes_rest_)) - now < lease_us_ * 3 / 4) say(asked, now);
    }
    const int cores = allowed();
    sum_cores_ += cores;
    ++num_jobs_;
    return cores;
}

double CoreSplit::mean_cores() const {
    const int64_t num_jobs = num_jobs_;
    return num_jobs == 0 ? 0.0 : static_cast<double>(sum_cores_) / static_cast<double>(num_jobs);
}

}  // namespace pdserve
