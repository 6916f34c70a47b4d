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

#include "reduce.h"

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#define PR_SET_PTRACER_ANY ((unsigned long)-1)
#endif

namespace lakh {
namespace {

constexpr uint64_t kMagic = 0x6c616b682d633302;  // "lakh-c3", layout 2
constexpr int64_t kSpinNs = 20000;               // about the price of a futex sleep and wake-up
constexpr int64_t kTickNs = 50000000;            // how often a waiting rank asks whether the others live
constexpr size_t kPieceBytes = kSlotBytes;        // what goes through the slots at a time
constexpr size_t kBlockBytes = 128 << 10;        // read, then reduce, while it is in the second-level cache
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

std::string rank_name(int32_t rank) { return "rank " + std::to_string(rank); }

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
  spin_ns_ = size() <= cores ? kSpinNs : 0;
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
  mine->progress.store(seq_ * 4 + phase);
  if (mine->waiters.load() != 0) futex_wake_all(&mine->progress);
}

Status HostRanks::wait_all(uint32_t phase) {
  const uint32_t target = seq_ * 4 + phase;
  for (int k = 1; k < size(); ++k) {
    const Status status = wait_for((me_ + k) % size(), target);
    if (!status.ok()) return status;
  }
  return {};
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
Status HostRanks::announce(Announcement mine, int64_t deadline_ns, const char *what) {
  deadline_ = deadline_ns;
  what_ = what;
  peers_[me_].control->announcements[seq_ & 1] = mine;
  advance(1);
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

// Reduces [begin, ...) of everybody's input, in rank order, block by block.
Status HostRanks::fold_direct(int32_t dtype, int32_t op, uint64_t begin_bytes, size_t count, char *to) {
  const size_t width = element_bytes(dtype);
  const size_t block = kBlockBytes / width;
  const void **sources = sources_.data();
  std::vector<char *> bases(static_cast<size_t>(size()));
  for (int i = 0; i < size(); ++i) {
    bases[i] = i == me_ ? reinterpret_cast<char *>(announced(i).address)
                        : (announced(i).in_slot ? slot(i) : reachable(i));
    if (i == me_ && announced(i).in_slot) bases[i] = slot(i);
  }
  scratch_.resize(std::max(scratch_.size(), kBlockBytes * static_cast<size_t>(size())));
  for (size_t at = 0; at < count; at += block) {
    const size_t n = std::min(block, count - at);
    for (int i = 0; i < size(); ++i) {
      if (bases[i] != nullptr) {
        sources[i] = bases[i] + begin_bytes + at * width;
        continue;
      }
      char *landing = scratch_.data() + kBlockBytes * static_cast<size_t>(i);
      const Status status = read(i, begin_bytes + at * width, n * width, landing);
      if (!status.ok()) return status;
      sources[i] = landing;
    }
    void *destination = to + at * width;
    fold(dtype, op, &destination, 1, sources, size(), n, size());
  }
  return {};
}

// --- operations that copy -----------------------------------------------------------------------------------------

Status HostRanks::copy(Announcement mine, const char *input, const Wants &wants, int64_t deadline_ns,
                       const char *what) {
  mine.in_slot = mine.input_bytes <= single_copy_from_ ? 1 : 0;
  if (mine.in_slot && mine.input_bytes > 0) std::memcpy(slot(me_), input, mine.input_bytes);
  Status status = announce(mine, deadline_ns, what);
  if (!status.ok()) return status;
  bool all_in_slots = true;
  uint64_t longest = 0;
  for (int i = 0; i < size(); ++i) {
    all_in_slots = all_in_slots && announced(i).in_slot;
    longest = std::max(longest, announced(i).input_bytes);
  }
  std::vector<std::vector<Want>> wanted(static_cast<size_t>(size()));
  for (int i = 0; i < size(); ++i) {
    status = wants(i, announced(i), &wanted[i]);
    // Our own mistake alone: the peers must still not wait for us in vain.
    if (!status.ok()) return fate_->end(status, -1);
  }
  if (all_in_slots || everyone_registered() || everyone_reads()) {
    for (int k = 0; k < size(); ++k) {
      const int i = (me_ + k) % size();
      for (const Want &want : wanted[i]) {
        if (i == me_) {
          if (want.bytes > 0 && want.to != input + want.begin) std::memmove(want.to, input + want.begin, want.bytes);
          continue;
        }
        status = read(i, want.begin, want.bytes, want.to);
        if (!status.ok()) return status;
      }
    }
    if (!all_in_slots) {  // the peers may change their data again only when we have read it
      advance(3);
      status = wait_all(3);
    }
    ++seq_;
    return status;
  }
  // One piece of everybody's input after the other, through the slots. A slot is used again two pieces later, when every
  // peer has announced the piece between and so has finished reading: one synchronisation for each piece.
  for (uint64_t at = 0; at < longest; at += kPieceBytes) {
    ++seq_;
    const uint64_t mine_end = std::min<uint64_t>(at + kPieceBytes, mine.input_bytes);
    if (at < mine_end) std::memcpy(slot(me_), input + at, mine_end - at);
    mine.in_slot = 1;
    status = announce(mine, deadline_ns, what);
    if (!status.ok()) return status;
    for (int i = 0; i < size(); ++i) {
      for (const Want &want : wanted[i]) {
        const uint64_t begin = std::max(want.begin, at);
        const uint64_t end = std::min(want.begin + want.bytes, at + kPieceBytes);
        if (begin >= end) continue;
        const char *from = i == me_ ? input + begin : slot(i) + (begin - at);
        if (want.to + (begin - want.begin) != from) std::memmove(want.to + (begin - want.begin), from, end - begin);
      }
    }
  }
  ++seq_;
  return {};
}

// --- operations that reduce ---------------------------------------------------------------------------------------

Status HostRanks::all_reduce_in_slots(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns) {
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  Announcement mine = describe(LAKH_C3_ALL_REDUCE, dtype, op, -1, count, data, 0);
  mine.in_slot = 1;
  const size_t begin = static_cast<size_t>(share(count, me_)), end = static_cast<size_t>(share(count, me_ + 1));
  if (bytes <= kTinyBytes) {
    if (bytes > 0) std::memcpy(slot(me_), data, bytes);
  } else {  // nobody but us needs our own share
    std::memcpy(slot(me_), data, begin * width);
    std::memcpy(slot(me_) + end * width, data + end * width, bytes - end * width);
  }
  Status status = announce(mine, deadline_ns, "all_reduce");
  if (!status.ok()) return status;
  const void **sources = sources_.data();
  if (bytes <= kTinyBytes) {
    for (int i = 0; i < size(); ++i) sources[i] = slot(i);
    void *destination = data;
    fold(dtype, op, &destination, 1, sources, size(), static_cast<size_t>(count), size());
    ++seq_;
    return {};
  }
  for (int i = 0; i < size(); ++i) sources[i] = (i == me_ ? data : slot(i)) + begin * width;
  void *destinations[2] = {slot(me_) + begin * width, data + begin * width};
  fold(dtype, op, destinations, 2, sources, size(), end - begin, size());
  advance(2);
  for (int k = 1; k < size(); ++k) {
    const int i = (me_ + k) % size();
    status = wait_for(i, seq_ * 4 + 2);
    if (!status.ok()) return status;
    const size_t b = static_cast<size_t>(share(count, i)) * width, e = static_cast<size_t>(share(count, i + 1)) * width;
    std::memcpy(data + b, slot(i) + b, e - b);
  }
  ++seq_;
  return {};
}

Status HostRanks::all_reduce(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns) {
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  if (bytes <= single_copy_from_) return all_reduce_in_slots(dtype, op, data, count, deadline_ns);
  Status status = announce(describe(LAKH_C3_ALL_REDUCE, dtype, op, -1, count, data, bytes), deadline_ns, "all_reduce");
  if (!status.ok()) return status;
  const size_t begin = static_cast<size_t>(share(count, me_)), mine = static_cast<size_t>(share(count, me_ + 1)) - begin;
  if (everyone_registered()) {
    std::vector<void *> to(static_cast<size_t>(size()));
    for (int i = 0; i < size(); ++i) {
      char *base = i == me_ ? data : reachable(i);
      if (base == nullptr) return fate_->end(fail(LAKH_C3_SYSTEM, "registered memory of " + rank_name(ranks_[i]) + " cannot be mapped"), -1);
      to[i] = base + begin * width;
    }
    fold(dtype, op, to.data(), size(), to.data(), size(), mine, size());
    advance(3);
    status = wait_all(3);
    ++seq_;
    return status;
  }
  if (everyone_reads()) {
    status = fold_direct(dtype, op, begin * width, mine, data + begin * width);
    if (!status.ok()) return status;
    advance(2);
    for (int k = 1; k < size(); ++k) {
      const int i = (me_ + k) % size();
      status = wait_for(i, seq_ * 4 + 2);
      if (!status.ok()) return status;
      const size_t b = static_cast<size_t>(share(count, i)) * width, e = static_cast<size_t>(share(count, i + 1)) * width;
      status = read(i, b, e - b, data + b);
      if (!status.ok()) return status;
    }
    advance(3);
    status = wait_all(3);
    ++seq_;
    return status;
  }
  ++seq_;
  const int64_t piece = static_cast<int64_t>(kPieceBytes / width);
  for (int64_t at = 0; at < count; at += piece) {
    status = all_reduce_in_slots(dtype, op, data + static_cast<size_t>(at) * width, std::min(piece, count - at), deadline_ns);
    if (!status.ok()) return status;
  }
  return {};
}

Status HostRanks::reduce_scatter(const lakh_c3_call &call, int64_t deadline_ns) {
  const size_t width = element_bytes(call.dtype);
  const size_t bytes = static_cast<size_t>(call.count) * width * static_cast<size_t>(size());
  const char *input = static_cast<const char *>(call.input);
  Announcement mine = describe(LAKH_C3_REDUCE_SCATTER, call.dtype, call.op, -1, call.count, input, bytes);
  mine.in_slot = bytes <= single_copy_from_ ? 1 : 0;
  if (mine.in_slot && bytes > 0) std::memcpy(slot(me_), input, bytes);
  Status status = announce(mine, deadline_ns, "reduce_scatter");
  if (!status.ok()) return status;
  const size_t part = static_cast<size_t>(call.count) * width;
  if (mine.in_slot || everyone_registered() || everyone_reads()) {
    status = fold_direct(call.dtype, call.op, part * static_cast<size_t>(me_), static_cast<size_t>(call.count),
                         static_cast<char *>(call.output));
    if (!status.ok()) return status;
    if (!mine.in_slot) {
      advance(3);
      status = wait_all(3);
    }
    ++seq_;
    return status;
  }
  // Through the slots, a few columns of every part at a time. The output may lie inside the input, but only under our own
  // part, whose columns are read before they are written.
  const size_t columns = kPieceBytes / width / static_cast<size_t>(size());
  for (size_t at = 0; at < static_cast<size_t>(call.count); at += columns) {
    const size_t n = std::min(columns, static_cast<size_t>(call.count) - at);
    ++seq_;
    for (int i = 0; i < size(); ++i) {
      if (i != me_) std::memcpy(slot(me_) + static_cast<size_t>(i) * n * width, input + part * static_cast<size_t>(i) + at * width, n * width);
    }
    mine.in_slot = 1;
    status = announce(mine, deadline_ns, "reduce_scatter");
    if (!status.ok()) return status;
    for (int i = 0; i < size(); ++i) sources_[i] = slot(i) + static_cast<size_t>(me_) * n * width;
    sources_[me_] = input + part * static_cast<size_t>(me_) + at * width;
    void *destination = static_cast<char *>(call.output) + at * width;
    fold(call.dtype, call.op, &destination, 1, sources_.data(), size(), n, size());
  }
  ++seq_;
  return {};
}

Status HostRanks::reduce(const lakh_c3_call &call, int64_t deadline_ns) {
  const size_t width = element_bytes(call.dtype);
  const int64_t piece = static_cast<int64_t>(std::min(kSlotBytes, single_copy_from_) / width);
  const bool is_root = me_ == call.root;
  const size_t bytes = static_cast<size_t>(call.count) * width;
  const char *input = static_cast<const char *>(call.input);
  if (bytes > single_copy_from_) {
    Status status = announce(describe(LAKH_C3_REDUCE, call.dtype, call.op, call.root, call.count, input, bytes), deadline_ns, "reduce");
    if (!status.ok()) return status;
    const bool direct = everyone_registered() || everyone_reads();
    if (direct && is_root) status = fold_direct(call.dtype, call.op, 0, static_cast<size_t>(call.count), static_cast<char *>(call.output));
    if (!status.ok()) return status;
    advance(3);
    status = wait_all(3);
    ++seq_;
    if (direct || !status.ok()) return status;
  }
  for (int64_t at = 0; at < call.count; at += piece) {
    const int64_t n = std::min(piece, call.count - at);
    Announcement mine = describe(LAKH_C3_REDUCE, call.dtype, call.op, call.root, n, input, 0);
    mine.in_slot = 1;
    std::memcpy(slot(me_), input + static_cast<size_t>(at) * width, static_cast<size_t>(n) * width);
    Status status = announce(mine, deadline_ns, "reduce");
    if (!status.ok()) return status;
    if (is_root) {
      status = fold_direct(call.dtype, call.op, 0, static_cast<size_t>(n),
                           static_cast<char *>(call.output) + static_cast<size_t>(at) * width);
    }
    if (!status.ok()) return status;
    ++seq_;
  }
  return {};
}

// --- the table ----------------------------------------------------------------------------------------------------

Status HostRanks::run(const lakh_c3_call &call, int64_t deadline_ns) {
  const size_t width = call.operation == LAKH_C3_BARRIER ? 1 : element_bytes(call.dtype);
  const size_t bytes = static_cast<size_t>(call.count) * width;
  const char *input = static_cast<const char *>(call.input);
  char *output = static_cast<char *>(call.output);
  const char *what = operation_name(call.operation);
  const auto describe_copy = [&](size_t input_bytes) {
    return describe(call.operation, call.dtype, -1, call.root, call.count, input, input_bytes);
  };
  switch (call.operation) {
    case LAKH_C3_ALL_REDUCE:
      return all_reduce(call.dtype, call.op, output, call.count, deadline_ns);
    case LAKH_C3_REDUCE_SCATTER:
      return reduce_scatter(call, deadline_ns);
    case LAKH_C3_REDUCE:
      return reduce(call, deadline_ns);
    case LAKH_C3_BARRIER: {
      const Status status = announce(describe(LAKH_C3_BARRIER, 0, -1, -1, 0, nullptr, 0), deadline_ns, what);
      if (status.ok()) ++seq_;
      return status;
    }
    case LAKH_C3_ALL_GATHER:
      return copy(describe_copy(bytes), input, [&](int i, const Announcement &, std::vector<Want> *wants) {
        wants->push_back(Want{0, bytes, output + bytes * static_cast<size_t>(i)});
        return Status{};
      }, deadline_ns, what);
    case LAKH_C3_BROADCAST:
      return copy(describe(LAKH_C3_BROADCAST, call.dtype, -1, call.root, call.count, output, me_ == call.root ? bytes : 0), output,
                  [&](int i, const Announcement &, std::vector<Want> *wants) {
                    if (i == call.root && me_ != call.root) wants->push_back(Want{0, bytes, output});
                    return Status{};
                  }, deadline_ns, what);
    case LAKH_C3_GATHER:
      return copy(describe_copy(bytes), input, [&](int i, const Announcement &, std::vector<Want> *wants) {
        if (me_ == call.root) wants->push_back(Want{0, bytes, output + bytes * static_cast<size_t>(i)});
        return Status{};
      }, deadline_ns, what);
    case LAKH_C3_SCATTER:
      return copy(describe_copy(me_ == call.root ? bytes * static_cast<size_t>(size()) : 0), input,
                  [&](int i, const Announcement &, std::vector<Want> *wants) {
                    if (i == call.root) wants->push_back(Want{bytes * static_cast<size_t>(me_), bytes, output});
                    return Status{};
                  }, deadline_ns, what);
    case LAKH_C3_ALL_TO_ALL: {
      // First everybody's offsets, then the data: the offsets say where in a peer's input our part lies.
      const size_t table = (static_cast<size_t>(size()) + 1) * sizeof(int64_t);
      std::vector<int64_t> offsets(static_cast<size_t>(size() + 1) * static_cast<size_t>(size()));
      Announcement first = describe(LAKH_C3_ALL_TO_ALL, call.dtype, -1, -1, 0, call.splits, table);
      Status status = copy(first, reinterpret_cast<const char *>(call.splits),
                           [&](int i, const Announcement &, std::vector<Want> *wants) {
                             char *row = reinterpret_cast<char *>(offsets.data()) + table * static_cast<size_t>(i);
                             wants->push_back(Want{0, table, row});
                             return Status{};
                           }, deadline_ns, what);
      if (!status.ok()) return status;
      const int64_t *receive = call.splits + size() + 1;
      std::string wrong;
      for (int from = 0; from < size(); ++from) {
        const int64_t *row = offsets.data() + static_cast<size_t>(from) * static_cast<size_t>(size() + 1);
        const int64_t sent = row[me_ + 1] - row[me_], expected = receive[from + 1] - receive[from];
        if (sent != expected) {
          wrong += (wrong.empty() ? "" : "; ") + rank_name(ranks_[from]) + " sends " + std::to_string(sent) + " elements to " +
                   rank_name(rank_) + ", which expects " + std::to_string(expected);
        }
      }
      // Whether anybody is wrong must be known to all before data moves, or the right ones would wait for ever.
      int32_t bad = wrong.empty() ? 0 : 1;
      status = all_reduce_in_slots(LAKH_C3_I32, LAKH_C3_MAX, reinterpret_cast<char *>(&bad), 1, deadline_ns);
      if (!status.ok()) return status;
      if (bad) return fail(LAKH_C3_INVALID, "all_to_all: " + (wrong.empty() ? "other ranks do not agree on their splits" : wrong));
      Announcement mine = describe(LAKH_C3_ALL_TO_ALL, call.dtype, -1, -1, 1, input, static_cast<size_t>(call.splits[size()]) * width);
      return copy(mine, input, [&](int i, const Announcement &, std::vector<Want> *wants) {
        const int64_t *row = offsets.data() + static_cast<size_t>(i) * static_cast<size_t>(size() + 1);
        wants->push_back(Want{static_cast<uint64_t>(row[me_]) * width, static_cast<uint64_t>(row[me_ + 1] - row[me_]) * width,
                              output + static_cast<size_t>(receive[i]) * width});
        return Status{};
      }, deadline_ns, what);
    }
    default:
      return fail(LAKH_C3_INVALID, "no such operation");
  }
}

Status HostRanks::reduce_shares(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns) {
  // Rounds like an all_reduce without its second half; small or unreadable data takes the whole all_reduce, which is
  // right too: a share that is reduced everywhere is reduced here.
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  const int32_t plain = op == LAKH_C3_AVG ? LAKH_C3_SUM : op;  // the schedule divides once, at the end
  if (bytes <= single_copy_from_) return all_reduce_in_slots(dtype, plain, data, count, deadline_ns);
  Status status = announce(describe(LAKH_C3_SCHEDULE, dtype, plain, -1, count, data, bytes), deadline_ns, "reduce in the host");
  if (!status.ok()) return status;
  if (!everyone_reads() && !everyone_registered()) {
    advance(3);
    status = wait_all(3);
    ++seq_;
    return status.ok() ? all_reduce(dtype, plain, data, count, deadline_ns) : status;
  }
  const size_t begin = static_cast<size_t>(share(count, me_)), end = static_cast<size_t>(share(count, me_ + 1));
  status = fold_direct(dtype, plain, begin * width, end - begin, data + begin * width);
  if (!status.ok()) return status;
  advance(3);
  status = wait_all(3);
  ++seq_;
  return status;
}

Status HostRanks::gather_shares(int32_t dtype, char *data, int64_t count, int64_t deadline_ns) {
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  Announcement mine = describe(LAKH_C3_SCHEDULE, dtype, -1, -1, count, data, bytes);
  return copy(mine, data, [&](int i, const Announcement &, std::vector<Want> *wants) {
    if (i != me_) {
      const size_t b = static_cast<size_t>(share(count, i)) * width, e = static_cast<size_t>(share(count, i + 1)) * width;
      wants->push_back(Want{b, e - b, data + b});
    }
    return Status{};
  }, deadline_ns, "gather in the host");
}

Status HostRanks::broadcast(char *data, int64_t bytes, int root_index, int64_t deadline_ns) {
  lakh_c3_call call{};
  call.operation = LAKH_C3_BROADCAST;
  call.dtype = LAKH_C3_U8;
  call.root = root_index;
  call.count = bytes;
  call.output = data;
  return run(call, deadline_ns);
}

}  // namespace lakh
