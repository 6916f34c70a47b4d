// The first bytes of a connection: both ends prove that they have the secret of the group, without sending it.
//
//   listener -> dialler   Challenge   a nonce
//   dialler -> listener   Hello       group, ranks, lane, a nonce, HMAC(secret, all of these and the challenge)
//   listener -> dialler   Welcome     HMAC(secret, another label and the same); sent when the group is open there
//
// A connection with a wrong proof gets a Welcome that denies it and is closed. Data follows in clear: c3 authenticates
// peers, it does not encrypt (docs/how-to/c3.md).
#ifndef LAKH_HANDSHAKE_H
#define LAKH_HANDSHAKE_H

#include <array>
#include <cstdint>

#include "sha256.h"

namespace lakh {

constexpr uint32_t kHelloMagic = 0x6c633303, kWelcomeMagic = 0x6c633304, kDeniedMagic = 0x6c633305;
constexpr int32_t kStatusQuery = -1;  // instead of a lane: asks for the state of the group

using Nonce = std::array<uint8_t, 16>;
using Secret = std::array<uint8_t, 32>;

struct Challenge {
  uint32_t magic;
  Nonce nonce;
};

struct Hello {
  uint32_t magic;
  int32_t lane, from, to;
  uint8_t uuid[16];
  Nonce nonce;
  Digest proof;
};

struct Welcome {
  uint32_t magic;
  Digest proof;
};

Nonce random_nonce();
Digest dialler_proof(const Secret &secret, const Challenge &challenge, const Hello &hello);
Digest listener_proof(const Secret &secret, const Challenge &challenge, const Hello &hello);

}  // namespace lakh
#endif
