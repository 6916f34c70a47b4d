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
constexpr int64_t kSpinNs = 20000;               // about the price of a futex sleep and wake-up
constexpr int64_t kTickNs = 50000000;            // how often a waiting rank asks whether the others live
constexpr int64_t kSpreadEveryNs = 1000000;       // how often a rank may move to another core
constexpr int64_t kYieldNs = 500000;             // with more ranks than cores: let the others run before going to sleep
constexpr int64_t kLookNs = 20000;               // how long a rank looks at others' cores before it offers its own
static_assert(sizeof(Control) <= 4096, "the control block is one page");

// Segments that ranks of this process made. Ranks that are threads of one process use one mapping, which stays as long as
// any of them does.
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
      status.text = rank_name(ranks[i]) + " says it is on this host, but its memory cannot be opened (" + status.text + ")";
      return status;
    }
    peer.control = reinterpret_cast<Control *>(peer.mapping.base);
    const Control *mine = reinterpret_cast<const Control *>(own_.base);
    if (peer.mapping.bytes != own_.bytes || peer.control->magic != kMagic || peer.control->rank != ranks[i] ||
        std::memcmp(peer.control->uuid, mine->uuid, 16) != 0) {
      return fail(LAKH_C3_SYSTEM, "the memory of " + rank_name(ranks[i]) + " is not of this group or not of this version");
    }
    char *base = reinterpret_cast<char *>(peer.control->self);
    if (peer.control->nonce == process_nonce() && add_user(base)) {  // a thread of ours: its memory is our memory
      peer.same_process = true;
      peer.control = reinterpret_cast<Control *>(base);
      release(&peer.mapping);
    }
  }
#if defined(__linux__)
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // where Yama asks for it; refused elsewhere, which is fine
#endif
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int cores = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  crowded_ = size() > cores;
  fair_share_ = (size() + cores - 1) / cores;
  spin_ns_ = crowded_ ? 0 : kSpinNs;
  // Reading a peer's memory through the kernel saves a copy and costs page look-ups; on some machines it is several times
  // slower than copying twice through the cache. Tried once; everybody must find it worth while.
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

void HostRanks::give_up(const Status &why, int32_t dead) {
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
  if (crowded_) mine->cpu.store(::sched_getcpu(), std::memory_order_relaxed);
  mine->progress.store(seq_ * 4 + phase);
  if (mine->waiters.load() != 0) futex_wake_all(&mine->progress);
}

Status HostRanks::wait_all(uint32_t phase) {
  const uint32_t target = seq_ * 4 + phase;
  if (crowded_) give_way(target);
  for (int k = 1; k < size(); ++k) {
    const Status status = wait_for((me_ + k) % size(), target);
    if (!status.ok()) return status;
  }
  return {};
}

// More ranks than cores: who is late may be waiting for our core, and then it gets it at once; who runs on another core
// is worth a look. Switches to another process are what such an operation costs, and this makes the fewest. Going to
// sleep instead costs a wake-up, and the kernel, which then sees idle ranks, piles them on one core.
void HostRanks::give_way(uint32_t target) {
  const int64_t start = now_ns();
  int64_t now = start, offered = start;
  do {
    const int here = ::sched_getcpu();
    bool late = false;
    int before = 0, beside = 0;  // ranks on our core: those with lower numbers, and those that are late
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
    if (before >= fair_share_ && now - spread_at_ > kSpreadEveryNs) {
      spread_at_ = now;
      spread(here, before);
      continue;
    }
    if (beside > 0 || now - offered > kLookNs) {  // the late may also have been moved here since they last said where
      ::sched_yield();
      offered = now;
    } else {
      for (int i = 0; i < 32; ++i) pause_core();
    }
  } while ((now = now_ns()) - start < kYieldNs);
}

// Ranks that take turns every few microseconds always look too hot to move, and the kernel can leave all of them on one
// core for seconds while another idles. Those on a core that holds more than its share step over to the emptiest ones, each
// to another where there are several; they are not bound there. `before`: ranks on our core that have the right to stay.
void HostRanks::spread(int here, int before) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  std::vector<std::pair<int, int>> holds;  // ranks, core
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    int ranks = 0;
    for (int i = 0; i < size(); ++i) ranks += (i == me_ ? here : peers_[i].control->cpu.load(std::memory_order_relaxed)) == core ? 1 : 0;
    if (core != here && ranks < fair_share_) holds.emplace_back(ranks, core);
  }
  if (holds.empty()) return;
  std::sort(holds.begin(), holds.end());
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(holds[static_cast<size_t>(before - fair_share_) % holds.size()].second, &there);
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
    if (peer->state.load() != 0 || now_ns() - slept_at >= kTickNs / 2 || fate_->over()) status = look_around(index);
    if (!status.ok()) break;
  }
  peer->waiters.fetch_sub(1);
  waited_us[static_cast<size_t>(ranks_[index])].fetch_add(static_cast<uint64_t>((now_ns() - start) / 1000),
                                                          std::memory_order_relaxed);
  return status;
}

