// The C functions: each catches all exceptions, stores the error text for its thread, and returns a status. A closed group is
// NULL, and every function reports it.
#include <cstring>
#include <exception>
#include <new>

#include "codec.h"
#include "endpoint.h"
#include "group.h"
#include "lakh_c3.h"
#include "memory.h"
#include "reduce.h"

namespace {

thread_local std::string last_error;

size_t copy_out(const std::string &value, char *text, size_t size) {
  if (text != nullptr && size > 0) {
    const size_t n = value.size() < size - 1 ? value.size() : size - 1;
    std::memcpy(text, value.data(), n);
    text[n] = '\0';
  }
  return value.size();
}

int32_t set_error(const lakh::Status &status) {
  if (!status.ok()) last_error = status.text;
  return status.code;
}

template <class Body>
int32_t guarded(Body body) {
  try {
    return set_error(body());
  } catch (const std::bad_alloc &) {
    return set_error(lakh::fail(LAKH_C3_SYSTEM, "out of memory"));
  } catch (const std::exception &error) {
    return set_error(lakh::fail(LAKH_C3_SYSTEM, error.what()));
  }
}

template <class Body>
int32_t guarded(lakh_c3_group *group, Body body) {
  if (group == nullptr) return set_error(lakh::fail(LAKH_C3_CLOSED, "the group was closed"));
  return guarded(body);
}

}  // namespace

