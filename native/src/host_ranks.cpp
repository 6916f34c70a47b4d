#include "host_ranks.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#define PR_SET_PTRACER_ANY ((unsigned long)-1)
#endif

namespace lakh {
namespace {

constexpr uint64_t kMagic = 0x6c616b682d633302;  // "lakh-c3", layout 2
constexpr int64_t kSpinNs = 20000;               // about the cost of a futex sleep and wake-up
constexpr int64_t kTickNs = 50000000;            // how often a waiting rank checks that the others are alive
constexpr int64_t kMoveEveryNs = 1000000;       // how often a rank may move to another core
constexpr int64_t kYieldNs = 500000;             // with more ranks than cores: yield to the others before sleeping
constexpr int64_t kLookNs = 20000;               // how long a rank polls before it yields its core
static_assert(sizeof(Control) <= 4096, "the control block is one page");

// Segments created by ranks of this process. Ranks that are threads of one process share a mapping, which exists as long
// as any of them.
struct Shared {
  std::mutex mutex;
  std::map<char *, std::pair<Mapping, int>> segments;
};

Shared &shared() {
  static Shared *instance = new Shared;
  return *instance;
}

void add_user(const Mapping &mapping) {
  const std::lock_guard<std::mutex> lock(shared().mutex);
  auto &entry = shared().segments[mapping.base];
  entry.first = mapping;
  ++entry.second;
}

bool add_user(char *base) {
  const std::lock_guard<std::mutex> lock(shared().mutex);
  const auto found = shared().segments.find(base);
  if (found == shared().segments.end()) return false;
  ++found->second.second;
  return true;
}

void drop_user(char *base) {
  const std::lock_guard<std::mutex> lock(shared().mutex);
  const auto found = shared().segments.find(base);
  if (found == shared().segments.end() || --found->second.second > 0) return;
  release(&found->second.first);
  shared().segments.erase(found);
}

}  // namespace

const char *operation_name(int32_t operation) {
  static const char *const names[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                      "gather",     "scatter",    "all_to_all",     "barrier",   "schedule"};
  return operation >= 0 && operation <= LAKH_C3_SCHEDULE ? names[operation] : "an unknown operation";
}

HostRanks::~HostRanks() {
  for (Peer &peer : peers_) {
    release(&peer.mapping);
    if (peer.same_process && peer.control != nullptr) drop_user(reinterpret_cast<char *>(peer.control));
  }
  if (own_.base != nullptr) drop_user(own_.base);
}

Status HostRanks::open(const uint8_t uuid[16]) {
  Status status = create_mapping("lakh-c3", 4096 + 2 * kSlotBytes, &own_);
  if (!status.ok()) return status;
  add_user(own_);
  Control *control = new (own_.base) Control();
  control->magic = kMagic;
  std::memcpy(control->uuid, uuid, 16);
  control->nonce = process_nonce();
  control->self = reinterpret_cast<uint64_t>(control);
  control->rank = rank_;
  control->pid = ::getpid();
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (::fcntl(own_.fd, F_SETLK, &whole) != 0) {
    return fail(LAKH_C3_SYSTEM, std::string("record lock on shared memory: ") + std::strerror(errno));
  }
  return {};
}

Status HostRanks::attach(const std::vector<int32_t> &ranks, const std::vector<int32_t> &pids,
                         const std::vector<int32_t> &memories, size_t single_copy_from_bytes) {
  ranks_ = ranks;
  single_copy_from_ = std::min(single_copy_from_bytes, kSlotBytes);
  peers_ = std::vector<Peer>(ranks.size());
  sources_.resize(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    Peer &peer = peers_[i];
    if (ranks[i] == rank_) {
      me_ = static_cast<int>(i);
      peer.control = reinterpret_cast<Control *>(own_.base);
      peer.same_process = true;
      add_user(own_.base);
      continue;
    }
    Status status = open_mapping(pids[i], memories[i], &peer.mapping);
    if (!status.ok()) {
      status.text = rank_name(ranks[i]) + " is configured on this host, but its memory cannot be opened (" + status.text + ")";
      return status;
    }
    peer.control = reinterpret_cast<Control *>(peer.mapping.base);
    const Control *mine = reinterpret_cast<const Control *>(own_.base);
    if (peer.mapping.bytes != own_.bytes || peer.control->magic != kMagic || peer.control->rank != ranks[i] ||
        std::memcmp(peer.control->uuid, mine->uuid, 16) != 0) {
      return fail(LAKH_C3_SYSTEM, "the memory of " + rank_name(ranks[i]) + " belongs to another group or another version");
    }
    char *base = reinterpret_cast<char *>(peer.control->self);
    if (peer.control->nonce == process_nonce() && add_user(base)) {  // a thread of this process: the memory is shared
      peer.same_process = true;
      peer.control = reinterpret_cast<Control *>(base);
      release(&peer.mapping);
    }
  }
#if defined(__linux__)
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // required by Yama; fails elsewhere, without effect
#endif
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int cores = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  oversubscribed_ = size() > cores;
  ranks_per_core_ = (size() + cores - 1) / cores;
  spin_ns_ = oversubscribed_ ? 0 : kSpinNs;
  // Reading a peer's memory through the kernel saves a copy but costs page look-ups; on some machines it is several times
  // slower than copying twice through the cache. Measured once; used only if it is faster on all ranks.
  bool can_read = single_copy_from_bytes != SIZE_MAX;
  const bool alone = size() == 1;
  if (!alone) std::memset(own_.base + 4096, 0, 2 * kSlotBytes);
  std::vector<char> landing(alone ? 0 : kSlotBytes);
  for (int i = 0; i < size() && can_read; ++i) {
    if (peers_[i].same_process) continue;
    int64_t through_kernel = INT64_MAX, by_copy = INT64_MAX;
    for (int round = 0; round < 3 && can_read; ++round) {
      const iovec local = {landing.data(), kSlotBytes};
      const iovec remote = {reinterpret_cast<char *>(peers_[i].control->self) + 4096, kSlotBytes};
      const int64_t start = now_ns();
      can_read = ::process_vm_readv(peers_[i].control->pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(kSlotBytes);
      const int64_t middle = now_ns();
      std::memcpy(landing.data(), reinterpret_cast<char *>(peers_[i].control) + 4096, kSlotBytes);
      through_kernel = std::min(through_kernel, middle - start);
      by_copy = std::min(by_copy, now_ns() - middle);
    }
    can_read = can_read && through_kernel < 2 * by_copy;
  }
  peers_[me_].control->can_read.store(can_read ? 1 : 0, std::memory_order_release);
  return {};
}

void HostRanks::leave() {
  if (own_.base == nullptr) return;
  Control *control = reinterpret_cast<Control *>(own_.base);
  uint32_t at_work = 0;
  control->state.compare_exchange_strong(at_work, 1);
  futex_wake_all(&control->progress);
}

void HostRanks::publish_failure(const Status &why, int32_t dead) {
  if (own_.base == nullptr) return;
  Control *control = reinterpret_cast<Control *>(own_.base);
  control->failure_code = why.code;
  control->failure_dead = dead;
  std::strncpy(control->failure, why.text.c_str(), sizeof control->failure - 1);
  control->state.store(2, std::memory_order_release);
  futex_wake_all(&control->progress);
}

// --- synchronisation ----------------------------------------------------------------------------------------------

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
    if (peer->state.load() != 0 || now_ns() - slept_at >= kTickNs / 2 || group_state_->ended()) status = check_peers(index);
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

// --- access to data -----------------------------------------------------------------------------------------------

bool HostRanks::all_registered() const {
  for (int i = 0; i < size(); ++i) {
    if (announced(i).registered_fd < 0 && !(peers_[i].same_process && i != me_)) return false;
  }
  return true;
}

bool HostRanks::all_can_read() const {
  for (int i = 0; i < size(); ++i) {
    if (peers_[i].control->can_read.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

char *HostRanks::local_address(int index) const {
  const Announcement &theirs = announced(index);
  if (peers_[index].same_process) return reinterpret_cast<char *>(theirs.address);
  if (theirs.registered_fd < 0) return nullptr;
  const Registered where = {theirs.registered_fd, theirs.registered_offset, theirs.registered_serial};
  return map_registered(peers_[index].control->pid, peers_[index].control->nonce, where, theirs.input_bytes);
}

Status HostRanks::read(int index, uint64_t begin, uint64_t bytes, char *to) {
  if (bytes == 0) return {};
  const char *base = announced(index).in_slot ? slot(index) : local_address(index);
  if (base != nullptr) {
    if (to != base + begin) std::memmove(to, base + begin, bytes);
    return {};
  }
  uint64_t done = 0;
  while (done < bytes) {
    const uint64_t chunk = std::min<uint64_t>(bytes - done, 64 << 20);
    const iovec local = {to + done, chunk};
    const iovec remote = {reinterpret_cast<void *>(announced(index).address + begin + done), chunk};
    const ssize_t got = ::process_vm_readv(peers_[index].control->pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      const int error = errno;
      const Status status = check_peers(index);
      if (!status.ok()) return status;
      return group_state_->end(fail(error == ESRCH ? LAKH_C3_DIED : LAKH_C3_SYSTEM,
                             std::string(what_) + ": reading the memory of " + rank_name(ranks_[index]) + ": " +
                                 std::strerror(error)), error == ESRCH ? ranks_[index] : -1);
    }
    done += static_cast<uint64_t>(got);
  }
  single_copy_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return {};
}

}  // namespace lakh
