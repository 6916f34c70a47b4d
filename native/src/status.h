// The result of native functions: a status code and a text.
#ifndef LAKH_STATUS_H
#define LAKH_STATUS_H

#include <cstdint>
#include <string>

#include "lakh_c3.h"

namespace lakh {

struct Status {
  int32_t code = LAKH_C3_OK;
  std::string text;
  bool ok() const { return code == LAKH_C3_OK; }
};

// Whether the status blames a peer for the end of a group.
inline bool is_peer_loss(int32_t code) {
  return code == LAKH_C3_DISCONNECTED || code == LAKH_C3_DIED || code == LAKH_C3_UNREACHABLE || code == LAKH_C3_LEFT;
}

inline Status fail(int32_t code, std::string text) { return Status{code, std::move(text)}; }

}  // namespace lakh
#endif
