// Threads that share the parts of one task with its caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lakh {

// Parts are claimed one by one, so a worker that wakes late, or not at all, costs nothing but its help: the caller never
// waits for a thread that has no part. Between tasks a worker polls, then yields its core to others, which covers the gap
// between two products of one step, and then sleeps.
class Workers {
 public:
  ~Workers() { resize(0); }

  void resize(int count);
  int count() const { return int(threads_.size()); }

  // Calls part(0) .. part(num_parts - 1), each once; returns when all have returned.
  void run(int num_parts, const std::function<void(int)>& part);

 private:
  void work(uint64_t seen);
  void claim(const std::function<void(int)>& part, int num_parts);

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> task_{0};   // number of the newest task
  std::atomic<bool> is_open_{false};  // workers may join the task
  std::atomic<int> joined_{0};      // workers that use part_ now
  std::atomic<int> next_{0};
  int num_parts_ = 0;
  int sleeping_ = 0;  // guarded by mutex_
  bool is_stopping_ = false;
  const std::function<void(int)>* part_ = nullptr;
};

// Runs the parts on the threads of later products (lakh_engine_set_threads). Calls from several threads take turns.
void run_on_threads(int num_parts, const std::function<void(int)>& part);

}  // namespace lakh
