#include "exchange.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "clock.h"
#include "host_ranks.h"

namespace lakh {
namespace {

constexpr uint32_t kMagic = 0x6c633378;
constexpr int64_t kUnitBytes = 64;  // a multiple of every element size; chunks are multiples of it
constexpr int64_t kReduceBytes = 64 << 10;         // reduce arrived data in blocks of this size
constexpr int kPollMs = 50;

}  // namespace

Exchange::Flow &Exchange::flow(int32_t peer, int stream, bool out) {
  Flow &flow = flows_[{peer, stream, out}];
  flow.peer = peer;
  flow.out = out;
  return flow;
}

void Exchange::enqueue(int32_t peer, char *data, int64_t bytes, bool out, std::function<void(char *, int64_t)> on_data) {
  headers_.push_back(header_template_);
  Header &header = headers_.back();
  header.magic = kMagic;
  header.bytes = bytes;
  Segment first;
  first.data = reinterpret_cast<char *>(&header);
  first.bytes = sizeof header;
  first.is_header = true;
  flow(peer, 0, out).pieces.push_back(first);
  const Wire wire = links_->wire(peer);
  const int64_t streams = std::clamp<int64_t>(bytes / wire.chunk_bytes, 1, wire.streams);
  const int64_t chunk = streams == 1 ? bytes : wire.chunk_bytes;
  for (int64_t begin = 0, number = 0; begin < bytes; begin += chunk, ++number) {
    Segment piece;
    piece.data = data + begin;
    piece.bytes = std::min(chunk, bytes - begin);
    piece.on_data = on_data;
    flow(peer, static_cast<int>(number % streams), out).pieces.push_back(std::move(piece));
  }
}

void Exchange::send(int32_t peer, const char *data, int64_t bytes) {
  enqueue(peer, const_cast<char *>(data), bytes, true, nullptr);
}

void Exchange::receive(int32_t peer, char *data, int64_t bytes, std::function<void(char *, int64_t)> on_data) {
  enqueue(peer, data, bytes, false, std::move(on_data));
}

Status Exchange::check(const Header &theirs, int64_t expected_bytes, int32_t peer) {
  Header mine = header_template_;
  mine.magic = kMagic;
  mine.bytes = theirs.bytes;
  if (std::memcmp(&mine, &theirs, sizeof mine) == 0) {
    if (theirs.bytes == expected_bytes) return {};
    return fail(LAKH_C3_INVALID, std::string(operation_name(mine.operation)) + ": rank " + std::to_string(peer) + " sends " +
                                     std::to_string(theirs.bytes) + " bytes to rank " + std::to_string(links_->rank()) +
                                     ", which expects " + std::to_string(expected_bytes));
  }
  const auto describe = [](const Header &h) {
    static const char *const types[] = {"f32", "f64", "f16", "bf16", "i32", "i64", "u8", "i8"};
    std::string text = std::string(operation_name(h.operation)) + " number " + std::to_string(h.number);
    if (h.dtype >= 0 && h.dtype < 8) text += " of " + std::to_string(h.count) + " " + types[h.dtype];
    return text;
  };
  if (theirs.magic != kMagic) return fail(LAKH_C3_INVALID, "rank " + std::to_string(peer) + " sends data that is not c3");
  return fail(LAKH_C3_INVALID, "the ranks disagree: rank(s) " + std::to_string(links_->rank()) + " call " + describe(mine) +
                                   "; rank(s) " + std::to_string(peer) + " call " + describe(theirs));
}

Status Exchange::push(Flow *flow, bool *progress, int64_t *wake_ns) {
  while (!flow->pieces.empty()) {
    Segment &piece = flow->pieces.front();
    int64_t wanted = piece.bytes - piece.done;
    if (flow->pacer.shaped()) {
      int64_t pending = 0;
      for (const Segment &one : flow->pieces) pending += one.bytes - one.done;
      const int64_t allowed = flow->pacer.allowed(now_ns(), pending);
      if (allowed <= 0) {
        *wake_ns = std::min(*wake_ns, flow->pacer.wake_ns(pending));
        return {};
      }
      wanted = std::min(wanted, allowed);
    }
    const ssize_t n = ::send(flow->fd, piece.data + piece.done, static_cast<size_t>(wanted), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
    if (n < 0) return connection_failure(flow->peer, n, errno);
    *progress = true;
    sent_->fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    if (flow->pacer.shaped()) flow->pacer.sent(n);
    piece.done += n;
    if (piece.done == piece.bytes) flow->pieces.pop_front();
  }
  return {};
}

// The status of a failed read or write; `n` is the result of the call.
Status Exchange::connection_failure(int32_t peer, ssize_t n, int error) {
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  const std::string how = n == 0   ? "closed its connection"
                          : silent ? "sends no acknowledgements: its link is cut"
                                   : std::string("lost its connection: ") + std::strerror(error);
  const int32_t code = n != 0 && silent ? LAKH_C3_UNREACHABLE : LAKH_C3_DISCONNECTED;
  return group_state_->end(fail(code, "rank " + std::to_string(peer) + " " + how), peer);
}

Status Exchange::pull(Flow *flow, bool *progress) {
  while (!flow->pieces.empty()) {
    Segment &piece = flow->pieces.front();
    char *to = piece.is_header ? reinterpret_cast<char *>(&flow->header) : piece.data;
    const ssize_t n = ::recv(flow->fd, to + piece.done, static_cast<size_t>(piece.bytes - piece.done), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
    if (n <= 0) return connection_failure(flow->peer, n, errno);
    *progress = true;
    received_->fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    piece.done += n;
    if (piece.is_header && piece.done == piece.bytes) {
      const Status status = check(flow->header, reinterpret_cast<const Header *>(piece.data)->bytes, flow->peer);
      if (!status.ok()) return group_state_->end(status, -1);
    }
    if (piece.on_data && (piece.done == piece.bytes || piece.done - piece.handed >= kReduceBytes)) {
      const int64_t whole = piece.done == piece.bytes ? piece.done : piece.done / kUnitBytes * kUnitBytes;
      piece.on_data(piece.data + piece.handed, whole - piece.handed);
      piece.handed = whole;
    }
    if (piece.done == piece.bytes) flow->pieces.pop_front();
  }
  return {};
}

Status Exchange::finish(int64_t deadline_ns, const char *what) {
  Status status;
  for (auto &[key, flow] : flows_) {
    if (flow.pieces.empty()) continue;
    status = links_->lane(flow.peer, kFirstStream + std::get<1>(key), deadline_ns, &flow.fd);
    if (!status.ok()) {
      flows_.clear();
      headers_.clear();
      // If the group had ended already, this peer is not the cause.
      return group_state_->ended() ? group_state_->status() : group_state_->end(status, is_peer_loss(status.code) ? flow.peer : -1);
    }
    flow.pacer.start(flow.out ? links_->shaper(flow.peer) : nullptr, now_ns());
  }
  std::vector<pollfd> fds;
  std::vector<int32_t> waiting_for;
  while (status.ok()) {
    bool progress = false;
    int64_t wake_ns = INT64_MAX;
    fds.clear();
    waiting_for.clear();
    for (auto &[key, flow] : flows_) {
      if (flow.pieces.empty()) continue;
      status = flow.out ? push(&flow, &progress, &wake_ns) : pull(&flow, &progress);
      if (!status.ok()) break;
      if (flow.pieces.empty()) continue;
      const bool delayed = flow.out && flow.pacer.must_wait();
      if (!delayed) fds.push_back({flow.fd, static_cast<short>(flow.out ? POLLOUT : POLLIN), 0});
      if (!flow.out) waiting_for.push_back(flow.peer);
      if (delayed && fds.empty() && wake_ns == INT64_MAX) wake_ns = now_ns() + 1000000;
    }
    if (!status.ok()) break;
    if (fds.empty() && wake_ns == INT64_MAX) break;  // all done
    if (progress) continue;
    if (group_state_->ended()) {
      status = group_state_->status();
      break;
    }
    const int64_t start = now_ns();
    if (start > deadline_ns) {
      std::string late;
      std::sort(waiting_for.begin(), waiting_for.end());
      waiting_for.erase(std::unique(waiting_for.begin(), waiting_for.end()), waiting_for.end());
      for (const int32_t peer : waiting_for) late += (late.empty() ? "" : ", ") + std::to_string(peer);
      status = group_state_->end(fail(LAKH_C3_TIMEOUT, std::string(what) + ": timed out waiting for rank(s) " + (late.empty() ? "to receive" : late)), -1);
      break;
    }
    int64_t sleep_ns = std::min<int64_t>(kPollMs * 1000000LL, wake_ns == INT64_MAX ? INT64_MAX : std::max<int64_t>(0, wake_ns - start));
    sleep_ns = std::min(sleep_ns, deadline_ns - start + 1000000);
    const timespec t = {static_cast<time_t>(sleep_ns / 1000000000), static_cast<long>(sleep_ns % 1000000000)};
    ::ppoll(fds.data(), fds.size(), &t, nullptr);
    if (!waiting_for.empty()) {
      const uint64_t us = static_cast<uint64_t>((now_ns() - start) / 1000);
      for (const int32_t peer : waiting_for) (*waited_us_)[static_cast<size_t>(peer)].fetch_add(us / waiting_for.size());
    }
  }
  for (auto &[key, flow] : flows_) flow.pieces.clear();
  headers_.clear();
  return status;
}

}  // namespace lakh
