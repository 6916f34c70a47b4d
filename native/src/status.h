// How native code says no: a status, and a sentence kept for the calling thread.
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

inline Status fail(int32_t code, std::string text) { return Status{code, std::move(text)}; }

}  // namespace lakh
#endif
