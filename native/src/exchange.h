// Moves the sends and receives of one stage of a schedule over TCP, all at once.
//
// Each message starts with a header that says which operation it belongs to; a header that does not fit what this rank
// is doing ends the group with the difference in words, never a wrong sum. Large messages are cut into chunks, which the
// streams to the peer take in turn (Wire, per peer).
// Received pieces are reduced while the rest is still on the wire.
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
  Exchange(Fate *fate, Links *links, std::atomic<uint64_t> *sent, std::atomic<uint64_t> *received,
           std::vector<std::atomic<uint64_t>> *waited_us)
      : fate_(fate), links_(links), sent_(sent), received_(received), waited_us_(waited_us) {}

  void begin(const Header &like) { like_ = like; }
  void send(int32_t peer, const char *data, int64_t bytes);
  // `landed(at, bytes)` is called as the bytes come in, in pieces of whole elements.
  void receive(int32_t peer, char *data, int64_t bytes, std::function<void(char *, int64_t)> landed = nullptr);
  Status finish(int64_t deadline_ns, const char *what);

 private:
  struct Piece {
    char *data;
    int64_t bytes, done = 0, handed = 0;
    bool is_header = false;
    std::function<void(char *, int64_t)> landed;
  };
  struct Flow {
    int32_t peer = 0;
    int fd = -1;
    bool out = false;
    std::deque<Piece> pieces;
    // of a shaped sender
    const Shaper *shaper = nullptr;
    std::deque<std::pair<int64_t, int64_t>> allowed;  // (bytes, may leave at ns)
    int64_t reserved = 0, departs_ns = 0, credit = 0;
  };
  Flow &flow(int32_t peer, int stream, bool out);
  void cut(int32_t peer, char *data, int64_t bytes, bool out, std::function<void(char *, int64_t)> landed);
  Status push(Flow *flow, bool *progress, int64_t *wake_ns);
  Status pull(Flow *flow, bool *progress);
  Status broken(int32_t peer, ssize_t n, int error);
  Status check(const Header &theirs, int32_t peer);

  Fate *fate_;
  Links *links_;
  std::atomic<uint64_t> *sent_, *received_;
  std::vector<std::atomic<uint64_t>> *waited_us_;
  Header like_{};
  std::map<std::tuple<int32_t, int, bool>, Flow> flows_;
  std::deque<Header> headers_;
};

}  // namespace lakh
#endif