// Asked only by a rank that has waited for a while: does everybody live, has nobody given up, is there time left?
Status HostRanks::look_around(int index) {
  if (fate_->over()) return fate_->status();
  const std::string where = std::string(what_) + ": ";
  for (int i = 0; i < size(); ++i) {
    if (i == me_) continue;
    Control *peer = peers_[i].control;
    const uint32_t state = peer->state.load();
    if (state == 2) {
      return fate_->end(fail(peer->failure_code, std::string(peer->failure)), peer->failure_dead);
    }
    if (state == 1 && i == index) {
      // It may have reached our target before it left.
      return fate_->end(fail(LAKH_C3_LOST, where + rank_name(ranks_[i]) + " has left the group"), ranks_[i]);
    }
    if (peers_[i].same_process || state == 1) continue;
    struct flock whole {};
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (::fcntl(peers_[i].mapping.fd, F_GETLK, &whole) == 0 && whole.l_type == F_UNLCK) {
      return fate_->end(fail(LAKH_C3_LOST, where + rank_name(ranks_[i]) + " on this host died"), ranks_[i]);
    }
  }
  if (now_ns() > deadline_) {
    std::string late;
    for (int i = 0; i < size(); ++i) {
      if (static_cast<int32_t>(peers_[i].control->progress.load() - peers_[me_].control->progress.load()) < 0) {
        late += (late.empty() ? "" : ", ") + std::to_string(ranks_[i]);
      }
    }
    return fate_->end(fail(LAKH_C3_TIMEOUT, where + "timed out waiting for rank(s) " + late + ", which are alive"), -1);
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

// Says what we are about to do, waits until everybody has, and checks that it is the same thing.
Status HostRanks::announce(const Announcement &mine, int64_t deadline_ns, const char *what) {
  say(mine, deadline_ns, what);
  return hear(mine);
}

void HostRanks::say(const Announcement &mine, int64_t deadline_ns, const char *what) {
  deadline_ = deadline_ns;
  what_ = what;
  peers_[me_].control->announcements[seq_ & 1] = mine;
  advance(1);
}

Status HostRanks::hear(const Announcement &mine) {
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

// The same sentence on every rank, since all see the same announcements. Nothing was done; the group goes on.
Status HostRanks::disagreement() {
  static const char *const types[] = {"f32", "f64", "f16", "bf16", "i32", "i64", "u8", "i8"};
  static const char *const ops[] = {"sum", "avg", "min", "max", "prod"};
  std::map<std::string, std::string> who;
  for (int i = 0; i < size(); ++i) {
    const Announcement &a = announced(i);
    std::string said = std::string(operation_name(a.operation));
    if (a.operation != LAKH_C3_BARRIER) {
      said += std::string(" of ") + std::to_string(a.count) + " " + (a.dtype >= 0 && a.dtype < 8 ? types[a.dtype] : "?");
      if (a.op >= 0 && a.op < 5) said += std::string(", ") + ops[a.op];
      if (a.root >= 0) said += ", root " + std::to_string(a.root);
    }
    std::string &list = who[said];
    list += (list.empty() ? "" : ", ") + std::to_string(ranks_[i]);
  }
  std::string text = "the ranks do not agree: ";
  bool first = true;
  for (const auto &[said, list] : who) {
    text += (first ? "rank(s) " : "; rank(s) ") + list + " call " + said;
    first = false;
  }
  advance(3);
  const Status status = wait_all(3);  // nobody may reuse an announcement that another still reads
  ++seq_;
  return status.ok() ? fail(LAKH_C3_INVALID, text) : status;
}

// --- reaching the data --------------------------------------------------------------------------------------------

bool HostRanks::everyone_registered() const {
  for (int i = 0; i < size(); ++i) {
    if (announced(i).registered_fd < 0 && !(peers_[i].same_process && i != me_)) return false;
  }
  return true;
}

bool HostRanks::everyone_reads() const {
  for (int i = 0; i < size(); ++i) {
    if (peers_[i].control->can_read.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

char *HostRanks::reachable(int index) const {
  const Announcement &theirs = announced(index);
  if (peers_[index].same_process) return reinterpret_cast<char *>(theirs.address);
  if (theirs.registered_fd < 0) return nullptr;
  const Registered where = {theirs.registered_fd, theirs.registered_offset, theirs.registered_serial};
  return map_registered(peers_[index].control->pid, peers_[index].control->nonce, where, theirs.input_bytes);
}

Status HostRanks::read(int index, uint64_t begin, uint64_t bytes, char *to) {
  if (bytes == 0) return {};
  const char *base = announced(index).in_slot ? slot(index) : reachable(index);
  if (base != nullptr) {
    if (to != base + begin) std::memmove(to, base + begin, bytes);
    return {};
  }
  uint64_t done = 0;
  while (done < bytes) {
    const uint64_t want = std::min<uint64_t>(bytes - done, 64 << 20);
    const iovec local = {to + done, want};
    const iovec remote = {reinterpret_cast<void *>(announced(index).address + begin + done), want};
    const ssize_t got = ::process_vm_readv(peers_[index].control->pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      const int error = errno;
      const Status status = look_around(index);
      if (!status.ok()) return status;
      return fate_->end(fail(error == ESRCH ? LAKH_C3_LOST : LAKH_C3_SYSTEM,
                             std::string(what_) + ": reading the memory of " + rank_name(ranks_[index]) + ": " +
                                 std::strerror(error)), error == ESRCH ? ranks_[index] : -1);
    }
    done += static_cast<uint64_t>(got);
  }
  single_copy_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return {};
}

}  // namespace lakh
