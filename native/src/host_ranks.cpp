#include "host_ranks.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <utility>

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

namespace lakh {
namespace {

constexpr uint64_t kMagic = 0x6c616b682d633302;  // "lakh-c3", layout 2
constexpr int64_t kSpinNs = 20000;               // about the cost of a futex sleep and wake-up
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

int32_t parent_of(int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 0;
  const size_t name_end = text.rfind(')');  // the name may contain spaces
  int parent = 0;
  return name_end != std::string::npos && std::sscanf(text.c_str() + name_end + 1, " %*c %d", &parent) == 1 ? parent : 0;
}

// Where Yama restricts process_vm_readv, allows it to the common parent of the ranks, the launcher, and its descendants.
// Ranks without a common parent copy through the slots there.
void allow_reads(const std::vector<int32_t> &pids) {
  const int32_t parent = ::getppid();
  for (const int32_t pid : pids) {
    if (pid != ::getpid() && parent_of(pid) != parent) return;
  }
  if (parent > 1) ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(parent), 0, 0, 0);  // fails without Yama, without effect
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
  allow_reads(pids);
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