extern "C" {

int32_t lakh_c3_listen(const char *address) {
  int32_t port = 0;
  guarded([&] {
    port = lakh::endpoint::listen(address);
    return lakh::Status{};
  });
  return port;
}

lakh_c3_group *lakh_c3_open(const uint8_t uuid[16], const uint8_t secret[32], int32_t rank, int32_t size, int32_t *memory) {
  lakh_c3_group *group = nullptr;
  const int32_t code = guarded([&] {
    if (size < 1 || rank < 0 || rank >= size) return lakh::fail(LAKH_C3_INVALID, "rank is not below size");
    lakh::Secret key;
    std::memcpy(key.data(), secret, key.size());
    group = new lakh_c3_group(uuid, key, rank, size);
    const lakh::Status status = group->open(uuid);
    *memory = group->host.memory();
    return status;
  });
  if (code != LAKH_C3_OK) {
    delete group;
    return nullptr;
  }
  return group;
}

int32_t lakh_c3_join(lakh_c3_group *group, const int32_t *host, const int32_t *pid, const int32_t *memory,
                     const char *const *address, int64_t timeout_ms, int32_t streams, int64_t single_copy_from_bytes) {
  return guarded(group, [&] { return group->join(host, pid, memory, address, timeout_ms, streams, single_copy_from_bytes); });
}

int32_t lakh_c3_wire(lakh_c3_group *group, int32_t peer, int32_t streams, int64_t chunk_bytes, int64_t in_flight_bytes) {
  return guarded(group, [&] { return group->links.set_wire(peer, lakh::Wire{streams, chunk_bytes, in_flight_bytes}); });
}

void lakh_c3_set_timeout(lakh_c3_group *group, int64_t timeout_ms) {
  if (group != nullptr) group->timeout_ms.store(timeout_ms);
}

int32_t lakh_c3_shape(lakh_c3_group *group, int32_t peer, const char *file, int32_t link, double bytes_per_s, int64_t delay_us) {
  return guarded(group, [&] { return group->links.shape(peer, file, link, bytes_per_s, delay_us); });
}

int32_t lakh_c3_run(lakh_c3_group *group, const lakh_c3_call *call, int64_t *ticket) {
  return guarded(group, [&] { return group->run(*call, ticket); });
}

int32_t lakh_c3_collective(lakh_c3_group *group, int32_t operation, int32_t dtype, int32_t op, int32_t root, const void *input,
                           void *output, int64_t count) {
  return guarded(group, [&] {
    lakh_c3_call call{};
    call.operation = operation;
    call.dtype = dtype;
    call.op = op;
    call.root = root;
    call.input = input;
    call.output = output;
    call.count = count;
    return group->run(call, nullptr);
  });
}

int32_t lakh_c3_wait(lakh_c3_group *group, int64_t ticket, int64_t timeout_ms) {
  return guarded(group, [&] { return group->wait(ticket, timeout_ms); });
}

int32_t lakh_c3_done(lakh_c3_group *group, int64_t ticket) { return group == nullptr || group->done(ticket) ? 1 : 0; }

int32_t lakh_c3_send(lakh_c3_group *group, int32_t peer, int32_t tag, const void *data, int64_t bytes, int64_t *ticket) {
  return guarded(group, [&] {
    if (peer < 0 || peer >= group->size || peer == group->rank) return lakh::fail(LAKH_C3_INVALID, "send: not another rank of the group");
    if (group->group_state.ended()) return group->group_state.status();
    *ticket = group->messages.send(peer, tag, data, bytes);
    return lakh::Status{};
  });
}

int32_t lakh_c3_recv(lakh_c3_group *group, int32_t peer, int32_t tag, void *data, int64_t bytes, int32_t *source, int64_t *ticket) {
  return guarded(group, [&] {
    if (peer < -1 || peer >= group->size || peer == group->rank) return lakh::fail(LAKH_C3_INVALID, "recv: not another rank of the group");
    if (group->group_state.ended()) return group->group_state.status();
    *ticket = group->messages.receive(peer, tag, data, bytes, source);
    return lakh::Status{};
  });
}

int32_t lakh_c3_wait_message(lakh_c3_group *group, int64_t ticket, int64_t timeout_ms) {
  return guarded(group, [&] { return group->messages.wait(ticket, timeout_ms); });
}

int32_t lakh_c3_message_done(lakh_c3_group *group, int64_t ticket) { return group == nullptr || group->messages.done(ticket) ? 1 : 0; }

void *lakh_c3_allocate(size_t bytes) {
  void *memory = nullptr;
  guarded([&] {
    memory = lakh::allocate_registered(bytes);
    return lakh::Status{};
  });
  return memory;
}

void lakh_c3_free(void *memory) { lakh::free_registered(memory); }

size_t lakh_c3_error(char *text, size_t size) { return copy_out(last_error, text, size); }

int32_t lakh_c3_failure(lakh_c3_group *group, char *text, size_t size, int32_t *dead, int32_t dead_size) {
  const lakh::Status status = group == nullptr ? lakh::fail(LAKH_C3_CLOSED, "the group was closed") : group->group_state.status();
  copy_out(status.text, text, size);
  const std::vector<int32_t> ranks = group == nullptr ? std::vector<int32_t>{} : group->group_state.dead();
  for (int32_t i = 0; i < dead_size; ++i) dead[i] = i < static_cast<int32_t>(ranks.size()) ? ranks[static_cast<size_t>(i)] : -1;
  return status.code;
}

void lakh_c3_abort(lakh_c3_group *group, const char *reason) {
  if (group != nullptr) group->group_state.end(lakh::fail(LAKH_C3_ABORTED, reason), -1);
}

void lakh_c3_close(lakh_c3_group *group) {
  if (group == nullptr) return;
  group->close();
  delete group;
}

void lakh_c3_read_counters(lakh_c3_group *group, lakh_c3_counters *counters) {
  *counters = {};
  if (group == nullptr) return;
  uint64_t waited = 0;
  for (const auto &one : group->host.waited_us) waited += one.load();
  *counters = {group->operations.load(), group->bytes_in.load(), group->sent.load(), group->received.load(), waited,
               group->host.futex_waits.load(), group->links.connections(), group->host.single_copy_bytes.load()};
}

void lakh_c3_waited_us(lakh_c3_group *group, uint64_t *per_rank) {
  if (group == nullptr) return;
  for (const auto &one : group->host.waited_us) *per_rank++ = one.load();
}

int64_t lakh_c3_codec_bytes(int32_t codec, int64_t count) { return lakh::codec_bytes(codec, count); }

int32_t lakh_c3_encode(int32_t codec, const float *values, int64_t count, uint64_t seed, void *wire, float *residual) {
  if (lakh::codec_bytes(codec, count) < 0 || count < 0) return set_error(lakh::fail(LAKH_C3_INVALID, "no such codec"));
  lakh::encode(codec, values, count, seed, static_cast<uint8_t *>(wire), residual);
  return LAKH_C3_OK;
}

int32_t lakh_c3_decode(int32_t codec, const void *wire, int64_t count, float *values, int32_t add) {
  if (lakh::codec_bytes(codec, count) < 0 || count < 0) return set_error(lakh::fail(LAKH_C3_INVALID, "no such codec"));
  lakh::decode(codec, static_cast<const uint8_t *>(wire), count, values, add != 0);
  return LAKH_C3_OK;
}
}
