#include "ledger.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../ranks/futex.h"

namespace pdserve::places {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;  // on Linux, that of time.monotonic()

constexpr int kTries = 50;  // of 1 ms: somebody may just find that this place was dead
constexpr int kDoor = kMostPlaces;  // byte that is locked by a place that is about to be there
constexpr milliseconds kLook{20};  // a waiter looks whether who has the turn is there
constexpr int64_t kNoticeNs = 1'000'000'000;  // for whoever is given the turn

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
        .count();
}

// Of the open file: kept by threads and closed by the kernel with the process.
bool lock_byte(int fd, int command, short type, int place, short* found = nullptr) {
    struct flock lock {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = place;
    lock.l_len = 1;
    const bool is_done = fcntl(fd, command, &lock) == 0;
    if (found != nullptr) *found = lock.l_type;
    return is_done;
}

bool lock_in_time(int fd, int place) {
    for (int tries = 1; !lock_byte(fd, F_OFD_SETLK, F_WRLCK, place); ++tries) {
        if (tries == kTries || (errno != EAGAIN && errno != EACCES)) return false;
        std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
}

void clear(Row& row) {
    row.due_ns.store(0);
    row.lease_ns.store(0);
    row.wanted.store(0);
    row.used.store(0);
    row.held.store(0);
    row.floor.store(0);
    row.weights.store(0);
}

bool is_clear(const Row& row) {
    return row.weights.load() == 0 && row.floor.load() == 0 && row.held.load() == 0
        && row.wanted.load() == 0 && row.due_ns.load() == 0 && row.lease_ns.load() == 0;
}

int64_t taken(const Row& row) {
    return row.weights.load() + std::max(row.held.load(), row.floor.load());
}

}  // namespace

Ledger::Ledger(const std::string& path, int place, int64_t budget) : place_(place) {
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0) fail("open");
    struct stat status {};
    if (fstat(fd_, &status) != 0
        || (status.st_size < static_cast<off_t>(sizeof(Page)) && ftruncate(fd_, sizeof(Page)) != 0)) {
        const int error = errno;
        close(fd_);
        errno = error;
        fail("size");
    }
    if (!lock_in_time(fd_, kDoor) || !lock_in_time(fd_, place_)) {
        const int error = errno;
        close(fd_);
        errno = error;
        fail("lock");
    }
    void* mapped = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        errno = error;
        fail("mmap");
    }
    page_ = static_cast<Page*>(mapped);
    clear(own());
    uint32_t former = place_ + 1;
    page_->turn.compare_exchange_strong(former, 0);
    share_budget(budget);
    lock_byte(fd_, F_OFD_SETLK, F_UNLCK, kDoor);
    changed();
}

// The file may be older than all that are there now, which have said what they have.
void Ledger::share_budget(int64_t budget) {
    for (int i = 0; i < kMostPlaces; ++i) {
        if (i == place_ || !is_alive(i)) continue;
        const int64_t shared = page_->budget.load();
        if (shared == budget) return;
        munmap(page_, sizeof(Page));
        close(fd_);
        throw std::invalid_argument("its places share " + std::to_string(shared) + " bytes, not "
            + std::to_string(budget) + ": stop all of them to change that");
    }
    page_->budget.store(budget);
}

Ledger::~Ledger() {
    leave();
    munmap(page_, sizeof(Page));
    close(fd_);
}

bool Ledger::is_alive(int place) const {
    if (place == place_) return true;
    short found = F_UNLCK;
    return !lock_byte(fd_, F_OFD_GETLK, F_WRLCK, place, &found) || found != F_UNLCK;
}

// ---- memory ------------------------------------------------------------------------------------

// Bytes of the budget that nobody has, floors included; negative: too much is taken.
int64_t Ledger::left(bool if_given_back) const {
    int64_t left = budget() - own().weights.load() - own().held.load();
    for (int i = 0; i < kMostPlaces; ++i) {
        if (i == place_) continue;
        const Row& row = page_->rows[i];
        const int64_t kept = if_given_back ? row.used.load() : row.held.load();
        left -= row.weights.load() + std::max(kept, row.floor.load());
    }
    return left;
}

bool Ledger::enter(int64_t weights, int64_t floor) {
    own().weights.store(weights);
    own().floor.store(floor);
    if (left(false) >= floor) {
        changed();
        return true;
    }
    own().weights.store(0);
    own().floor.store(0);
    return false;
}

bool Ledger::fits(int64_t weights, int64_t floor) const {
    int64_t left = budget() - weights - floor;
    for (int i = 0; i < kMostPlaces; ++i) {
        if (i != place_) left -= page_->rows[i].weights.load() + page_->rows[i].floor.load();
    }
    return left >= 0;
}

void Ledger::leave() {
    pass_turn(false, 0, 0);
    clear(own());
    changed();
}

bool Ledger::take(int64_t bytes) {
    if (bytes > room()) return false;
    own().held.fetch_add(bytes);
    if (left(false) >= 0) return true;
    own().held.fetch_sub(bytes);  // another one has taken it at the same time
    return false;
}

void Ledger::give(int64_t bytes) {
    own().held.fetch_sub(bytes);
    changed();
}

void Ledger::set_wanted(int64_t bytes) {
    const int64_t before = own().wanted.exchange(bytes);
    if (bytes > before || (bytes == 0 && before > 0)) changed();
}

