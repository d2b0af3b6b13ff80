// The threads that share the work of one kernel call.
//
// Our own and not OpenMP: torch bundles its libgomp, and two OpenMP runtimes in one process fight
// over the cores. Idle workers sleep on a condition variable; nothing spins.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <nanobind/nanobind.h>

namespace pdserve {

class ThreadPool {
public:
    // The process's pool. Made anew in a forked child, where the parent's workers do not exist.
    static ThreadPool& instance();

    int num_threads();

    // How many threads, the caller included, share the work of later calls. Workers start lazily.
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

private:
    using Call = void (*)(const void* context, int64_t item);

    struct Job {
        int64_t num_items;
        Call call;
        const void* context;
        std::atomic<int64_t> next_item{0};
        std::exception_ptr error{};  // guarded by mutex_
    };

    ThreadPool();
    void run(int64_t num_items, Call call, const void* context);
    void work_on(Job& job);
    void worker_loop(int index);
    void resize_workers(int num_workers);

    std::mutex turn_mutex_;  // held by the one caller whose job is running, or by a resize

    std::mutex mutex_;  // guards everything below
    std::condition_variable work_available_;
    std::condition_variable workers_done_;
    Job* job_ = nullptr;  // null as soon as no worker should join any more
    uint64_t job_number_ = 0;
    int num_working_ = 0;
    int wanted_workers_ = 0;
    std::vector<std::thread> workers_;

    std::atomic<int> num_threads_;
};

void bind_threads(nanobind::module_& m);

}  // namespace pdserve
