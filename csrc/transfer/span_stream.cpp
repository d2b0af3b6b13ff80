// The socket loops of the TCP transport. No Python here: they run without the interpreter lock.

#include "span_stream.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace pdserve {
namespace {

using Clock = std::chrono::steady_clock;

// IOV_MAX on Linux; spans beyond it go into the next call.
constexpr size_t kMaxVectors = 1024;
// One call never moves more than the socket buffer holds, so longer vectors would be useless.
constexpr size_t kBytesPerCall = 8 << 20;
// A receiver is woken when this much has arrived, or all that is left. Fewer, larger reads halved
// its CPU time, and raised throughput by a third on one machine.
constexpr int64_t kReceiveBatch = 1 << 20;
// An active stream has no longer gaps than this. For a slower peer, the event loop waits instead.
constexpr std::chrono::milliseconds kPatience{5};

// The position of the next byte: a span, and an offset in it.
class Cursor {
public:
    Cursor(SpanTable spans, int64_t start) : spans_(spans) {
        while (index_ < spans_.count && start >= nbytes(index_)) start -= nbytes(index_++);
        done_ = index_ < spans_.count ? start : 0;
    }

    bool at_end() const { return index_ == spans_.count; }

    // The number of bytes left, counted up to `most`.
    int64_t left(int64_t most) const {
        int64_t found = -done_;
        for (size_t i = index_; i < spans_.count && found < most; ++i) found += nbytes(i);
        return std::min(found, most);
    }

    size_t fill(uint8_t* base, std::array<iovec, kMaxVectors>& vectors) const {
        size_t filled = 0, bytes = 0;
        int64_t done = done_;
        for (size_t i = index_; i < spans_.count && filled < kMaxVectors; ++i, done = 0) {
            size_t rest = static_cast<size_t>(nbytes(i) - done);
            vectors[filled++] = {base + offset(i) + done, rest};
            if ((bytes += rest) >= kBytesPerCall) break;
        }
        return filled;
    }

    void advance(int64_t moved) {
        while (index_ < spans_.count && moved >= nbytes(index_) - done_) {
            moved -= nbytes(index_++) - done_;
            done_ = 0;
        }
        done_ += moved;
    }

private:
    int64_t offset(size_t i) const { return spans_.rows[2 * i]; }
    int64_t nbytes(size_t i) const { return spans_.rows[2 * i + 1]; }

    SpanTable spans_;
    size_t index_ = 0;
    int64_t done_ = 0;
};

ssize_t move_once(Direction direction, int fd, iovec* vectors, size_t count) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    return direction == Direction::kSend ? sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                                         : recvmsg(fd, &message, MSG_DONTWAIT);
}

// Sets from how many bytes on the socket counts as readable: a good part of what is left. If it
// cannot be set, the socket stays readable from the first byte.
void set_readable(int fd, const Cursor& cursor) {
    const int value = static_cast<int>(std::max<int64_t>(cursor.left(kReceiveBatch), 1));
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
}

// True when the socket is ready (or broken: the next call says how), false after `patience`.
bool wait_ready(Direction direction, int fd, std::chrono::nanoseconds patience) {
    short events = direction == Direction::kSend ? POLLOUT : POLLIN;
    pollfd entry{fd, events, 0};
    auto ms = std::chrono::ceil<std::chrono::milliseconds>(patience).count();
    int ready = poll(&entry, 1, static_cast<int>(std::max<int64_t>(ms, 0)));
    return ready > 0 || (ready < 0 && errno == EINTR);
}

}  // namespace

StreamEnd stream_spans(Direction direction, int fd, uint8_t* base, SpanTable spans, int64_t start,
                       CancelFlag cancel, std::chrono::nanoseconds slice) {
    const auto slice_end = Clock::now() + slice;
    std::array<iovec, kMaxVectors> vectors;
    Cursor cursor(spans, start);
    int64_t position = start;
    while (!cursor.at_end() && !cancel.is_set()) {
        size_t count = cursor.fill(base, vectors);
        ssize_t moved = move_once(direction, fd, vectors.data(), count);
        int error = moved < 0 ? errno : 0;
        auto left = slice_end - Clock::now();
        if (moved > 0) {
            cursor.advance(moved);
            position += moved;
            if (left <= left.zero()) break;
        } else if (moved == 0) {
            return {position, ECONNRESET};  // the peer closed its end before its last byte
        } else if (error == EAGAIN || error == EWOULDBLOCK) {
            if (direction == Direction::kReceive) set_readable(fd, cursor);
            if (left <= left.zero()) break;
            if (!wait_ready(direction, fd, std::min<Clock::duration>(left, kPatience))) break;
        } else if (error != EINTR) {
            return {position, error};
        }
    }
    if (direction == Direction::kReceive) set_readable(fd, cursor);
    return {position, 0};
}

}  // namespace pdserve
