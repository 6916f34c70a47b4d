// Collectives among the ranks of one host, through shared memory. host_ranks.cpp: attaching and access to the peers'
// data; host_sync.cpp: waiting and announcements; host_reductions.cpp and host_copies.cpp: the operations.
//
// Each rank owns one segment: a progress counter, an announcement of its current operation, and two slots of 1 MB. Small
// data is copied through the slots. Large data is read directly from the peer's memory (process_vm_readv), or accessed in
// place if it is registered; if the kernel forbids the former, it goes through the slots in chunks.
//
// Synchronisations of an all_reduce: one for small data, three for large, two for registered memory. Every rank reduces
// one part in rank order, so all ranks have identical bits.
//
// The death of a rank is detected because the kernel releases its record lock on its segment; a slow or stopped rank keeps
// it. Every wait ends at the operation's deadline.
#ifndef LAKH_HOST_RANKS_H
#define LAKH_HOST_RANKS_H

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "clock.h"
#include "group_state.h"
#include "memory.h"

namespace lakh {

constexpr size_t kSlotBytes = 1 << 20;
constexpr size_t kTinyBytes = 8 << 10;  // up to this size every rank reduces everything: one synchronisation

struct Announcement {
  int32_t operation, dtype, op, root;
  int64_t count;
  uint64_t input_bytes;
  uint64_t address;
  int32_t registered_fd;
  int32_t in_slot;  // the data is in the slot of this operation
  uint32_t piece_bytes;  // of a copy through the slots; the ranks take the largest
  uint64_t registered_offset, registered_serial;
};

struct Control {
  uint64_t magic;
  uint8_t uuid[16];
  uint64_t nonce;
  uint64_t self;  // address of this struct in its owner
  int32_t rank;
  int32_t pid;
  alignas(64) std::atomic<uint32_t> progress;  // 4 * operation + phase, wraps
  std::atomic<uint32_t> waiters;
  std::atomic<int32_t> cpu;  // core of its owner's last progress; only if ranks outnumber cores
  alignas(64) std::atomic<uint32_t> state;  // 0 running, 1 left in order, 2 failed
  std::atomic<uint32_t> can_read;           // 1 if this rank can read every peer's memory directly
  int32_t failure_code, failure_dead;
  char failure[320];
  alignas(64) Announcement announcements[2];
};

// A range of a peer's input and its destination.
struct CopyRange {
  uint64_t begin, bytes;
  char *to;
};

// What a rank sends to others: so many bytes of its input from `begin` on; after the end of the input from its start on.
struct SentPart {
  uint64_t begin, bytes;
};

class HostRanks {
 public:
  HostRanks(GroupState *group_state, int32_t rank) : group_state_(group_state), rank_(rank) {}
  ~HostRanks();

  Status open(const uint8_t uuid[16]);  // creates this rank's segment
  int32_t memory() const { return own_.fd; }
  // Attaches to the ranks of the host. `ranks` are global and ascending, and include this rank.
  Status attach(const std::vector<int32_t> &ranks, const std::vector<int32_t> &pids,
                const std::vector<int32_t> &memories, size_t single_copy_from_bytes);
  void leave();
  void publish_failure(const Status &why, int32_t dead);

  int size() const { return static_cast<int>(ranks_.size()); }
  int index() const { return me_; }

  Status run(const lakh_c3_call &call, int64_t deadline_ns);
  // Phases of an all_reduce, for schedules that continue between hosts. In place; part i is [n*i/P, n*(i+1)/P).
  Status reduce_shares(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns);
  Status gather_shares(int32_t dtype, char *data, int64_t count, int64_t deadline_ns);
  Status broadcast(char *data, int64_t bytes, int root_index, int64_t deadline_ns);

  std::vector<std::atomic<uint64_t>> waited_us;  // per global rank; sized by the group
  std::atomic<uint64_t> futex_waits{0}, single_copy_bytes{0};

 private:
  struct Peer {
    Mapping mapping;  // of another process; empty for ranks of this process
    Control *control = nullptr;
    bool same_process = false;
  };
  using RangesOf = std::function<Status(int index, const Announcement &, std::vector<CopyRange> *)>;

  char *slot(int index) const { return reinterpret_cast<char *>(peers_[index].control) + 4096 + (seq_ & 1) * kSlotBytes; }
  const Announcement &announced(int index) const { return peers_[index].control->announcements[seq_ & 1]; }

  Status announce(const Announcement &mine, int64_t deadline_ns, const char *what);  // publish, then check_announcements
  void publish(const Announcement &mine, int64_t deadline_ns, const char *what);
  Status check_announcements(const Announcement &mine);
  void advance(uint32_t phase);
  Status wait_all(uint32_t phase);
  void yield_to_late_ranks(uint32_t target);
  void move_to_emptier_core(int here, int before);
  Status wait_for(int index, uint32_t target);
  Status check_peers(int index);
  Status disagreement();
  Announcement describe(int32_t operation, int32_t dtype, int32_t op, int32_t root, int64_t count, const void *input,
                        size_t input_bytes);
  bool all_registered() const;
  bool all_can_read() const;
  Status read(int index, uint64_t begin, uint64_t bytes, char *to);
  char *local_address(int index) const;  // the peer's input in our address space, or NULL

  // `sent`: of each rank; if empty, the whole inputs. Only what goes through the slots in chunks is sent in this order.
  Status copy(Announcement mine, const char *input, const RangesOf &ranges, int64_t deadline_ns, const char *what,
              const std::vector<SentPart> &sent = {});
  Status all_reduce(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns);
  Status all_reduce_in_slots(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns);
  Status reduce_scatter(const lakh_c3_call &call, int64_t deadline_ns);
  Status reduce(const lakh_c3_call &call, int64_t deadline_ns);
  Status fold_direct(int32_t dtype, int32_t op, uint64_t begin_bytes, size_t count, char *to);
  int64_t share(int64_t count, int index) const { return count * index / size(); }

  GroupState *group_state_;
  int32_t rank_;
  int me_ = 0;
  Mapping own_;
  std::vector<int32_t> ranks_;
  std::vector<Peer> peers_;
  std::vector<char> scratch_;
  std::vector<const void *> sources_;
  size_t single_copy_from_ = 0;
  uint32_t seq_ = 0;
  int64_t spin_ns_ = 0;
  bool oversubscribed_ = false;  // more ranks than cores
  int ranks_per_core_ = 1;    // ranks per core if evenly distributed
  int64_t moved_at_ = 0;
  int64_t deadline_ = 0;
  const char *what_ = "";
};

const char *operation_name(int32_t operation);
inline std::string rank_name(int32_t rank) { return "rank " + std::to_string(rank); }

}  // namespace lakh
#endif
