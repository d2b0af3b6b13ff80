// Counts of values by bucket. One thread at a time may observe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pdserve {

class Histogram {
public:
    // `bounds`: the greatest value of each bucket, rising; one more bucket has all beyond the last.
    explicit Histogram(std::vector<double> bounds)
        : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

    void observe(double value, int64_t times = 1) {
        const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value);
        counts_[static_cast<size_t>(at - bounds_.begin())] += times;
        sum_ += value * static_cast<double>(times);
    }

    const std::vector<int64_t>& counts() const { return counts_; }
    double sum() const { return sum_; }

private:
    std::vector<double> bounds_;
    std::vector<int64_t> counts_;
    double sum_ = 0;
};

}  // namespace pdserve
