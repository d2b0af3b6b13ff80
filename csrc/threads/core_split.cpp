#include "core_split.h"

#include <algorithm>

namespace pdserve {

std::pair<std::shared_ptr<CoreShare>, std::shared_ptr<CoreShare>> CoreShare::split(int num_cores) {
    const auto words = std::make_shared<Words>();
    const auto share = [&](bool takes_rest) {
        return std::shared_ptr<CoreShare>(new CoreShare(words, takes_rest, num_cores));
    };
    return {share(false), share(true)};
}

CoreShare::CoreShare(std::shared_ptr<Words> words, bool takes_rest, int num_cores)
    : words_(std::move(words)), takes_rest_(takes_rest), num_cores_(num_cores) {}

void CoreShare::ask(int num_cores) {
    num_jobs_ = sum_cores_ = 0;
    (*words_)[takes_rest_].asked = num_cores;
}

void CoreShare::release() { (*words_)[takes_rest_].asked = 0; }

int CoreShare::asked_by_other() const { return (*words_)[!takes_rest_].asked; }

int CoreShare::allowed() const {
    const int other = asked_by_other();
    if (other == 0) return num_cores_;
    const int asked = (*words_)[takes_rest_].asked;
    return std::clamp(takes_rest_ ? num_cores_ - other : asked, 1, num_cores_);
}

int CoreShare::begin_job() {
    const int cores = allowed();
    sum_cores_ += cores;
    ++num_jobs_;
    return cores;
}

double CoreShare::mean_cores() const {
    const int64_t num_jobs = num_jobs_;
    return num_jobs == 0 ? 0.0 : static_cast<double>(sum_cores_) / static_cast<double>(num_jobs);
}

}  // namespace pdserve
