#include "workers.h"

#include <sched.h>

namespace lakh {
namespace {
constexpr int kPolls = 4000;      // about 20 microseconds
// Then as many rounds in which another thread may have the core: about 200 microseconds if none wants it. A worker that
// slept between two products would cost more to wake than the next product takes.
constexpr int kYields = 400;
constexpr int kPollsBeforeYield = 200;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
}  // namespace

void Workers::resize(int count) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  is_stopping_ = false;
  for (int i = 0; i < count; ++i) threads_.emplace_back(&Workers::work, this, task_.load());
}

void Workers::run(int num_parts, const std::function<void(int)>& part) {
  if (threads_.empty() || num_parts < 2) {
    for (int i = 0; i < num_parts; ++i) part(i);
    return;
  }
  part_ = &part;
  num_parts_ = num_parts;
  next_.store(0);
  is_open_.store(true);
  bool has_sleepers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_.fetch_add(1);
    has_sleepers = sleeping_ > 0;
  }
  if (has_sleepers) wake_.notify_all();
  claim(part, num_parts);
  is_open_.store(false);
  // All parts are claimed: what remains is at most the part that each joined worker has begun.
  for (int polls = 0; joined_.load() > 0; ++polls) polls < kPollsBeforeYield ? pause() : (void)sched_yield();
}

void Workers::claim(const std::function<void(int)>& part, int num_parts) {
  for (int i = next_.fetch_add(1); i < num_parts; i = next_.fetch_add(1)) part(i);
}

void Workers::work(uint64_t seen) {
  for (;;) {
    int polls = 0;
    const auto is_idle = [&] { return task_.load(std::memory_order_relaxed) == seen; };
    while (is_idle() && polls < kPolls) ++polls, pause();
    while (is_idle() && polls < kPolls + kYields) ++polls, sched_yield();
    if (polls == kPolls + kYields) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, [&] { return is_stopping_ || task_.load() != seen; });
      --sleeping_;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_stopping_) return;
    }
    seen = task_.load();
    joined_.fetch_add(1);
    // After this, run() waits for us: part_ is valid if the task is still open.
    if (is_open_.load()) claim(*part_, num_parts_);
    joined_.fetch_sub(1);
  }
}

}  // namespace lakh
