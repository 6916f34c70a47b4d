// Emulated links: how many bytes of a flow may leave now. Time is an argument; nothing here sleeps or reads a clock.
#ifndef LAKH_SHAPER_H
#define LAKH_SHAPER_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace lakh {

struct Shaper {  // a path of emulated links; see lakh_c3_shape
  struct Hop {
    std::atomic<int64_t> *free_at_ns;  // in memory shared by all processes
    double bytes_per_s;
  };
  std::vector<Hop> hops;
  int64_t delay_ns = 0;

  // Reserves time for `bytes` on every link of the path, not before `from_ns`; returns when the last link has passed them on.
  int64_t reserve(int64_t bytes, int64_t from_ns) const {
    int64_t end = from_ns;
    for (const Hop &hop : hops) {
      const int64_t takes = static_cast<int64_t>(static_cast<double>(bytes) / hop.bytes_per_s * 1e9);
      int64_t free_at = hop.free_at_ns->load();
      int64_t start;
      do {
        start = std::max(free_at, from_ns);
      } while (!hop.free_at_ns->compare_exchange_weak(free_at, start + takes));
      end = std::max(end, start + takes);
    }
    return end;
  }
};

// The bytes of one flow that have crossed the emulated links. All its data is pending from `start` on, so the next grain is
// reserved from the moment the last one left, however late the process wakes up: a busy machine does not slow the links down.
class Pacer {
 public:
  static constexpr int64_t kGrainBytes = 16 << 10;  // flows that share a link alternate by grains

  void start(const Shaper *shaper, int64_t now_ns) {
    shaper_ = shaper;
    departs_ns_ = now_ns;
    credit_ = 0;
    reserved_ = 0;
    crossing_.clear();
  }
  bool shaped() const { return shaper_ != nullptr; }

  // Bytes that may leave at `now_ns`, of `pending` bytes not yet sent.
  int64_t allowed(int64_t now_ns, int64_t pending) {
    while (departs_ns_ <= now_ns && reserved_ + credit_ < pending) {
      const int64_t grain = std::min(kGrainBytes, pending - reserved_ - credit_);
      departs_ns_ = shaper_->reserve(grain, departs_ns_);
      reserved_ += grain;
      crossing_.emplace_back(grain, departs_ns_ + shaper_->delay_ns);
    }
    while (!crossing_.empty() && crossing_.front().second <= now_ns) {
      credit_ += crossing_.front().first;
      reserved_ -= crossing_.front().first;
      crossing_.pop_front();
    }
    return credit_;
  }
  void sent(int64_t bytes) { credit_ -= bytes; }

  // When `allowed` may change: a grain arrives, or the next one can be reserved.
  int64_t wake_ns(int64_t pending) const {
    int64_t wake = INT64_MAX;
    if (!crossing_.empty()) wake = crossing_.front().second;
    if (reserved_ + credit_ < pending) wake = std::min(wake, departs_ns_);
    return wake;
  }
  bool must_wait() const { return shaped() && credit_ <= 0; }

 private:
  const Shaper *shaper_ = nullptr;
  std::deque<std::pair<int64_t, int64_t>> crossing_;  // (bytes, arrive at ns)
  int64_t reserved_ = 0, departs_ns_ = 0, credit_ = 0;
};

}  // namespace lakh
#endif
