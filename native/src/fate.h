// What became of a group: running, or over, with the first reason that was found and the ranks it names as dead.
//
// Any thread may end a group; the first one wins and its words are what every later call reports.
#ifndef LAKH_FATE_H
#define LAKH_FATE_H

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "status.h"

namespace lakh {

class Fate {
 public:
  bool over() const { return code_.load(std::memory_order_acquire) != LAKH_C3_OK; }

  Status status() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Status{code_.load(), text_};
  }

  std::vector<int32_t> dead() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return dead_;
  }

  // Returns the status that holds from now on: this one, or an earlier one. dead < 0: nobody in particular.
  Status end(const Status &why, int32_t dead) {
    std::function<void(const Status &, int32_t)> tell;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // What comes after the first reason is often its consequence: ranks that give up close their connections.
      if (code_.load() != LAKH_C3_OK) return Status{code_.load(), text_};
      if (dead >= 0) dead_.push_back(dead);
      text_ = why.text;
      code_.store(why.code, std::memory_order_release);
      tell = on_end;
    }
    if (tell) tell(why, dead);
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
