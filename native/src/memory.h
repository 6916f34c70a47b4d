// Anonymous shared memory: a memfd that peers of the same host open through /proc/<pid>/fd.
//
// Nothing is written to /dev/shm, so a killed process leaves nothing there: the kernel frees the pages with the last
// mapping. Registered memory (tensors that all ranks of a host can access) works the same way.
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
Status open_mapping(int32_t pid, int32_t fd, Mapping *mapping);  // read and write, in the size of the file
void release(Mapping *mapping);

// A number that identifies this process, also across fork.
uint64_t process_nonce();

struct Registered {  // position of an address in registered memory; fd < 0: not registered
  int32_t fd = -1;
  uint64_t offset = 0;
  uint64_t serial = 0;  // descriptors are reused, serials are not
};

void *allocate_registered(size_t bytes);
void free_registered(void *memory);
Registered find_registered(const void *address, size_t bytes);

// A peer's registered memory, mapped once and cached. NULL if it cannot be opened.
char *map_registered(int32_t pid, uint64_t nonce, const Registered &where, size_t bytes);

}  // namespace lakh
#endif
