// Collectives among the ranks of one host, through shared memory. host_ranks.cpp: how they meet, wait and reach each
// other's data; host_reductions.cpp and host_copies.cpp: the operations.
//
// Each rank owns one segment: a progress word, an announcement of the operation it is in, and two slots of a megabyte.
// Small data travels in the slots; large data is read straight out of the peer's memory (process_vm_readv), or touched
// in place where it is registered; where the kernel forbids the first, it goes through the slots piece by piece.
//
// Synchronisations of an all_reduce: one for small data, three for large, two for registered memory. Every rank reduces
// one share in rank order, so all ranks hold the same bits.
//
// A rank that dies is noticed because the kernel drops the record lock that it held on its segment; a rank that is merely
// slow, or stopped, keeps it. Every wait ends with the operation's deadline.
#ifndef LAKH_HOST_RANKS_H
#define LAKH_HOST_RANKS_H

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "clock.h"
#include "fate.h"
#include "memory.h"

namespace lakh {

constexpr size_t kSlotBytes = 1 << 20;
constexpr size_t kTinyBytes = 8 << 10;  // up to here every rank reduces everything: one synchronisation

struct Announcement {
  int32_t operation, dtype, op, root;
  int64_t count;
  uint64_t input_bytes;
  uint64_t address;
  int32_t registered_fd;
  int32_t in_slot;  // the data lies in the slot of this operation
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
  std::atomic<int32_t> cpu;  // where its owner ran when it last made progress; kept where ranks outnumber cores
  alignas(64) std::atomic<uint32_t> state;  // 0 at work, 1 left in order, 2 gave up
  std::atomic<uint32_t> can_read;           // 1 after this rank has read every peer's memory directly
  int32_t failure_code, failure_dead;
  char failure[320];
  alignas(64) Announcement announcements[2];
};

// An interval of a peer's input and where it goes.
struct Want {
  uint64_t begin, bytes;
  char *to;
};

class HostRanks {
 public:
  HostRanks(Fate *fate, int32_t rank) : fate_(fate), rank_(rank) {}
  ~HostRanks();

  Status open(const uint8_t uuid[16]);  // make our own segment
  int32_t memory() const { return own_.fd; }
  // Meet the other ranks of the host. `ranks` are global and ascending, and hold our own.
  Status attach(const std::vector<int32_t> &ranks, const std::vector<int32_t> &pids,
                const std::vector<int32_t> &memories, size_t single_copy_from_bytes);
  void leave();
  void give_up(const Status &why, int32_t dead);

  int size() const { return static_cast<int>(ranks_.size()); }
  int index() const { return me_; }

  Status run(const lakh_c3_call &call, int64_t deadline_ns);
  // Parts of an all_reduce, for schedules that go on between hosts. In place; share i is [n*i/P, n*(i+1)/P).
  Status reduce_shares(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns);
  Status gather_shares(int32_t dtype, char *data, int64_t count, int64_t deadline_ns);
  Status broadcast(char *data, int64_t bytes, int root_index, int64_t deadline_ns);

  std::vector<std::atomic<uint64_t>> waited_us;  // per global rank; sized by the group
  std::atomic<uint64_t> futex_waits{0}, single_copy_bytes{0};

 private:
  struct Peer {
    Mapping mapping;  // of another process; empty for ourselves and for ranks of this process
    Control *control = nullptr;
    bool same_process = false;
  };
  using Wants = std::function<Status(int index, const Announcement &, std::vector<Want> *)>;

  char *slot(int index) const { return reinterpret_cast<char *>(peers_[index].control) + 4096 + (seq_ & 1) * kSlotBytes; }
  const Announcement &announced(int index) const { return peers_[index].control->announcements[seq_ & 1]; }

  Status announce(const Announcement &mine, int64_t deadline_ns, const char *what);  // say, then hear
  void say(const Announcement &mine, int64_t deadline_ns, const char *what);
  Status hear(const Announcement &mine);
  void advance(uint32_t phase);
  Status wait_all(uint32_t phase);
  void give_way(uint32_t target);
  void spread(int here, int before);
  Status wait_for(int index, uint32_t target);
  Status look_around(int index);
  Status disagreement();
  Announcement describe(int32_t operation, int32_t dtype, int32_t op, int32_t root, int64_t count, const void *input,
                        size_t input_bytes);
  bool everyone_registered() const;
  bool everyone_reads() const;
  Status read(int index, uint64_t begin, uint64_t bytes, char *to);
  char *reachable(int index) const;  // the peer's input as an address of ours, or NULL

  Status copy(Announcement mine, const char *input, const Wants &wants, int64_t deadline_ns, const char *what);
  Status all_reduce(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns);
  Status all_reduce_in_slots(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns);
  Status reduce_scatter(const lakh_c3_call &call, int64_t deadline_ns);
  Status reduce(const lakh_c3_call &call, int64_t deadline_ns);
  Status fold_direct(int32_t dtype, int32_t op, uint64_t begin_bytes, size_t count, char *to);
  int64_t share(int64_t count, int index) const { return count * index / size(); }

  Fate *fate_;
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
  bool crowded_ = false;  // more ranks than cores
  int fair_share_ = 1;    // ranks on a core where all cores hold equally many
  int64_t spread_at_ = 0;
  int64_t deadline_ = 0;
  const char *what_ = "";
};

const char *operation_name(int32_t operation);
inline std::string rank_name(int32_t rank) { return "rank " + std::to_string(rank); }

}  // namespace lakh
#endif
