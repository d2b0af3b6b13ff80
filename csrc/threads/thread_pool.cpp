// A job is a counter of items, and each awake thread takes the next item. So a worker that wakes
// late delays nobody. One that another process keeps from its core delays only the item that it
// holds, which it finishes on the core of the thread that waits for it (PlacedThread). If the workers
// are awake, a job is handed to them through one cache line, without a lock or a system call.

#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "spin.h"

namespace pdserve {

namespace {

constexpr uint64_t kGateOpen = uint64_t{1} << 31;
constexpr uint64_t kGateJob = uint64_t{1} << 32;  // one job

// How long to spin before sleeping. Longer than the serial parts of a step; short compared with
// what is lost if another process needs the core.
constexpr std::chrono::microseconds kSpin{30};

// How long to sleep before looking whether the thread that is awaited stands still.
constexpr std::chrono::microseconds kPatience{200};

uint64_t job_of(uint64_t gate) { return gate / kGateJob; }

// The process's. Never deleted: workers may still be sleeping in it when static destructors run, or
// after a fork.
ThreadPool* current_pool = nullptr;
std::mutex current_pool_mutex;

thread_local std::unique_ptr<ThreadPool> own_pool;

// The cores that this process may use, which a container or taskset may limit.
int available_cores() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof(cores), &cores) != 0) {
        return std::max(1u, std::thread::hardware_concurrency());
    }
    return std::max(1, CPU_COUNT(&cores));
}

