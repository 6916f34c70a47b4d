// Connections to ranks of other hosts (and messages between any two ranks), made when they are first needed.
//
// A process has one listening socket and one thread for all its groups (endpoint.h). That thread watches a *control*
// connection per pair of ranks: it sends a word four times a second, and the kernel's own acknowledgements tell a cut
// link (none come: TCP_USER_TIMEOUT) from a stopped or busy process (they come all the same). A process that dies closes
// its connections. Whoever finds a death tells everybody it is connected to, and later whoever asks.
//
// The lower rank dials. Lanes: 0 control, 1 messages, 2.. the streams of collectives.
#ifndef LAKH_LINKS_H
#define LAKH_LINKS_H

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fate.h"

namespace lakh {

constexpr int kControl = 0, kMessages = 1, kFirstStream = 2;

struct Word {  // on the control lane
  uint32_t kind;  // 0 beat, 1 goodbye, 2 the group is over
  int32_t code, dead;
  char text[308];
};

struct Wire {  // how large messages travel to a peer; see lakh_c3_wire
  int32_t streams = 1;
  int64_t chunk_bytes = 256 << 10;      // less is not worth a second stream
  int64_t in_flight_bytes = 4 << 20;    // of each stream
};

struct Shaper {  // a path of virtual links; see lakh_c3_shape
  struct Hop {
    std::atomic<int64_t> *free_at_ns;  // in memory shared by all processes
    double bytes_per_s;
  };
  std::vector<Hop> hops;
  int64_t delay_ns = 0;
};

class Links {
 public:
  Links(Fate *fate, const uint8_t uuid[16], int32_t rank, int32_t size);
  ~Links();

  void join(std::vector<std::string> addresses, int32_t streams);
  // The descriptor of a lane to a peer, made if need be. Non-blocking mode.
  Status lane(int32_t peer, int lane, int64_t deadline_ns, int *fd);
  void say_goodbye();
  void tell(const Status &why, int32_t dead);  // to every rank we are connected to

  Status shape(int32_t peer, const char *file, int32_t link, double bytes_per_s, int64_t delay_us);
  const Shaper *shaper(int32_t peer) const;

  Status set_wire(int32_t peer, const Wire &wire);
  Wire wire(int32_t peer) const;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  uint64_t connections() const { return connections_.load(); }

  // For the endpoint's thread.
  void arrived(int32_t peer, int lane, int fd);
  void control_readable(int32_t peer, int fd);
  bool has_left(int32_t peer);
  void beat();  // a word to every peer
  std::vector<std::pair<int32_t, int>> controls();
  const uint8_t *uuid() const { return uuid_; }
  Word word() const;  // what a stranger is told of the group

 private:
  struct Peer {
    std::map<int, int> fds;
    bool left = false;
    std::string inbox;
  };
  Status dial(int32_t peer, int lane, int64_t deadline_ns, int *fd);
  Status probe(int32_t peer);
  void lost(int32_t peer, const std::string &how);

  Fate *fate_;
  uint8_t uuid_[16];
  int32_t rank_, size_;
  Wire wire_;                        // to most peers
  std::map<int32_t, Wire> wires_;    // to those of other tiers
  std::vector<std::string> addresses_;
  mutable std::mutex mutex_;
  std::recursive_mutex dialling_;
  std::condition_variable changed_;
  std::map<int32_t, Peer> peers_;
  std::map<int32_t, Shaper> shapers_;
  std::map<std::string, void *> shaper_files_;
  std::atomic<uint64_t> connections_{0};
  std::atomic<bool> closing_{false};
};

}  // namespace lakh
#endif
