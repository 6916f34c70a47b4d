// A process's one listening socket, and the one thread that accepts, listens to control connections and beats.
//
// Whoever connects first says a Hello: which group, which rank, which lane. A connection whose group is not open here yet is
// parked for a minute; one that asks for a group which is no longer here is told what became of it.
#ifndef LAKH_ENDPOINT_H
#define LAKH_ENDPOINT_H

#include <cstdint>

#include "links.h"

namespace lakh {

constexpr uint32_t kHelloMagic = 0x6c633302;
constexpr int32_t kQuestion = -1;  // in place of a lane: what has become of this group?

struct Hello {
  uint32_t magic;
  int32_t lane, from, to;
  uint8_t uuid[16];
};

namespace endpoint {

// Of every connection: no delay, no blocking. A control connection also ends after 1.5 s without acknowledgements; one that
// carries data must not, since a peer that is busy and does not read looks the same to the kernel once its window is full.
void set_options(int fd, int lane);

int32_t listen(const char *address);         // the process's port, 0 on failure; only the first call of a process counts
void add(Links *links);                      // its connections arrive from now on
void remove(Links *links, const Word &why);  // and whoever asks for it later is told why
// A control connection: its words, and its end, are heard from now on, until its group is removed or the peer has left.
void watch(Links *links, int32_t peer, int fd);

}  // namespace endpoint
}  // namespace lakh
#endif
