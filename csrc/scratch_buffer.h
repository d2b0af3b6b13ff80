// Working memory that is kept from call to call: in a steady state nothing is allocated.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include <sys/mman.h>

namespace pdserve {

// As large as the largest request so far, aligned to cache lines; in huge pages, if there are any,
// once it fills some. Contents do not survive growing.
class ScratchBuffer {
public:
    void* at_least(size_t num_bytes) {
        if (num_bytes > num_bytes_) {
            const size_t unit = num_bytes < kHugePage ? 64 : kHugePage;
            num_bytes_ = (num_bytes + unit - 1) / unit * unit;
            buffer_.reset();  // first, so that never both are there
            buffer_.reset(std::aligned_alloc(unit, num_bytes_));
            if (!buffer_) {
                num_bytes_ = 0;
                throw std::bad_alloc();
            }
            // A kernel without them: slower, not wrong.
            if (unit == kHugePage) madvise(buffer_.get(), num_bytes_, MADV_HUGEPAGE);
        }
        return buffer_.get();
    }

    size_t num_bytes() const { return num_bytes_; }

private:
    static constexpr size_t kHugePage = 2 << 20;

    struct Free {
        void operator()(void* pointer) const { std::free(pointer); }
    };
    std::unique_ptr<void, Free> buffer_;
    size_t num_bytes_ = 0;
};

}  // namespace pdserve
