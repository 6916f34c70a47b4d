// Executes the sends and receives of one stage of a schedule over TCP, concurrently.
//
// Each message starts with a header that identifies its operation. A header that does not match this rank's operation ends the
// group with an error that shows the difference. Large messages are split into chunks, distributed over the streams to the peer
// (Wire, per peer). Received data is reduced while the rest is still in flight.
#ifndef LAKH_EXCHANGE_H
#define LAKH_EXCHANGE_H

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "links.h"

namespace lakh {

struct Header {
  uint32_t magic;
  uint32_t number;  // of the operation in its group
  int32_t operation, dtype, op, root;
  int64_t count;  // of the operation
  int64_t bytes;  // of this message
};

class Exchange {
 public:
  Exchange(GroupState *group_state, Links *links, std::atomic<uint64_t> *sent, std::atomic<uint64_t> *received,
           std::vector<std::atomic<uint64_t>> *waited_us)
      : group_state_(group_state), links_(links), sent_(sent), received_(received), waited_us_(waited_us) {}

  void begin(const Header &like) { header_template_ = like; }
  void send(int32_t peer, const char *data, int64_t bytes);
  // `on_data(at, bytes)` is called as data arrives, in whole elements.
  void receive(int32_t peer, char *data, int64_t bytes, std::function<void(char *, int64_t)> on_data = nullptr);
  Status finish(int64_t deadline_ns, const char *what);

 private:
  struct Segment {
    char *data;
    int64_t bytes, done = 0, handed = 0;
    bool is_header = false;
    std::function<void(char *, int64_t)> on_data;
  };
  struct Flow {
    int32_t peer = 0;
    int fd = -1;
    bool out = false;
    Header header{};  // that arrives; a partial one stays here until the rest of it does
    std::deque<Segment> pieces;
    Pacer pacer;  // with emulated links
  };
  Flow &flow(int32_t peer, int stream, bool out);
  void enqueue(int32_t peer, char *data, int64_t bytes, bool out, std::function<void(char *, int64_t)> on_data);
  Status push(Flow *flow, bool *progress, int64_t *wake_ns);
  Status pull(Flow *flow, bool *progress);
  Status connection_failure(int32_t peer, ssize_t n, int error);
  Status check(const Header &theirs, int64_t expected_bytes, int32_t peer);

  GroupState *group_state_;
  Links *links_;
  std::atomic<uint64_t> *sent_, *received_;
  std::vector<std::atomic<uint64_t>> *waited_us_;
  Header header_template_{};
  std::map<std::tuple<int32_t, int, bool>, Flow> flows_;
  std::deque<Header> headers_;
};

}  // namespace lakh
#endif
