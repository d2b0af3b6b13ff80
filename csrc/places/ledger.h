// What the places of one node share: its memory, and whose step is next.
//
// A place is a process with a model of its own, on the same cores as the others. All map one small
// file. Each writes only its own row, announces what it takes before it looks whether that is too
// much, and so needs no lock that a process could die with. A byte of the file that it has locked
// says that it is alive.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace pdserve::places {

static_assert(std::atomic<int64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

constexpr int kMostPlaces = 16;

// Zeroed memory is that of a place that is not awake.
struct alignas(64) Row {
    std::atomic<int64_t> weights;  // bytes, mapped
    std::atomic<int64_t> floor;  // bytes of KV that no other place has
    std::atomic<int64_t> held;  // bytes of KV
    std::atomic<int64_t> used;  // of these, by requests; the others can be given back
    std::atomic<int64_t> wanted;  // bytes that it lacks now
    std::atomic<int64_t> due_ns;  // it waits for its turn, which is due then; 0: it does not
    std::atomic<int64_t> lease_ns;  // until then, its turn is not taken away
};

struct Page {
    std::atomic<int64_t> budget;  // bytes, of all
    alignas(64) std::atomic<uint32_t> turn;  // whose it is, counted from 1; 0: nobody computes
    alignas(64) std::atomic<uint32_t> changes;  // of what there is for others
    std::array<Row, kMostPlaces> rows;
};

class Ledger {
public:
    // Throws std::system_error: the file cannot be used; EAGAIN: another process is that place.
    // Throws std::invalid_argument: places that are there have another budget.
    Ledger(const std::string& path, int place, int64_t budget);
    ~Ledger();
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;

    int64_t budget() const { return page_->budget.load(); }
    int64_t held() const { return own().held.load(); }

    // Memory. Bytes of all these are the caller's business.
    bool enter(int64_t weights, int64_t floor);
    // Whether `enter` could be true if the others had nothing but weights and floors.
    bool fits(int64_t weights, int64_t floor) const;
    void leave();
    bool take(int64_t bytes);
    void give(int64_t bytes);
    void set_used(int64_t bytes) { own().used.store(bytes); }
    void set_wanted(int64_t bytes);
    int64_t room() const;  // that this place can take now
    int64_t reach() const;  // that it could take if all gave back what no request uses
    int64_t owed() const;  // that it should give back
    // Frees what places have that have died; whether there were any.
    bool clear_dead();
    uint32_t changes() const { return page_->changes.load(); }
    // Returns the number of changes once it is another than `seen`, or after this time.
    uint32_t await_change(uint32_t seen, std::chrono::milliseconds most);

    // Turns. Nobody's life depends on them: two at a time are slow, not wrong.
    bool try_turn(int64_t lease_ns);
    bool await_turn(int64_t due_ns, int64_t lease_ns, std::chrono::milliseconds most);
    int num_waiting() const;  // others
    // After a step, with when the next one is due, if there is one; whether the turn is kept.
    bool pass_turn(bool has_more, int64_t due_ns, int64_t lease_ns);

private:
    Row& own() { return page_->rows[place_]; }
    const Row& own() const { return page_->rows[place_]; }
    bool is_alive(int place) const;
    int64_t left(bool if_given_back) const;
    void changed();
    bool steal(uint32_t holder, int64_t lease_ns);
    void share_budget(int64_t budget);

    int fd_ = -1;
    int place_;
    Page* page_ = nullptr;
};

}  // namespace pdserve::places
