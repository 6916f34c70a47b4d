// Synchronisation of the ranks of one host: progress, waiting, liveness checks and announcements of operations.
#include <fcntl.h>
#include <sched.h>

#include <algorithm>
#include <map>
#include <utility>

#include "host_ranks.h"

namespace lakh {
namespace {

constexpr int64_t kTickNs = 50000000;            // how often a waiting rank checks that the others are alive
constexpr int64_t kMoveEveryNs = 1000000;       // how often a rank may move to another core
constexpr int64_t kYieldNs = 500000;             // with more ranks than cores: yield to the others before sleeping
constexpr int64_t kLookNs = 20000;               // how long a rank polls before it yields its core

}  // namespace

void HostRanks::advance(uint32_t phase) {
  Control *mine = peers_[me_].control;
  if (oversubscribed_) mine->cpu.store(::sched_getcpu(), std::memory_order_relaxed);
  mine->progress.store(seq_ * 4 + phase);
  if (mine->waiters.load() != 0) futex_wake_all(&mine->progress);
}

Status HostRanks::wait_all(uint32_t phase) {
  const uint32_t target = seq_ * 4 + phase;
  if (oversubscribed_) yield_to_late_ranks(target);
  for (int k = 1; k < size(); ++k) {
    const Status status = wait_for((me_ + k) % size(), target);
    if (!status.ok()) return status;
  }
  return {};
}

// With more ranks than cores, a late rank may be waiting for this core: yield to it immediately; poll ranks on other cores.
// Process switches dominate the cost of such an operation, and this causes the fewest. Sleeping instead costs a wake-up, and
// the kernel then collects the idle ranks on one core.
void HostRanks::yield_to_late_ranks(uint32_t target) {
  const int64_t start = now_ns();
  int64_t now = start, offered = start;
  do {
    const int here = ::sched_getcpu();
    bool late = false;
    int before = 0, beside = 0;  // ranks on this core: with lower numbers, and late ones
    for (int i = 0; i < size(); ++i) {
      Control *peer = peers_[i].control;
      if (i == me_) continue;
      const bool is_here = peer->cpu.load(std::memory_order_relaxed) == here;
      before += is_here && i < me_ ? 1 : 0;
      if (static_cast<int32_t>(peer->progress.load() - target) >= 0) continue;
      late = true;
      beside += is_here ? 1 : 0;
    }
    if (!late) return;
    if (before >= ranks_per_core_ && now - moved_at_ > kMoveEveryNs) {
      moved_at_ = now;
      move_to_emptier_core(here, before);
      continue;
    }
    if (beside > 0 || now - offered > kLookNs) {  // late ranks may have moved here since their last update
      ::sched_yield();
      offered = now;
    } else {
      for (int i = 0; i < 32; ++i) pause_core();
    }
  } while ((now = now_ns()) - start < kYieldNs);
}

// Ranks that alternate every few microseconds look too hot to migrate, and the kernel can leave all of them on one core for
// seconds while another is idle. Surplus ranks of a core move to the emptiest cores, each to a different one if there are
// several; they are not pinned. `before`: ranks on this core that may stay.
void HostRanks::move_to_emptier_core(int here, int before) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  std::vector<std::pair<int, int>> holds;  // ranks, core
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    int ranks = 0;
    for (int i = 0; i < size(); ++i) ranks += (i == me_ ? here : peers_[i].control->cpu.load(std::memory_order_relaxed)) == core ? 1 : 0;
    if (core != here && ranks < ranks_per_core_) holds.emplace_back(ranks, core);
  }
  if (holds.empty()) return;
  std::sort(holds.begin(), holds.end());
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(holds[static_cast<size_t>(before - ranks_per_core_) % holds.size()].second, &there);
  ::sched_setaffinity(0, sizeof there, &there);
  ::sched_setaffinity(0, sizeof allowed, &allowed);
}

Status HostRanks::wait_for(int index, uint32_t target) {
  Control *peer = peers_[index].control;
  const auto reached = [&] { return static_cast<int32_t>(peer->progress.load() - target) >= 0; };
  if (reached()) return {};
  const int64_t start = now_ns();
  if (spin_ns_ > 0) {
    do {
      for (int i = 0; i < 32; ++i) {
        if (reached()) return {};
        pause_core();
      }
    } while (now_ns() - start < spin_ns_);
  }
  Status status;
  peer->waiters.fetch_add(1);
  while (true) {
    const uint32_t seen = peer->progress.load();
    if (static_cast<int32_t>(seen - target) >= 0) break;
    futex_waits.fetch_add(1, std::memory_order_relaxed);
    const int64_t slept_at = now_ns();
    futex_wait(&peer->progress, seen, std::min(kTickNs, std::max<int64_t>(deadline_ - slept_at, 1000)));
    if (reached()) break;
    const int64_t woke_at = now_ns();  // the last sleep before the deadline may be short
    if (peer->state.load() != 0 || woke_at - slept_at >= kTickNs / 2 || woke_at > deadline_ || group_state_->ended()) status = check_peers(index);
    if (!status.ok()) break;
  }
  peer->waiters.fetch_sub(1);
  waited_us[static_cast<size_t>(ranks_[index])].fetch_add(static_cast<uint64_t>((now_ns() - start) / 1000),
                                                          std::memory_order_relaxed);
  return status;
}

