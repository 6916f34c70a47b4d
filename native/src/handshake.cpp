#include "handshake.h"

#include <sys/random.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace lakh {
namespace {

struct Signed {
  char label[16];
  Challenge challenge;
  uint8_t hello[offsetof(Hello, proof)];
};

Digest sign(const Secret &secret, const char *label, const Challenge &challenge, const Hello &hello) {
  Signed text{};
  std::strncpy(text.label, label, sizeof text.label - 1);
  text.challenge = challenge;
  std::memcpy(text.hello, &hello, sizeof text.hello);
  return hmac_sha256(secret.data(), &text, sizeof text);
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw std::runtime_error("getrandom: no random numbers for the handshake");
  }
  return nonce;
}

Digest dialler_proof(const Secret &secret, const Challenge &challenge, const Hello &hello) {
  return sign(secret, "c3 dialler", challenge, hello);
}

Digest listener_proof(const Secret &secret, const Challenge &challenge, const Hello &hello) {
  return sign(secret, "c3 listener", challenge, hello);
}

}  // namespace lakh
