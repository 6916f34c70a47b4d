#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "clock.h"

namespace lakh {
namespace {

constexpr size_t kPeerMappings = 1024;

struct Registry {
  std::mutex mutex;
  uint64_t next_serial = 1;
  struct Own {
    Mapping mapping;
    uint64_t serial;
  };
  std::map<const char *, Own> own;                                       // by base address
  struct Peers {
    Mapping mapping;
    uint64_t used;
  };
  std::map<std::tuple<int32_t, uint64_t, uint64_t>, Peers> of_peers;  // by pid, nonce, serial
  uint64_t uses = 0;
};

Registry &registry() {
  static Registry *instance = new Registry;  // never destroyed: threads may outlive static destructors
  return *instance;
}

// Without offset + bytes, which a peer's numbers can make wrap around.
bool fits(size_t offset, size_t bytes, const Mapping &mapping) { return bytes <= mapping.bytes && offset <= mapping.bytes - bytes; }

}  // namespace

Status create_mapping(const char *label, size_t bytes, Mapping *mapping) {
  const int fd = static_cast<int>(::memfd_create(label, MFD_CLOEXEC));
  if (fd < 0) return fail(LAKH_C3_SYSTEM, std::string("memfd_create: ") + std::strerror(errno));
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    ::close(fd);
    return fail(LAKH_C3_SYSTEM, std::string("ftruncate of shared memory: ") + std::strerror(error));
  }
  void *base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    return fail(LAKH_C3_SYSTEM, std::string("mmap of shared memory: ") + std::strerror(error));
  }
  *mapping = Mapping{static_cast<char *>(base), bytes, fd};
  return {};
}

Status open_mapping(int32_t pid, int32_t fd, Mapping *mapping) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  const int opened = ::open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return fail(LAKH_C3_SYSTEM, std::string("open ") + path + ": " + std::strerror(errno));
  struct stat info {};
  void *base = MAP_FAILED;
  if (::fstat(opened, &info) == 0 && info.st_size > 0) {
    base = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
  }
  if (base == MAP_FAILED) {
    const int error = errno;
    ::close(opened);
    return fail(LAKH_C3_SYSTEM, std::string("mmap ") + path + ": " + std::strerror(error));
  }
  *mapping = Mapping{static_cast<char *>(base), static_cast<size_t>(info.st_size), opened};
  return {};
}

void release(Mapping *mapping) {
  if (mapping->base != nullptr) ::munmap(mapping->base, mapping->bytes);
  if (mapping->fd >= 0) ::close(mapping->fd);
  *mapping = Mapping{};
}

uint64_t process_nonce() {
  static std::mutex mutex;
  static pid_t owner = 0;
  static uint64_t nonce = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != ::getpid()) {
    owner = ::getpid();
    if (::getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) {
      nonce = static_cast<uint64_t>(now_ns()) ^ (static_cast<uint64_t>(owner) << 32);
    }
    nonce |= 1;  // never zero
  }
  return nonce;
}

void *allocate_registered(size_t bytes) {
  Mapping mapping;
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t rounded = (bytes + page - 1) / page * page;
  if (!create_mapping("lakh-c3-registered", rounded > 0 ? rounded : page, &mapping).ok()) return nullptr;
  Registry &all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.own[mapping.base] = Registry::Own{mapping, all.next_serial++};
  return mapping.base;
}

void free_registered(void *memory) {
  Registry &all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.own.find(static_cast<const char *>(memory));
  if (found == all.own.end()) return;
  release(&found->second.mapping);
  all.own.erase(found);
}

Registered find_registered(const void *address, size_t bytes) {
  Registry &all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const char *at = static_cast<const char *>(address);
  auto after = all.own.upper_bound(at);
  if (after == all.own.begin()) return {};
  const auto &candidate = std::prev(after)->second;
  const size_t offset = static_cast<size_t>(at - candidate.mapping.base);
  if (!fits(offset, bytes, candidate.mapping)) return {};
  return Registered{candidate.mapping.fd, offset, candidate.serial};
}

char *map_registered(int32_t pid, uint64_t nonce, const Registered &where, size_t bytes) {
  Registry &all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto key = std::make_tuple(pid, nonce, where.serial);
  auto found = all.of_peers.find(key);
  if (found == all.of_peers.end()) {
    Mapping mapping;
    if (!open_mapping(pid, where.fd, &mapping).ok()) return nullptr;
    if (all.of_peers.size() >= kPeerMappings) {  // a peer that keeps allocating must not fill our address space
      auto oldest = all.of_peers.begin();
      for (auto it = all.of_peers.begin(); it != all.of_peers.end(); ++it) {
        if (it->second.used < oldest->second.used) oldest = it;
      }
      release(&oldest->second.mapping);
      all.of_peers.erase(oldest);
    }
    found = all.of_peers.emplace(key, Registry::Peers{mapping, 0}).first;
  }
  found->second.used = ++all.uses;
  if (!fits(where.offset, bytes, found->second.mapping)) return nullptr;
  return found->second.mapping.base + where.offset;
}

}  // namespace lakh
