// A job is a counter of items: whoever is awake takes the next one, so a worker that wakes late, or
// is descheduled, delays nobody but the item it holds.

#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <string>

#include "tensor_view.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

constexpr int kMaxThreads = 1024;

// Never deleted: workers may still sleep in it when static destructors run, or after a fork.
ThreadPool* current_pool = nullptr;
std::mutex current_pool_mutex;

// The cores this process may use: what a container or taskset grants, not what the machine has.
int available_cores() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof(cores), &cores) != 0) {
        return std::max(1u, std::thread::hardware_concurrency());
    }
    return std::max(1, CPU_COUNT(&cores));
}

void block_signals() {
    // Signals belong to the interpreter's threads.
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
            current_pool_mutex.unlock();
        });
    (void)registered;
    std::lock_guard lock(current_pool_mutex);
    if (current_pool == nullptr) current_pool = new ThreadPool();
    return *current_pool;
}

ThreadPool::ThreadPool() : num_threads_(available_cores()) {}

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
    while (static_cast<int>(workers_.size()) > num_workers) {
        workers_.back().join();
        workers_.pop_back();
    }
    while (static_cast<int>(workers_.size()) < num_workers) {
        workers_.emplace_back(&ThreadPool::worker_loop, this, static_cast<int>(workers_.size()));
        pthread_setname_np(workers_.back().native_handle(), "pdserve-kernel");
    }
}

void ThreadPool::run(int64_t num_items, Call call, const void* context) {
    if (num_threads_ == 1 || num_items <= 1) {
        for (int64_t item = 0; item < num_items; ++item) call(context, item);
        return;
    }
    std::lock_guard turn(turn_mutex_);
    if (static_cast<int>(workers_.size()) < num_threads_ - 1) resize_workers(num_threads_ - 1);

    Job job{num_items, call, context};
    const int64_t helpers = std::min<int64_t>(num_items - 1, workers_.size());
    {
        std::lock_guard lock(mutex_);
        job_ = &job;
        ++job_number_;
    }
    for (int64_t i = 0; i < helpers; ++i) work_available_.notify_one();
    work_on(job);

    std::unique_lock lock(mutex_);
    job_ = nullptr;
    workers_done_.wait(lock, [this] { return num_working_ == 0; });
    if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::work_on(Job& job) {
    try {
        while (true) {
            const int64_t item = job.next_item.fetch_add(1, std::memory_order_relaxed);
            if (item >= job.num_items) return;
            job.call(job.context, item);
        }
    } catch (...) {
        job.next_item = job.num_items;
        std::lock_guard lock(mutex_);
        if (!job.error) job.error = std::current_exception();
    }
}

void ThreadPool::worker_loop(int index) {
    block_signals();
    uint64_t last_job_number = 0;
    std::unique_lock lock(mutex_);
    while (true) {
        work_available_.wait(lock, [&] {
            return index >= wanted_workers_ || (job_ != nullptr && job_number_ != last_job_number);
        });
        if (index >= wanted_workers_) return;
        last_job_number = job_number_;
        Job& job = *job_;
        ++num_working_;
        lock.unlock();
        work_on(job);
        lock.lock();
        if (--num_working_ == 0) workers_done_.notify_one();
    }
}

void bind_threads(nb::module_& m) {
    m.def(
        "set_num_threads",
        [](int num_threads) {
            if (num_threads < 1 || num_threads > kMaxThreads) {
                raise_value_error("num_threads", "1 to " + std::to_string(kMaxThreads),
                    std::to_string(num_threads));
            }
            nb::gil_scoped_release release;
            ThreadPool::instance().set_num_threads(num_threads);
        },
        nb::arg("num_threads"), "How many threads share one kernel call, the caller included.");
    m.def(
        "num_threads", [] { return ThreadPool::instance().num_threads(); },
        "How many threads share one kernel call; at first the cores this process may use.");
}

}  // namespace pdserve
