// State of a group: running, or ended with the first failure and the ranks that caused it.
//
// Any thread may end a group. The first failure is kept, and every later call reports it.
#ifndef LAKH_GROUP_STATE_H
#define LAKH_GROUP_STATE_H

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "status.h"

namespace lakh {

class GroupState {
 public:
  bool ended() const { return code_.load(std::memory_order_acquire) != LAKH_C3_OK; }

  Status status() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Status{code_.load(), text_};
  }

  std::vector<int32_t> dead() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return dead_;
  }

  // Returns the status of the group: this one, or an earlier one. dead < 0: no particular rank.
  Status end(const Status &why, int32_t dead) {
    std::function<void(const Status &, int32_t)> notify;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // Later failures are often consequences of the first: ranks that leave close their connections.
      if (code_.load() != LAKH_C3_OK) return Status{code_.load(), text_};
      if (dead >= 0) dead_.push_back(dead);
      text_ = why.text;
      code_.store(why.code, std::memory_order_release);
      notify = on_end;
    }
    if (notify) notify(why, dead);
    return why;
  }

  std::function<void(const Status &, int32_t)> on_end;  // set once, before the group is used

 private:
  mutable std::mutex mutex_;
  std::atomic<int32_t> code_{LAKH_C3_OK};
  std::string text_;
  std::vector<int32_t> dead_;
};

}  // namespace lakh
#endif
