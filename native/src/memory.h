// Shared memory without names: a memfd that peers of the same host open through /proc/<pid>/fd.
//
// Nothing is ever written to /dev/shm, so nothing can be left behind there, whoever is killed and whenever: the kernel
// frees the pages with the last mapping. Registered memory (tensors that all ranks of a host may touch) is the same.
#ifndef LAKH_MEMORY_H
#define LAKH_MEMORY_H

#include <cstddef>
#include <cstdint>

#include "status.h"

namespace lakh {

struct Mapping {
  char *base = nullptr;
  size_t bytes = 0;
  int fd = -1;
};

Status create_mapping(const char *label, size_t bytes, Mapping *mapping);
Status open_mapping(int32_t pid, int32_t fd, Mapping *mapping);  // read and write; bytes as the file has
void release(Mapping *mapping);

// A number that tells this process from every other one, also across fork.
uint64_t process_nonce();

struct Registered {  // where an address lies in registered memory; fd < 0: nowhere
  int32_t fd = -1;
  uint64_t offset = 0;
  uint64_t serial = 0;  // descriptors are reused, serials are not
};

void *allocate_registered(size_t bytes);
void free_registered(void *memory);
Registered find_registered(const void *address, size_t bytes);

// A peer's registered memory, mapped here once and kept. Returns NULL where it cannot be opened.
char *map_registered(int32_t pid, uint64_t nonce, const Registered &where, size_t bytes);

}  // namespace lakh
#endif
