// Tests of the native core: reductions, codecs, and collectives among threads or processes. Exits with 0 on success.
//
// Built with AddressSanitizer + UndefinedBehaviorSanitizer and with ThreadSanitizer by tests/unit/c3/test_core.py.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lakh_c3.h"
#include "sha256.h"
#include "shaper.h"

namespace {

int failures = 0;
const uint8_t secret[32] = {7, 7, 7};

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      ++failures;                                                              \
    }                                                                          \
  } while (0)

using Body = std::function<void(lakh_c3_group *, int)>;

// `size` ranks as threads of this process; ranks with equal `hosts` share memory.
void with_ranks(int size, const std::vector<int32_t> &hosts, const Body &body) {
  const int32_t port = lakh_c3_listen("127.0.0.1");
  CHECK(port > 0);
  uint8_t uuid[16];
  for (auto &byte : uuid) byte = static_cast<uint8_t>(std::rand());
  std::vector<lakh_c3_group *> groups(static_cast<size_t>(size));
  std::vector<int32_t> pids(static_cast<size_t>(size), ::getpid()), memories(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) groups[r] = lakh_c3_open(uuid, secret, r, size, &memories[r]);
  const std::string address = "127.0.0.1:" + std::to_string(port);
  std::vector<const char *> addresses(static_cast<size_t>(size), address.c_str());
  for (int r = 0; r < size; ++r) {
    CHECK(groups[r] != nullptr);
    CHECK(lakh_c3_join(groups[r], hosts.data(), pids.data(), memories.data(), addresses.data(), 20000, 2, 65536) == LAKH_C3_OK);
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&, r] { body(groups[r], r); });
  for (std::thread &thread : threads) thread.join();
  for (lakh_c3_group *group : groups) lakh_c3_close(group);
}

