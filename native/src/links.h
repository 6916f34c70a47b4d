// Connections to ranks of other hosts (and messages between any two ranks), made when they are first needed.
//
// A process has one listening socket and one thread for all its groups (endpoint.h). That thread watches a *control*
// connection per pair of ranks and sends a heartbeat four times a second. The kernel's acknowledgements distinguish a cut
// link (none arrive: TCP_USER_TIMEOUT) from a stopped or busy process (they arrive). A process that dies closes its
// connections. A rank that detects a failure notifies all connected ranks, and later those that ask.
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

#include "group_state.h"
#include "handshake.h"
#include "shaper.h"

namespace lakh {

constexpr int kControl = 0, kMessages = 1, kFirstStream = 2, kMaxStreams = 64;

struct ControlMessage {  // on the control lane
  uint32_t kind;  // 0 heartbeat, 1 goodbye, 2 the group has ended
  int32_t code, dead;
  char text[308];
};

struct Wire {  // transport of large messages to a peer; see lakh_c3_wire
  int32_t streams = 1;
  int64_t chunk_bytes = 256 << 10;      // smaller chunks do not justify a second stream
  int64_t in_flight_bytes = 4 << 20;    // per stream
};

class Links {
 public:
  Links(GroupState *group_state, const uint8_t uuid[16], const Secret &secret, int32_t rank, int32_t size);
  ~Links();

  void join(std::vector<std::string> addresses, int32_t streams);
  // The non-blocking descriptor of a lane to a peer, connected on first use.
  Status lane(int32_t peer, int lane, int64_t deadline_ns, int *fd);
  void send_goodbye();
  void broadcast_failure(const Status &why, int32_t dead);  // to all connected ranks

  Status shape(int32_t peer, const char *file, int32_t link, double bytes_per_s, int64_t delay_us);
  const Shaper *shaper(int32_t peer) const;

  Status set_wire(int32_t peer, const Wire &wire);
  Wire wire(int32_t peer) const;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  uint64_t connections() const { return connections_.load(); }

  // For the endpoint's thread.
  void on_connected(int32_t peer, int lane, int fd);
  void control_readable(int32_t peer, int fd);
  bool has_left(int32_t peer);
  void send_heartbeats();  // a word to every peer
  std::vector<std::pair<int32_t, int>> controls();
  const uint8_t *uuid() const { return uuid_; }
  const Secret &secret() const { return secret_; }
  bool may_dial(int32_t peer, int lane) const;  // whether `peer` is a rank that dials this one on such a lane
  ControlMessage failure_message() const;  // the state of the group, for peers that ask

 private:
  struct Peer {
    std::map<int, int> fds;
    bool left = false;
    std::string inbox;
    std::recursive_mutex dialling;  // one thread dials a peer at a time
  };
  Status dial(int32_t peer, int lane, int64_t deadline_ns, int *fd);
  int connect(int32_t peer, int lane, int64_t connect_by_ns, int64_t welcome_by_ns, int *fd);
  int shake_hands(int fd, int32_t peer, int lane, int64_t deadline_ns);
  int receive(int fd, void *data, size_t bytes, int64_t deadline_ns) const;
  Status probe(int32_t peer);
  Status another_secret(int32_t peer) const;
  bool is_valid(const ControlMessage &message) const;
  void on_socket_error(int32_t peer, int error);
  void on_peer_lost(int32_t peer, int32_t code, const std::string &how);

  GroupState *group_state_;
  uint8_t uuid_[16];
  Secret secret_;
  int32_t rank_, size_;
  Wire wire_;                        // to most peers
  std::map<int32_t, Wire> wires_;    // to those of other tiers
  std::vector<std::string> addresses_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int32_t, Peer> peers_;
  std::map<int32_t, Shaper> shapers_;
  std::map<std::string, void *> shaper_files_;
  std::atomic<uint64_t> connections_{0};
  std::atomic<bool> closing_{false};
};

}  // namespace lakh
#endif
