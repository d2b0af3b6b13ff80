// The cores of a node, of which two threads that compute steps at the same time have a share each.
//
// Each says how many cores it asks for while it computes. Alone, a thread has all cores. While both
// compute, one has what it asks for, and the other one the rest. Nobody waits for anybody here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace pdserve {

class CoreShare {
public:
    static constexpr int kMostCores = 1024;

    // The share of what asks, and that of what has the rest.
    static std::pair<std::shared_ptr<CoreShare>, std::shared_ptr<CoreShare>> split(int num_cores);

    int num_cores() const { return num_cores_; }  // of both

    // A step begins, for which `num_cores` are asked for, should the other one compute, too.
    void ask(int num_cores);

    // There is nothing to compute.
    void release();

    // How many cores the other one asks for now; 0: it does not compute.
    int asked_by_other() const;

    // How many cores may be used at the moment; at least 1.
    int allowed() const;

    // A job begins: as `allowed`.
    int begin_job();

    // How many cores jobs have had since `ask`, on average; 0: there were none.
    double mean_cores() const;

private:
    struct alignas(64) Word {
        std::atomic<int> asked{0};
    };
    using Words = std::array<Word, 2>;

    CoreShare(std::shared_ptr<Words> words, bool takes_rest, int num_cores);

    const std::shared_ptr<Words> words_;  // of both
    const bool takes_rest_;
    const int num_cores_;
    std::atomic<int64_t> num_jobs_{0};  // since `ask`
    std::atomic<int64_t> sum_cores_{0};  // that these had
};

}  // namespace pdserve
