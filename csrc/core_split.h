// The cores that two processes of a host share, each of which may use all of them.
//
// In memory that both have mapped, each has a word: how many cores it asks for while it computes, and
// until when that holds. Alone, a process has all cores. While both compute, one has what it asks for,
// and the other one the rest. Words are renewed as jobs begin, and expire: a process that stands still
// keeps its cores from the other one for no longer than a lease. Nobody waits for anybody here, and
// what is read may be wrong (the other process may be of another build, or broken): then both compute
// on the same cores for a while, which is slower, and changes no result.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pdserve {

class CoreSplit {
public:
    static constexpr size_t kBytes = 4096;  // of the memory; zeroed, both processes are idle
    static constexpr int kMostCores = 1024;

    // Maps the memory behind `fd`, which may be closed afterwards. While both processes compute, this
    // one has what the other one leaves if it `takes_rest`, and what it asks for otherwise. Throws
    // std::system_error: it cannot be mapped.
    CoreSplit(int fd, bool takes_rest, int num_cores, std::chrono::microseconds lease);
    ~CoreSplit();
    CoreSplit(const CoreSplit&) = delete;
    CoreSplit& operator=(const CoreSplit&) = delete;

    // A step begins, for which `num_cores` are asked for, should the other process compute too.
    void ask(int num_cores);

    // There is nothing to compute.
    void release();

    // The other process has ended.
    void clear_other();

    // How many cores the other process asks for now; 0: it does not compute.
    int asked_by_other() const;

    // How many cores this process may use at the moment; at least 1.
    int allowed() const;

    // A job begins: as `allowed`, and what was asked for goes on to hold.
    int begin_job();

    // How many cores jobs have had since `ask`, on average; 0: there were none.
    double mean_cores() const;

private:
    using Word = std::atomic<uint64_t>;
    static_assert(Word::is_always_lock_free);

    Word& word(bool of_rest) const;
    void say(int num_cores, int64_t now_us);

    void* memory_;
    const bool takes_rest_;
    const int num_cores_;
    const int64_t lease_us_;
    std::atomic<int> asked_{0};
    std::atomic<int64_t> num_jobs_{0};  // since `ask`
    std::atomic<int64_t> sum_cores_{0};  // that these had
};

}  // namespace pdserve
