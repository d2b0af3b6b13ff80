// The threads among which the work of a kernel call is divided.
//
// Not OpenMP: torch bundles its own libgomp, and two OpenMP runtimes in one process compete for the
// cores. Idle workers sleep. Only inside a Region, which is open while a step of the model runs, do
// they spin for some microseconds, waiting for the next job, before they sleep. A thread that is
// about to sleep lends its core to one that it waits for, if another process keeps that from its own.
//
// A thread may have workers of its own, so that its jobs take no turns with those of others, and a
// CoreShare. Then only as many threads work as it allows: workers beyond that are not admitted to
// jobs, and those that are leave a job before its next item.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core_split.h"
#include "placed_thread.h"

namespace pdserve {

class ThreadPool {
public:
    // The calling thread's own pool, or else the process's. Made anew in a forked child, where the
    // parent's workers do not exist.
    static ThreadPool& instance();

    // From now on, the calling thread has a pool of its own, with as many threads as there are
    // cores to share; null: it has not any more. Its workers end with it.
    static void own(std::shared_ptr<CoreShare> share);

    ~ThreadPool();

    int num_threads();

    // The number of threads, the caller included, for later calls. Workers start when first needed.
    void set_num_threads(int num_threads);

    // Calls body(i) once for every i in [0, num_items), in no particular order, and returns when
    // all have returned. Rethrows the first exception. Calls from several threads take turns.
    template <class Body>
    void parallel_for(int64_t num_items, const Body& body) {
        auto call = [](const void* context, int64_t item) {
            (*static_cast<const Body*>(context))(item);
        };
        run(num_items, call, &body);
    }

    // While one is alive, many calls follow each other closely.
    class Region {
    public:
        explicit Region(ThreadPool& pool);
        ~Region();
        Region(const Region&) = delete;
        Region& operator=(const Region&) = delete;

    private:
        ThreadPool& pool_;
        bool is_first_;  // of those that are open: its thread is the one that workers lend to
    };

private:
    using Call = void (*)(const void* context, int64_t item);

    static constexpr int kAll = std::numeric_limits<int>::max();
    static constexpr int kCaller = -1;  // index of the thread that brings a job

    struct Worker {
        int index;
        PlacedThread place;
        std::atomic<bool> is_inside{false};  // may be working on the job
        std::thread thread;
    };

    struct Job {
        int64_t num_items;
        Call call;
        const void* context;
        std::exception_ptr error;  // guarded by mutex_
    };

    explicit ThreadPool(int num_threads, std::shared_ptr<CoreShare> share = nullptr);
    void run(int64_t num_items, Call call, const void* context);
    void work_on_job(int index);
    bool may_go_on(int index) const;
    void wait_until_left();
    void wake_workers(int64_t num_workers);
    void admit(int num_workers);
    bool is_admitted(int index) const;
    void worker_loop(Worker& self);
    void wait_until_admitted(int index);
    void wait_for_news(int index, uint64_t last_gate, uint64_t last_region);
    bool has_news(int index, uint64_t last_gate, uint64_t last_region);
    bool sees_news_soon(int index, uint64_t last_gate, uint64_t last_region);
    bool enter(Worker& self, uint64_t& last_gate);
    void leave(Worker& self);
    void resize_workers(int num_workers);

    const std::shared_ptr<CoreShare> share_;  // null: the cores are not shared
    std::mutex turn_mutex_;  // held by the one caller whose job is running, or by a resize
    Job job_;                // written while the gate is closed and nobody is inside

    // The number of the job (upper 32 bits), whether workers may still join it (kGateOpen), and how
    // many are inside (the bits below). One atomic word, so that no worker can join a job that has
    // ended.
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<int64_t> next_item_{0};
    alignas(64) std::atomic<uint64_t> region_number_{0};  // of the last that was opened
    std::atomic<int> num_regions_{0};                     // that are open
    std::atomic<int> num_sleeping_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> has_caller_{false};  // a thread in a Region is bound to caller_
    std::atomic<int> caller_core_{-1};     // when the job began
    PlacedThread caller_;
    std::atomic<int> wanted_workers_{0};
    std::atomic<int> num_admitted_{kAll};  // workers that may join jobs: those with lower indices
    std::atomic<int> num_threads_;

    std::mutex mutex_;  // for going to sleep and waking up
    std::condition_variable work_available_;
    std::condition_variable admitted_;
    std::condition_variable workers_left_;
    std::vector<std::unique_ptr<Worker>> workers_;  // guarded by turn_mutex_
};

}  // namespace pdserve
