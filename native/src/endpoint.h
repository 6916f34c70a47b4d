// The listening sockets of a process, and its thread that accepts, reads control connections and sends heartbeats.
//
// A connection starts with the handshake of handshake.h. One to a group that is not open yet is parked for a minute; one to a
// group that has ended gets the reason. Strangers cost at most a quarter of the process's descriptors: when there are too
// many unfinished or parked connections, the oldest is closed, and a peer dials again.
#ifndef LAKH_ENDPOINT_H
#define LAKH_ENDPOINT_H

#include <cstdint>

#include "handshake.h"
#include "links.h"

namespace lakh {

namespace endpoint {

// For every connection: no delay, non-blocking. A control connection also ends after 1.5 s without acknowledgements. A data
// connection does not, because the full window of a busy peer looks the same to the kernel.
void set_options(int fd, int lane);

int32_t listen(const char *address);         // the port of the listener on this address, 0 on failure
void add(Links *links);                      // accepts its connections from now on
void remove(Links *links, const ControlMessage &why);  // later connections to it get the reason
// Reads a control connection until its group is removed or the peer has left.
void watch(Links *links, int32_t peer, int fd);

}  // namespace endpoint
}  // namespace lakh
#endif