// Called after a rank has waited for a while: checks that all peers are alive and running, and the deadline.
Status HostRanks::check_peers(int index) {
  if (group_state_->ended()) return group_state_->status();
  const std::string where = std::string(what_) + ": ";
  for (int i = 0; i < size(); ++i) {
    if (i == me_) continue;
    Control *peer = peers_[i].control;
    const uint32_t state = peer->state.load();
    if (state == 2) {
      return group_state_->end(fail(peer->failure_code, std::string(peer->failure)), peer->failure_dead);
    }
    if (state == 1 && i == index) {
      // It may have reached the target before it left.
      return group_state_->end(fail(LAKH_C3_LEFT, where + rank_name(ranks_[i]) + " has left the group"), ranks_[i]);
    }
    if (peers_[i].same_process || state == 1) continue;
    struct flock whole {};
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (::fcntl(peers_[i].mapping.fd, F_GETLK, &whole) == 0 && whole.l_type == F_UNLCK) {
      return group_state_->end(fail(LAKH_C3_DIED, where + rank_name(ranks_[i]) + " on this host died"), ranks_[i]);
    }
  }
  if (now_ns() > deadline_) {
    std::string late;
    for (int i = 0; i < size(); ++i) {
      if (static_cast<int32_t>(peers_[i].control->progress.load() - peers_[me_].control->progress.load()) < 0) {
        late += (late.empty() ? "" : ", ") + std::to_string(ranks_[i]);
      }
    }
    return group_state_->end(fail(LAKH_C3_TIMEOUT, where + "timed out waiting for rank(s) " + late + ", which are alive"), -1);
  }
  return {};
}

Announcement HostRanks::describe(int32_t operation, int32_t dtype, int32_t op, int32_t root, int64_t count,
                                 const void *input, size_t input_bytes) {
  Announcement mine{};
  mine.operation = operation;
  mine.dtype = dtype;
  mine.op = op;
  mine.root = root;
  mine.count = count;
  mine.input_bytes = input_bytes;
  mine.address = reinterpret_cast<uint64_t>(input);
  mine.registered_fd = -1;
  if (input_bytes > single_copy_from_) {
    const Registered where = find_registered(input, input_bytes);
    mine.registered_fd = where.fd;
    mine.registered_offset = where.offset;
    mine.registered_serial = where.serial;
  }
  return mine;
}

// Publishes this rank's operation, waits for those of all ranks, and checks that they are equal.
Status HostRanks::announce(const Announcement &mine, int64_t deadline_ns, const char *what) {
  publish(mine, deadline_ns, what);
  return check_announcements(mine);
}

void HostRanks::publish(const Announcement &mine, int64_t deadline_ns, const char *what) {
  deadline_ = deadline_ns;
  what_ = what;
  peers_[me_].control->announcements[seq_ & 1] = mine;
  advance(1);
}

Status HostRanks::check_announcements(const Announcement &mine) {
  Status status = wait_all(1);
  if (!status.ok()) return status;
  for (int i = 0; i < size(); ++i) {
    const Announcement &theirs = announced(i);
    if (theirs.operation != mine.operation || theirs.dtype != mine.dtype || theirs.op != mine.op ||
        theirs.root != mine.root || theirs.count != mine.count) {
      return disagreement();
    }
  }
  return {};
}

// The same text on every rank, since all see the same announcements. Nothing was executed; the group stays usable.
Status HostRanks::disagreement() {
  static const char *const types[] = {"f32", "f64", "f16", "bf16", "i32", "i64", "u8", "i8"};
  static const char *const ops[] = {"sum", "avg", "min", "max", "prod"};
  std::map<std::string, std::string> ranks_by_call;
  for (int i = 0; i < size(); ++i) {
    const Announcement &a = announced(i);
    std::string called = std::string(operation_name(a.operation));
    if (a.operation != LAKH_C3_BARRIER) {
      called += std::string(" of ") + std::to_string(a.count) + " " + (a.dtype >= 0 && a.dtype < 8 ? types[a.dtype] : "?");
      if (a.op >= 0 && a.op < 5) called += std::string(", ") + ops[a.op];
      if (a.root >= 0) called += ", root " + std::to_string(a.root);
    }
    std::string &list = ranks_by_call[called];
    list += (list.empty() ? "" : ", ") + std::to_string(ranks_[i]);
  }
  std::string text = "the ranks disagree: ";
  bool first = true;
  for (const auto &[called, list] : ranks_by_call) {
    text += (first ? "rank(s) " : "; rank(s) ") + list + " call " + called;
    first = false;
  }
  advance(3);
  const Status status = wait_all(3);  // no rank may reuse an announcement that another still reads
  ++seq_;
  return status.ok() ? fail(LAKH_C3_INVALID, text) : status;
}

}  // namespace lakh