void block_signals() {
    // Signals are handled by the interpreter's threads.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

ThreadPool& ThreadPool::instance() {
    static const int registered = pthread_atfork(
        [] { current_pool_mutex.lock(); }, [] { current_pool_mutex.unlock(); },
        [] {
            current_pool = nullptr;
            (void)own_pool.release();
            current_pool_mutex.unlock();
        });
    (void)registered;
    if (own_pool != nullptr) return *own_pool;
    std::lock_guard lock(current_pool_mutex);
    if (current_pool == nullptr) current_pool = new ThreadPool(available_cores());
    return *current_pool;
}

void ThreadPool::own(std::shared_ptr<CoreShare> share) {
    own_pool.reset();
    if (share == nullptr) return;
    const int num_cores = share->num_cores();
    own_pool.reset(new ThreadPool(num_cores, std::move(share)));
}

ThreadPool::ThreadPool(int num_threads, std::shared_ptr<CoreShare> share)
    : share_(std::move(share)), num_threads_(num_threads) {}

ThreadPool::~ThreadPool() { resize_workers(0); }

int ThreadPool::num_threads() { return num_threads_; }

void ThreadPool::set_num_threads(int num_threads) {
    std::lock_guard turn(turn_mutex_);
    num_threads_ = num_threads;
    if (static_cast<int>(workers_.size()) > num_threads - 1) resize_workers(num_threads - 1);
}

void ThreadPool::resize_workers(int num_workers) {
    {
        std::lock_guard lock(mutex_);
        wanted_workers_ = num_workers;
    }
    work_available_.notify_all();
    admitted_.notify_all();
    while (static_cast<int>(workers_.size()) > num_workers) {
        workers_.back()->thread.join();
        workers_.pop_back();
    }
    while (static_cast<int>(workers_.size()) < num_workers) {
        const int index = static_cast<int>(workers_.size());
        Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
        worker.index = index;
        worker.thread = std::thread([this, &worker] { worker_loop(worker); });
        pthread_setname_np(worker.thread.native_handle(), "pdserve-kernel");
    }
}

ThreadPool::Region::Region(ThreadPool& pool) : pool_(pool), is_first_(++pool.num_regions_ == 1) {
    if (is_first_) {
        pool_.caller_.bind();
        pool_.has_caller_ = true;
    }
    ++pool_.region_number_;
    if (pool_.num_threads_ > 1) pool_.wake_workers(pool_.num_threads_ - 1);
}

ThreadPool::Region::~Region() {
    if (is_first_) {
        pool_.has_caller_ = false;
        pool_.caller_.return_core();
    }
    --pool_.num_regions_;
}

void ThreadPool::run(int64_t num_items, Call call, const void* context) {
    if (num_threads_ == 1 || num_items <= 1) {
        for (int64_t item = 0; item < num_items; ++item) call(context, item);
        return;
    }
    std::lock_guard turn(turn_mutex_);
    if (static_cast<int>(workers_.size()) < num_threads_ - 1) resize_workers(num_threads_ - 1);

    if (share_ != nullptr) admit(share_->begin_job() - 1);
    caller_core_ = sched_getcpu();
    job_ = {num_items, call, context, nullptr};
    next_item_.store(0, std::memory_order_relaxed);
    gate_ = (job_of(gate_) + 1) * kGateJob + kGateOpen;
    wake_workers(num_items - 1);
    work_on_job(kCaller);
    gate_ -= kGateOpen;
    wait_until_left();
    if (job_.error) std::rethrow_exception(std::exchange(job_.error, nullptr));
}

void ThreadPool::work_on_job(int index) {
    try {
        while (may_go_on(index)) {
            const int64_t item = next_item_.fetch_add(1, std::memory_order_relaxed);
            if (item >= job_.num_items) return;
            job_.call(job_.context, item);
        }
    } catch (...) {
        next_item_ = job_.num_items;
        std::lock_guard lock(mutex_);
        if (!job_.error) job_.error = std::current_exception();
    }
}

// Whether a thread may take another item: there may be fewer cores for it than when the job began.
bool ThreadPool::may_go_on(int index) const {
    return index == kCaller || share_ == nullptr || index < share_->allowed() - 1;
}

// Whoever is admitted late, or still works on a job that it is not admitted to, changes no result.
void ThreadPool::admit(int num_workers) {
    const int before = num_admitted_.exchange(num_workers);
    if (num_workers == before) return;
    { std::lock_guard lock(mutex_); }  // whoever has looked for the last time waits by now
    // Those that are not admitted any longer go to sleep apart, so that jobs do not wake them.
    (num_workers < before ? work_available_ : admitted_).notify_all();
}

bool ThreadPool::is_admitted(int index) const { return index < num_admitted_; }

// A worker without work counts itself as sleeping *before* it looks for work for the last time. So
// either it sees what was stored before this call, or this call sees it sleeping.
void ThreadPool::wake_workers(int64_t num_workers) {
    const int64_t num_sleeping = num_sleeping_;
    if (num_sleeping == 0) return;
    { std::lock_guard lock(mutex_); }  // whoever has looked for the last time waits by now
    if (num_workers >= num_sleeping) {
        work_available_.notify_all();
        return;
    }
    for (int64_t i = 0; i < num_workers; ++i) work_available_.notify_one();
}

void ThreadPool::wait_until_left() {
    const auto nobody_is_inside = [this] { return gate_ % kGateOpen == 0; };
    if (spin_until(nobody_is_inside, kSpin)) return;
    std::unique_lock lock(mutex_);
    caller_sleeps_ = true;
    do {
        lock.unlock();
        for (const auto& worker : workers_) {
            worker->place.lend_core([&] { return worker->is_inside.load(); });
        }
        lock.lock();
    } while (!workers_left_.wait_for(lock, kPatience, nobody_is_inside));
    caller_sleeps_ = false;
}

void ThreadPool::worker_loop(Worker& self) {
    const int index = self.index;
    block_signals();
    self.place.bind();
    uint64_t last_gate = 0;
    uint64_t last_region = 0;
    while (true) {
        wait_for_news(index, last_gate, last_region);
        if (index >= wanted_workers_) return;
        last_region = region_number_;
        if (enter(self, last_gate)) {
            work_on_job(index);
            leave(self);
        }
    }
}

// Those that are not admitted sleep apart, so that no job wakes them.
void ThreadPool::wait_until_admitted(int index) {
    if (is_admitted(index)) return;
    std::unique_lock lock(mutex_);
    admitted_.wait(lock, [&] { return is_admitted(index) || index >= wanted_workers_; });
}

void ThreadPool::wait_for_news(int index, uint64_t last_gate, uint64_t last_region) {
    wait_until_admitted(index);
    if (sees_news_soon(index, last_gate, last_region)) return;
    const auto news = [&] { return has_news(index, last_gate, last_region); };
    std::unique_lock lock(mutex_);
    ++num_sleeping_;
    while (num_regions_ > 0 && !work_available_.wait_for(lock, kPatience, news)) {
        lock.unlock();
        caller_.lend_core([this] { return has_caller_ && !caller_sleeps_; });
        lock.lock();
    }
    work_available_.wait(lock, news);
    --num_sleeping_;
}

bool ThreadPool::has_news(int index, uint64_t last_gate, uint64_t last_region) {
    const uint64_t gate = gate_;
    const bool has_job = (gate & kGateOpen) != 0 && job_of(gate) != job_of(last_gate);
    return has_job || region_number_ != last_region || index >= wanted_workers_
        || !is_admitted(index);
}

bool ThreadPool::sees_news_soon(int index, uint64_t last_gate, uint64_t last_region) {
    const auto looked_long_enough = [&] {
        return num_regions_ == 0 || has_news(index, last_gate, last_region);
    };
    return num_regions_ > 0 && spin_until(looked_long_enough, kSpin)
        && has_news(index, last_gate, last_region);
}

// Joins the open job, unless this worker has worked on it already, or is not admitted.
bool ThreadPool::enter(Worker& self, uint64_t& last_gate) {
    uint64_t gate = gate_;
    const int caller_core = caller_core_;
    if (sched_getcpu() == caller_core) self.place.step_away(caller_core);
    self.is_inside = true;
    while ((gate & kGateOpen) != 0 && job_of(gate) != job_of(last_gate)
        && is_admitted(self.index)) {
        if (gate_.compare_exchange_weak(gate, gate + 1)) {
            last_gate = gate;
            return true;
        }
    }
    self.is_inside = false;
    self.place.return_core();
    return false;
}

void ThreadPool::leave(Worker& self) {
    const uint64_t gate = --gate_;
    if (gate % kGateJob == 0 && caller_sleeps_) {
        { std::lock_guard lock(mutex_); }  // the caller looks, or waits, by now
        workers_left_.notify_one();
    }
    self.is_inside = false;
    self.place.return_core();
}

}  // namespace pdserve