std::string hex(const lakh::Digest &digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

// FIPS 180-4 examples, and test case 2 of RFC 4231; lengths around the padding's edges.
void hashes() {
  CHECK(hex(lakh::sha256("abc", 3)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(lakh::sha256("", 0)) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  const std::string longer = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK(hex(lakh::sha256(longer.data(), longer.size())) == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const uint8_t key[32] = {'J', 'e', 'f', 'e'};
  const std::string text = "what do ya want for nothing?";
  CHECK(hex(lakh::hmac_sha256(key, text.data(), text.size())) == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

void reductions() {
  for (int size : {1, 2, 3, 5}) {
    with_ranks(size, std::vector<int32_t>(static_cast<size_t>(size), 0), [&](lakh_c3_group *group, int rank) {
      for (int64_t count : {0, 1, 7, 5000, 300001}) {
        std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank + 1));
        CHECK(lakh_c3_collective(group, LAKH_C3_ALL_REDUCE, LAKH_C3_F32, LAKH_C3_SUM, -1, data.data(), data.data(), count) == LAKH_C3_OK);
        for (float value : data) CHECK(value == static_cast<float>(size * (size + 1) / 2));
        std::vector<uint16_t> half(static_cast<size_t>(count), 0x3f80);  // 1.0 in bf16
        CHECK(lakh_c3_collective(group, LAKH_C3_ALL_REDUCE, LAKH_C3_BF16, LAKH_C3_AVG, -1, half.data(), half.data(), count) == LAKH_C3_OK);
        for (uint16_t value : half) CHECK(value == 0x3f80);
      }
      std::vector<int64_t> mine(1000, rank), all(1000 * static_cast<size_t>(size));
      CHECK(lakh_c3_collective(group, LAKH_C3_ALL_GATHER, LAKH_C3_I64, -1, -1, mine.data(), all.data(), 1000) == LAKH_C3_OK);
      for (int r = 0; r < size; ++r) CHECK(all[static_cast<size_t>(r) * 1000 + 999] == r);
      std::vector<int64_t> part(1000);
      CHECK(lakh_c3_collective(group, LAKH_C3_REDUCE_SCATTER, LAKH_C3_I64, LAKH_C3_MAX, -1, all.data(), part.data(), 1000) == LAKH_C3_OK);
      CHECK(part[0] == rank);
    });
  }
}

void queue_and_disagreement() {
  with_ranks(2, {0, 0}, [](lakh_c3_group *group, int rank) {
    std::vector<std::vector<float>> data(20, std::vector<float>(1000, 1.0f));
    std::vector<int64_t> tickets(20);
    for (size_t i = 0; i < 20; ++i) {
      lakh_c3_call call{};
      call.operation = LAKH_C3_ALL_REDUCE;
      call.root = -1;
      call.input = call.output = data[i].data();
      call.count = 1000;
      CHECK(lakh_c3_run(group, &call, &tickets[i]) == LAKH_C3_OK);
    }
    for (size_t i = 0; i < 20; ++i) {
      CHECK(lakh_c3_wait(group, tickets[i], 20000) == LAKH_C3_OK);
      CHECK(data[i][999] == 2.0f);
    }
    float one = 1.0f;
    double two[2] = {1.0, 1.0};
    const int32_t status = rank == 0 ? lakh_c3_collective(group, LAKH_C3_ALL_REDUCE, LAKH_C3_F32, LAKH_C3_SUM, -1, &one, &one, 1)
                                     : lakh_c3_collective(group, LAKH_C3_ALL_REDUCE, LAKH_C3_F64, LAKH_C3_SUM, -1, two, two, 2);
    CHECK(status == LAKH_C3_INVALID);
    CHECK(lakh_c3_collective(group, LAKH_C3_BARRIER, 0, -1, -1, nullptr, nullptr, 0) == LAKH_C3_OK);
  });
}

// Two "hosts": everything over TCP, by a schedule of one exchange.
void over_tcp(const char *virtual_links) {  // nullptr: none
  with_ranks(2, {0, 1}, [=](lakh_c3_group *group, int rank) {
    if (virtual_links != nullptr) CHECK(lakh_c3_shape(group, 1 - rank, virtual_links, rank, 1e9, 200) == LAKH_C3_OK);
    for (int64_t count : {1, 1000, 700001}) {
      std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank + 1));
      const int32_t peer = 1 - rank;
      lakh_c3_step steps[3] = {};
      steps[0] = {0, LAKH_C3_STEP_SEND, peer, LAKH_C3_BUFFER_OUTPUT, 0, 0, 0, 0, count};
      steps[1] = {0, LAKH_C3_STEP_RECV, peer, 0, LAKH_C3_BUFFER_SCRATCH, 0, 0, 0, count};
      lakh_c3_call call{};
      call.operation = LAKH_C3_ALL_REDUCE;
      call.root = -1;
      call.input = call.output = data.data();
      call.count = count;
      call.steps = steps;
      call.num_steps = 2;
      call.scratch_count = count;
      CHECK(lakh_c3_run(group, &call, nullptr) == LAKH_C3_OK);
      steps[0].kind = LAKH_C3_STEP_SEND;
      steps[1].kind = LAKH_C3_STEP_RECV_REDUCE;
      steps[0].stage = steps[1].stage = 0;
      steps[1].dst = LAKH_C3_BUFFER_SCRATCH;
      int64_t sent = 0, got = 0;
      std::vector<float> message(100, static_cast<float>(rank)), inbox(100);
      int32_t source = -1;
      CHECK(lakh_c3_send(group, peer, 7, message.data(), 400, &sent) == LAKH_C3_OK);
      CHECK(lakh_c3_recv(group, peer, 7, inbox.data(), 400, &source, &got) == LAKH_C3_OK);
      CHECK(lakh_c3_wait_message(group, sent, 20000) == LAKH_C3_OK);
      CHECK(lakh_c3_wait_message(group, got, 20000) == LAKH_C3_OK);
      CHECK(inbox[99] == static_cast<float>(peer));
      CHECK(source == peer);
    }
  });
}

// Emulated links keep their rate and delay however late the sender wakes up, and are shared by the flows that use them.
void emulated_links() {
  constexpr int64_t ms = 1000000, grain = lakh::Pacer::kGrainBytes;
  std::atomic<int64_t> fast{0}, slow{0};
  const lakh::Shaper path{{{&fast, 100e6}, {&slow, 1e3 * grain}}, 10 * ms};  // the slow link: one grain a millisecond
  for (const int64_t every : {ms / 10, 7 * ms, 50 * ms}) {
    fast = slow = 0;
    lakh::Pacer pacer;
    pacer.start(&path, 5 * ms);
    int64_t left = 100 * grain, at = 5 * ms, arrived = 0;
    while (left > 0) {
      const int64_t ready = std::min(left, pacer.allowed(at, left));
      CHECK(ready == 0 || at >= 5 * ms + 10 * ms + ms * (100 * grain - left + ready) / grain);  // nothing arrives early
      pacer.sent(ready);
      left -= ready;
      if (left > 0) CHECK(pacer.wake_ns(left) < INT64_MAX);
      arrived = at;
      at += every;
    }
    CHECK(arrived < 5 * ms + 10 * ms + 100 * ms + every);  // late by one wake-up, not by the sum of them
  }
  fast = slow = 0;
  lakh::Pacer two[2];
  int64_t left[2] = {50 * grain, 50 * grain}, done[2] = {0, 0};
  for (lakh::Pacer &one : two) one.start(&path, 0);
  for (int64_t at = 0; left[0] + left[1] > 0; at += ms / 4) {
    for (int i = 0; i < 2; ++i) {
      const int64_t ready = left[i] > 0 ? two[i].allowed(at, left[i]) : 0;
      two[i].sent(ready);
      left[i] -= ready;
      if (ready > 0) done[i] = at;
    }
  }
  CHECK(std::abs(done[0] - done[1]) <= 2 * ms);
  CHECK(done[0] + done[1] >= 2 * 109 * ms);
}

void codecs() {
  for (int32_t codec : {LAKH_C3_CODEC_BF16, LAKH_C3_CODEC_INT8, LAKH_C3_CODEC_INT4}) {
    const float step = codec == LAKH_C3_CODEC_INT4 ? 1.0f / 7 : 1.0f / 127;
    for (int64_t count : {0, 1, 31, 32, 33, 1000}) {
      std::vector<float> values(static_cast<size_t>(count)), decoded(values.size()), residual(values.size());
      for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
      std::vector<uint8_t> wire(static_cast<size_t>(lakh_c3_codec_bytes(codec, count)));
      CHECK(lakh_c3_encode(codec, values.data(), count, 1, wire.data(), residual.data()) == LAKH_C3_OK);
      CHECK(lakh_c3_decode(codec, wire.data(), count, decoded.data(), 0) == LAKH_C3_OK);
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK(std::fabs(decoded[i] - values[i]) <= 0.51f * step + 0.01f);
        CHECK(decoded[i] + residual[i] == values[i] || std::fabs(decoded[i] + residual[i] - values[i]) < 1e-6f);
      }
    }
  }
  std::vector<float> hostile = {NAN, 1.0f, INFINITY, -INFINITY, 1e-45f, 3.4e38f};
  std::vector<uint8_t> wire(64);
  for (int32_t codec : {LAKH_C3_CODEC_BF16, LAKH_C3_CODEC_INT8, LAKH_C3_CODEC_INT4}) {
    std::vector<float> out(6);
    CHECK(lakh_c3_encode(codec, hostile.data(), 6, 1, wire.data(), nullptr) == LAKH_C3_OK);
    CHECK(lakh_c3_decode(codec, wire.data(), 6, out.data(), 0) == LAKH_C3_OK);
    CHECK(std::isnan(out[0]));
  }
  CHECK(lakh_c3_encode(99, hostile.data(), 6, 1, wire.data(), nullptr) == LAKH_C3_INVALID);
}

// Two processes; one dies, and the other gets the error.
void a_death() {
  int to_parent[2], to_child[2];
  CHECK(::pipe(to_parent) == 0 && ::pipe(to_child) == 0);
  const uint8_t uuid[16] = {42};
  const pid_t child = ::fork();
  const int rank = child == 0 ? 1 : 0;
  int32_t memories[2] = {}, pids[2] = {}, hosts[2] = {0, 0};
  lakh_c3_group *group = lakh_c3_open(uuid, secret, rank, 2, &memories[rank]);
  pids[rank] = ::getpid();
  int32_t mine[2] = {pids[rank], memories[rank]}, theirs[2];
  const int out = rank == 1 ? to_parent[1] : to_child[1], in = rank == 1 ? to_child[0] : to_parent[0];
  CHECK(::write(out, mine, sizeof mine) == sizeof mine && ::read(in, theirs, sizeof theirs) == sizeof theirs);
  pids[1 - rank] = theirs[0];
  memories[1 - rank] = theirs[1];
  const char *addresses[2] = {"", ""};
  CHECK(lakh_c3_join(group, hosts, pids, memories, addresses, 20000, 1, 65536) == LAKH_C3_OK);
  char ready = 1;
  CHECK(::write(out, &ready, 1) == 1 && ::read(in, &ready, 1) == 1);
  float value = 1.0f;
  CHECK(lakh_c3_collective(group, LAKH_C3_ALL_REDUCE, LAKH_C3_F32, LAKH_C3_SUM, -1, &value, &value, 1) == LAKH_C3_OK);
  CHECK(value == 2.0f);
  if (rank == 1) ::_exit(failures == 0 ? 0 : 1);
  const int32_t status = lakh_c3_collective(group, LAKH_C3_ALL_REDUCE, LAKH_C3_F32, LAKH_C3_SUM, -1, &value, &value, 1);
  CHECK(status == LAKH_C3_DIED);
  int32_t dead[2];
  char text[256];
  CHECK(lakh_c3_failure(group, text, sizeof text, dead, 2) == LAKH_C3_DIED && dead[0] == 1);
  lakh_c3_close(group);
  int exit_status = 0;
  ::waitpid(child, &exit_status, 0);
  CHECK(exit_status == 0);
}

}  // namespace

