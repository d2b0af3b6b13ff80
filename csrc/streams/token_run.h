// The output of one request as it arrives: all tokens so far, and those that nobody has read yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pdserve {

class TokenRun {
public:
    // Tokens that arrived at one moment, up to the end of `unread`.
    struct Arrival {
        double at_s;
        size_t end;
    };

    size_t size() const { return ids_.size(); }
    const std::vector<int32_t>& ids() const { return ids_; }

    // Adds tokens that their reader gets in another way.
    void extend(const std::vector<int32_t>& ids) { ids_.insert(ids_.end(), ids.begin(), ids.end()); }

    // From now on tokens are taken as they are, until this moment.
    void open(double until_s) { until_s_ = until_s; }
    void close() { until_s_ = 0; }
    bool is_open() const { return until_s_ > 0; }

    bool takes(size_t index, double now_s) const {
        return now_s < until_s_ && index == ids_.size();
    }

    // Returns whether this is the first one that nobody has read.
    bool add(int32_t id, double now_s) {
        const bool is_first = unread_.empty();
        if (is_first) first_ = ids_.size();
        ids_.push_back(id);
        unread_.push_back(id);
        if (is_first || arrivals_.back().at_s != now_s) arrivals_.push_back({now_s, 0});
        arrivals_.back().end = unread_.size();
        return is_first;
    }

    const std::vector<int32_t>& unread() const { return unread_; }
    const std::vector<Arrival>& arrivals() const { return arrivals_; }
    size_t first_unread() const { return first_; }  // its index in the output

    void all_read() {
        unread_.clear();
        arrivals_.clear();
    }

private:
    std::vector<int32_t> ids_;
    std::vector<int32_t> unread_;
    std::vector<Arrival> arrivals_;
    size_t first_ = 0;
    double until_s_ = 0;
};

}  // namespace pdserve