int64_t Ledger::room() const {
    const int64_t free = left(false), held = own().held.load();
    bool others_want = false;
    int64_t shared = budget();
    int num_awake = 0;
    for (int i = 0; i < kMostPlaces; ++i) {
        const Row& row = page_->rows[i];
        others_want |= i != place_ && row.wanted.load() > 0;
        shared -= row.weights.load();
        num_awake += row.floor.load() > 0;
    }
    if (!others_want || num_awake == 0) return std::max<int64_t>(0, free);
    // Above an equal share, nobody takes more while others lack something.
    const int64_t most = std::max(shared / num_awake, own().floor.load());
    return std::max<int64_t>(0, std::min(free, most - held));
}

int64_t Ledger::reach() const { return std::max<int64_t>(0, left(true)); }

int64_t Ledger::owed() const {
    int64_t lacking = -budget();
    for (int i = 0; i < kMostPlaces; ++i) {
        const Row& row = page_->rows[i];
        lacking += taken(row);
        if (i != place_) lacking += row.wanted.load();
    }
    return std::clamp<int64_t>(lacking, 0, std::max<int64_t>(0, held() - own().floor.load()));
}

bool Ledger::clear_dead() {
    bool were_any = false;
    for (int i = 0; i < kMostPlaces; ++i) {
        const bool has_turn = page_->turn.load() == static_cast<uint32_t>(i + 1);
        if (i == place_ || (is_clear(page_->rows[i]) && !has_turn)) continue;
        if (!lock_byte(fd_, F_OFD_SETLK, F_WRLCK, i)) continue;  // it is alive
        clear(page_->rows[i]);
        uint32_t dead = i + 1;
        if (page_->turn.compare_exchange_strong(dead, 0)) ranks::futex_wake_all(page_->turn);
        lock_byte(fd_, F_OFD_SETLK, F_UNLCK, i);
        were_any = true;
    }
    if (were_any) changed();
    return were_any;
}

void Ledger::changed() {
    page_->changes.fetch_add(1);
    ranks::futex_wake_all(page_->changes);
}

uint32_t Ledger::await_change(uint32_t seen, milliseconds most) {
    const auto end = Clock::now() + most;
    while (page_->changes.load() == seen) {
        const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
        if (left.count() <= 0) break;
        ranks::futex_wait(page_->changes, seen, left);
    }
    return page_->changes.load();
}

// ---- turns -------------------------------------------------------------------------------------

bool Ledger::try_turn(int64_t lease_ns) {
    const uint32_t own_turn = place_ + 1;
    own().lease_ns.store(now_ns() + lease_ns);
    uint32_t holder = 0;
    if (page_->turn.compare_exchange_strong(holder, own_turn) || holder == own_turn) {
        own().due_ns.store(0);
        return true;
    }
    own().lease_ns.store(0);
    return false;
}

// Takes the turn from who has died, or has had it for too long, as one that was stopped.
bool Ledger::steal(uint32_t holder, int64_t lease_ns) {
    const int place = static_cast<int>(holder) - 1;
    if (place < 0 || place >= kMostPlaces) return false;
    if (is_alive(place) && now_ns() < page_->rows[place].lease_ns.load()) return false;
    own().lease_ns.store(now_ns() + lease_ns);
    return page_->turn.compare_exchange_strong(holder, place_ + 1);
}

bool Ledger::await_turn(int64_t due_ns, int64_t lease_ns, milliseconds most) {
    const auto end = Clock::now() + most;
    own().due_ns.store(std::max<int64_t>(1, due_ns));
    while (!try_turn(lease_ns)) {
        const uint32_t holder = page_->turn.load();
        if (holder == 0) continue;
        const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
        if (left.count() <= 0) {
            own().due_ns.store(0);
            return try_turn(lease_ns);  // it may have been given just now
        }
        if (holder != static_cast<uint32_t>(place_ + 1)) {
            ranks::futex_wait(page_->turn, holder, std::min(left, kLook));
            if (page_->turn.load() == holder && steal(holder, lease_ns)) break;
        }
    }
    own().due_ns.store(0);
    return true;
}

int Ledger::num_waiting() const {
    int num_waiting = 0;
    for (int i = 0; i < kMostPlaces; ++i) num_waiting += i != place_ && page_->rows[i].due_ns.load() != 0;
    return num_waiting;
}

bool Ledger::pass_turn(bool has_more, int64_t due_ns, int64_t lease_ns) {
    uint32_t own_turn = place_ + 1;
    if (page_->turn.load() != own_turn) return false;
    int next = -1;
    int64_t next_ns = INT64_MAX;
    for (int i = 0; i < kMostPlaces; ++i) {
        const int64_t due = page_->rows[i].due_ns.load();
        if (i == place_ || due == 0 || due >= next_ns || !is_alive(i)) continue;
        next = i;
        next_ns = due;
    }
    if (has_more && (next < 0 || due_ns < next_ns)) {
        own().lease_ns.store(now_ns() + lease_ns);
        return true;
    }
    own().lease_ns.store(0);
    if (next >= 0) page_->rows[next].lease_ns.store(now_ns() + kNoticeNs);
    page_->turn.compare_exchange_strong(own_turn, next + 1);
    // Who has begun to wait since it was looked for sleeps until the turn changes.
    if (next >= 0 || num_waiting() > 0) ranks::futex_wake_all(page_->turn);
    return false;
}

}  // namespace pdserve::places
