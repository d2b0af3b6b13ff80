// Sends or receives scattered spans of a memory region over a socket, for a limited time per call.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pdserve {

// Cancel flag, set once by another thread (a NumPy byte on the Python side).
class CancelFlag {
public:
    explicit CancelFlag(const uint8_t* flag) : flag_(flag) {}
    bool is_set() const { return __atomic_load_n(flag_, __ATOMIC_ACQUIRE) != 0; }

private:
    const uint8_t* flag_;
};

// Row-major [count, columns] int64; a row ends in (offset, nbytes) of the region.
struct SpanTable {
    const int64_t* rows;
    size_t count;
};

enum class Direction { kSend, kReceive };

// The result of stream_spans. `error` is an errno; 0: none.
struct StreamEnd {
    int64_t position;
    int error;
};

// Moves bytes from stream position `start` on, until all are moved, `slice` is over, the socket is
// not ready for a moment, the flag is set, or there is an error. Never blocks longer than `slice`.
// The caller has checked every span against the region at `base`. A receiving socket that is not at
// the end becomes readable only once enough has arrived for a worthwhile next call.
StreamEnd stream_spans(Direction direction, int fd, uint8_t* base, SpanTable spans, int64_t start,
                       CancelFlag cancel, std::chrono::nanoseconds slice);

}  // namespace pdserve
