// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), for the handshake of connections.
#ifndef LAKH_SHA256_H
#define LAKH_SHA256_H

#include <array>
#include <cstddef>
#include <cstdint>

namespace lakh {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const void *data, size_t bytes);
Digest hmac_sha256(const uint8_t key[32], const void *data, size_t bytes);

// Takes the same time wherever the first difference is.
bool equal_digests(const Digest &a, const Digest &b);

}  // namespace lakh
#endif
