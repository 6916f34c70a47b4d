// The listening socket of a process, and its thread that accepts, reads control connections and sends heartbeats.
//
// A connection starts with a Hello: group, rank and lane. A connection to a group that is not open yet is parked for a minute;
// one to a group that has ended gets the reason.
#ifndef LAKH_ENDPOINT_H
#define LAKH_ENDPOINT_H

#include <cstdint>

#include "links.h"

namespace lakh {

constexpr uint32_t kHelloMagic = 0x6c633302;
constexpr int32_t kStatusQuery = -1;  // instead of a lane: asks for the state of the group

struct Hello {
  uint32_t magic;
  int32_t lane, from, to;
  uint8_t uuid[16];
};

namespace endpoint {

// For every connection: no delay, non-blocking. A control connection also ends after 1.5 s without acknowledgements. A data
// connection does not, because the full window of a busy peer looks the same to the kernel.
void set_options(int fd, int lane);

int32_t listen(const char *address);         // the process's port, 0 on failure; only the first call has an effect
void add(Links *links);                      // accepts its connections from now on
void remove(Links *links, const ControlMessage &why);  // later connections to it get the reason
// Reads a control connection until its group is removed or the peer has left.
void watch(Links *links, int32_t peer, int fd);

}  // namespace endpoint
}  // namespace lakh
#endif