// A closed group is NULL: every function returns LAKH_C3_CLOSED or does nothing.
void a_closed_group() {
  lakh_c3_call call{};
  int64_t ticket = 0;
  int32_t source = 0, dead[2] = {0, 0};
  char text[64];
  float value = 1;
  CHECK(lakh_c3_run(nullptr, &call, &ticket) == LAKH_C3_CLOSED);
  CHECK(lakh_c3_collective(nullptr, LAKH_C3_ALL_REDUCE, LAKH_C3_F32, LAKH_C3_SUM, -1, &value, &value, 1) == LAKH_C3_CLOSED);
  CHECK(lakh_c3_wait(nullptr, 1, 1) == LAKH_C3_CLOSED);
  CHECK(lakh_c3_done(nullptr, 1) == 1);
  CHECK(lakh_c3_send(nullptr, 0, 0, &value, 4, &ticket) == LAKH_C3_CLOSED);
  CHECK(lakh_c3_recv(nullptr, 0, 0, &value, 4, &source, &ticket) == LAKH_C3_CLOSED);
  CHECK(lakh_c3_wait_message(nullptr, 1, 1) == LAKH_C3_CLOSED);
  CHECK(lakh_c3_message_done(nullptr, 1) == 1);
  CHECK(lakh_c3_failure(nullptr, text, sizeof text, dead, 2) == LAKH_C3_CLOSED);
  CHECK(dead[0] == -1 && std::string(text) == "the group was closed");
  lakh_c3_counters counters;
  lakh_c3_read_counters(nullptr, &counters);
  CHECK(counters.operations == 0);
  lakh_c3_abort(nullptr, "why");
  lakh_c3_set_timeout(nullptr, 1);
  lakh_c3_close(nullptr);
}

int main() {
  a_death();  // first, because it forks: a process with threads should not
  hashes();
  reductions();
  queue_and_disagreement();
  over_tcp(nullptr);
  char virtual_links[] = "/tmp/lakh-core-XXXXXX";
  ::close(::mkstemp(virtual_links));
  over_tcp(virtual_links);
  ::unlink(virtual_links);
  emulated_links();
  codecs();
  a_closed_group();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
