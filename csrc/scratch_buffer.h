// Working memory that is kept from call to call: in a steady state nothing is allocated.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace pdserve {

// As large as the largest request so far, aligned to cache lines. Contents do not survive growing.
class ScratchBuffer {
public:
    void* at_least(size_t num_bytes) {
        if (num_bytes > num_bytes_) {
            num_bytes_ = (num_bytes + 63) / 64 * 64;
            buffer_.reset(std::aligned_alloc(64, num_bytes_));
            if (!buffer_) {
                num_bytes_ = 0;
                throw std::bad_alloc();
            }
        }
        return buffer_.get();
    }

    size_t num_bytes() const { return num_bytes_; }

private:
    struct Free {
        void operator()(void* pointer) const { std::free(pointer); }
    };
    std::unique_ptr<void, Free> buffer_;
    size_t num_bytes_ = 0;
};

}  // namespace pdserve
