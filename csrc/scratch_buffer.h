// Working memory that is kept between calls, so that nothing is allocated in a steady state.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include <sys/mman.h>

namespace pdserve {

// As large as the largest request so far, aligned to cache lines. Uses huge pages, if available,
// once it is large enough. Contents are there until the next call; PDSERVE_POISON makes sure that
// nobody reads what the last one left (CONTRIBUTING.md).
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
            // If the kernel has no huge pages, this is only slower.
            if (unit == kHugePage) madvise(buffer_.get(), num_bytes_, MADV_HUGEPAGE);
        }
#if defined(PDSERVE_POISON)
        if (num_bytes > 0) std::memset(buffer_.get(), 0xFF, num_bytes);  // NaN, and -1
#endif
        return buffer_.get();
    }

    template <class T>
    T* of(size_t count) {
        return static_cast<T*>(at_least(count * sizeof(T)));
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
