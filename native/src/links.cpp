#include "links.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "clock.h"
#include "endpoint.h"

namespace lakh {
namespace {

constexpr int64_t kProbeEveryNs = 500000000;
constexpr int kProbeMs = 1500;
constexpr int kTickMs = 50;

// A peer's text, at most the size of its field and in printable ASCII.
std::string readable(const char (&text)[308]) {
  std::string out(text, ::strnlen(text, sizeof text));
  for (char &c : out) c = c >= ' ' && c <= '~' ? c : '?';
  return out;
}

bool parse(const std::string &address, sockaddr_storage *out, socklen_t *length) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints, &found) != 0) return false;
  std::memcpy(out, found->ai_addr, found->ai_addrlen);
  *length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return true;
}

}  // namespace

Links::Links(GroupState *group_state, const uint8_t uuid[16], const Secret &secret, int32_t rank, int32_t size)
    : group_state_(group_state), secret_(secret), rank_(rank), size_(size) {
  std::memcpy(uuid_, uuid, 16);
}

ControlMessage Links::failure_message() const {
  ControlMessage message{};
  if (!group_state_->ended()) return message;
  const Status why = group_state_->status();
  const std::vector<int32_t> dead = group_state_->dead();
  message.kind = 2;
  message.code = why.code;
  message.dead = dead.empty() ? -1 : dead.front();
  std::strncpy(message.text, why.text.c_str(), sizeof message.text - 1);
  return message;
}

Links::~Links() {
  ControlMessage why = failure_message();
  if (why.kind == 0) {
    why.kind = 2;
    why.code = LAKH_C3_LEFT;
    why.dead = rank_;
    std::snprintf(why.text, sizeof why.text, "rank %d has left the group", rank_);
  }
  endpoint::remove(this, why);
  for (auto &[peer, state] : peers_) {
    for (const auto &[lane, fd] : state.fds) ::close(fd);
  }
  for (const auto &[name, memory] : shaper_files_) ::munmap(memory, 4096);
}

void Links::join(std::vector<std::string> addresses, int32_t streams) {
  addresses_ = std::move(addresses);
  wire_.streams = std::max(1, streams);
  endpoint::add(this);
}

Status Links::lane(int32_t peer, int lane, int64_t deadline_ns, int *fd) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = peers_[peer].fds.find(lane);
    if (found != peers_[peer].fds.end()) {
      *fd = found->second;
      return {};
    }
    if (peers_[peer].left) return fail(LAKH_C3_LEFT, "rank " + std::to_string(peer) + " has left the group");
  }
  if (rank_ < peer) {
    Peer *state;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      state = &peers_[peer];  // stays in place
    }
    const std::lock_guard<std::recursive_mutex> one_at_a_time(state->dialling);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = peers_[peer].fds.find(lane);
      if (found != peers_[peer].fds.end()) {  // another thread has connected
        *fd = found->second;
        return {};
      }
    }
    int control;
    if (lane != kControl) {
      const Status status = this->lane(peer, kControl, deadline_ns, &control);
      if (!status.ok()) return status;
    }
    const Status status = dial(peer, lane, deadline_ns, fd);
    if (!status.ok()) return status;
    on_connected(peer, lane, *fd);
    return {};
  }
  int64_t next_probe = now_ns() + kProbeEveryNs;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto found = peers_[peer].fds.find(lane);
    if (found != peers_[peer].fds.end()) {
      *fd = found->second;
      return {};
    }
    if (group_state_->ended()) return group_state_->status();
    changed_.wait_for(lock, std::chrono::milliseconds(20));
    const int64_t now = now_ns();
    if (now > deadline_ns) {
      lock.unlock();
      return fail(LAKH_C3_TIMEOUT, "timed out waiting for rank " + std::to_string(peer) + " to connect");
    }
    if (now > next_probe && peers_[peer].fds.count(kControl) == 0) {
      lock.unlock();
      const Status status = probe(peer);
      if (!status.ok()) return status;
      next_probe = now_ns() + kProbeEveryNs;
      lock.lock();
    }
  }
}

// Reads exactly `bytes`. Returns 0 or an errno: EPIPE if the peer closed the connection, ECANCELED if the group ended.
int Links::receive(int fd, void *data, size_t bytes, int64_t deadline_ns) const {
  char *at = static_cast<char *>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(fd, at, bytes, MSG_DONTWAIT);
    if (n == 0) return EPIPE;
    if (n > 0) {
      at += n;
      bytes -= static_cast<size_t>(n);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return errno;
    if (group_state_->ended()) return ECANCELED;
    if (now_ns() > deadline_ns) return EAGAIN;
    pollfd ready = {fd, POLLIN, 0};
    ::poll(&ready, 1, kTickMs);
  }
  return 0;
}

// The dialler's side of handshake.h. Returns 0 or an errno; EACCES if the two ends have different secrets.
int Links::shake_hands(int fd, int32_t peer, int lane, int64_t deadline_ns) {
  Challenge challenge;
  int error = receive(fd, &challenge, sizeof challenge, deadline_ns);
  if (error != 0) return error;
  if (challenge.magic != kHelloMagic) return EPROTO;
  Hello hello{kHelloMagic, lane, rank_, peer, {}, random_nonce(), {}};
  std::memcpy(hello.uuid, uuid_, 16);
  hello.proof = dialler_proof(secret_, challenge, hello);
  if (::send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return errno;
  Welcome welcome;
  error = receive(fd, &welcome, sizeof welcome, deadline_ns);
  if (error != 0) return error;
  if (welcome.magic == kWelcomeMagic && equal_digests(welcome.proof, listener_proof(secret_, challenge, hello))) return 0;
  return welcome.magic == kWelcomeMagic || welcome.magic == kDeniedMagic ? EACCES : EPROTO;
}

// Connects to a peer and completes the handshake. Returns 0 or an errno.
int Links::connect(int32_t peer, int lane, int64_t connect_by_ns, int64_t welcome_by_ns, int *fd) {
  sockaddr_storage address{};
  socklen_t length = 0;
  if (!parse(addresses_[static_cast<size_t>(peer)], &address, &length)) return EADDRNOTAVAIL;
  const int s = ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0) return errno;
  endpoint::set_options(s, lane);
  int error = ::connect(s, reinterpret_cast<sockaddr *>(&address), length) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd ready = {s, POLLOUT, 0};
    const int64_t left_ms = std::min<int64_t>(kProbeMs, (connect_by_ns - now_ns()) / 1000000);
    error = ETIMEDOUT;
    if (::poll(&ready, 1, static_cast<int>(std::max<int64_t>(1, left_ms))) == 1) {
      socklen_t size = sizeof error;
      ::getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0) {
    error = shake_hands(s, peer, lane, welcome_by_ns);
    if (error == ECONNRESET) error = EPIPE;  // after the connection was made, both say that the peer closed it
  }
  if (error == 0) {
    *fd = s;
  } else {
    ::close(s);
  }
  return error;
}

Status Links::another_secret(int32_t peer) const {
  return fail(LAKH_C3_INVALID, "rank " + std::to_string(peer) + " at " + addresses_[static_cast<size_t>(peer)] +
                                   " has another secret: all ranks need the same store and LAKH_C3_SECRET_FILE");
}

Status Links::dial(int32_t peer, int lane, int64_t deadline_ns, int *fd) {
  const std::string name = "rank " + std::to_string(peer) + " at " + addresses_[static_cast<size_t>(peer)];
  int refusals = 0;
  while (true) {
    if (group_state_->ended()) return group_state_->status();
    const int error = connect(peer, lane, deadline_ns, deadline_ns, fd);
    if (error == 0) return {};
    switch (error) {
      case ECONNREFUSED:  // its listener was open before it published its address
        if (++refusals >= 3) return fail(LAKH_C3_DIED, name + " refuses connections: its process died");
        break;
      case EACCES:
        return another_secret(peer);
      case EADDRNOTAVAIL:
        return fail(LAKH_C3_SYSTEM, name + ": not an address");
      case EMFILE:
      case ENFILE:
        return fail(LAKH_C3_SYSTEM, std::string("socket: ") + std::strerror(error));
      case EPIPE:  // it closed the connection: it died, or dropped this one among too many
      case ECANCELED:
      case EAGAIN:
      case EINTR:
        break;
      default:
        return fail(LAKH_C3_UNREACHABLE, name + " cannot be reached: " + std::strerror(error));
    }
    if (now_ns() > deadline_ns) return fail(LAKH_C3_TIMEOUT, "timed out connecting to " + name);
    ::usleep(50000);
  }
}

// This rank waits for a lower rank to connect. Checks that it is alive and that its group has not ended, which may happen
// before it has connected. No answer is not an error: it may be stopped.
Status Links::probe(int32_t peer) {
  const int64_t deadline_ns = now_ns() + kProbeMs * 1000000LL;
  ControlMessage message{};
  int fd;
  const int error = connect(peer, kStatusQuery, deadline_ns, deadline_ns, &fd);
  if (error == 0) {
    if (receive(fd, &message, sizeof message, deadline_ns) != 0) message.kind = 0;
    ::close(fd);
    if (message.kind == 2 && is_valid(message)) return group_state_->end(fail(message.code, readable(message.text)), message.dead);
    return {};
  }
  if (error == EACCES) return group_state_->end(another_secret(peer), -1);
  const bool died = error == ECONNREFUSED;
  if (!died && error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH) return {};
  const std::string name = "rank " + std::to_string(peer) + " at " + addresses_[static_cast<size_t>(peer)];
  const std::string how = died ? " refuses connections: its process died" : std::string(" cannot be reached: ") + std::strerror(error);
  return group_state_->end(fail(died ? LAKH_C3_DIED : LAKH_C3_UNREACHABLE, name + how), peer);
}

bool Links::may_dial(int32_t peer, int lane) const {
  return peer >= 0 && peer < rank_ && lane >= kControl && lane < kFirstStream + kMaxStreams;
}

bool Links::is_valid(const ControlMessage &message) const {
  if (message.kind != 2) return message.kind <= 1;
  return message.code > LAKH_C3_OK && message.code <= LAKH_C3_LEFT && message.dead >= -1 && message.dead < size_;
}

void Links::on_connected(int32_t peer, int lane, int fd) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto &fds = peers_[peer].fds;
    if (fds.count(lane) != 0) {  // unexpected second connection: keep the first
      ::close(fd);
      return;
    }
    fds[lane] = fd;
    connections_.fetch_add(1);
    if (lane >= kFirstStream) {
      const auto found = wires_.find(peer);
      const int bytes = static_cast<int>((found == wires_.end() ? wire_ : found->second).in_flight_bytes);
      ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
      ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    }
  }
  changed_.notify_all();
  if (lane == kControl) endpoint::watch(this, peer, fd);
}

Status Links::set_wire(int32_t peer, const Wire &wire) {
  const bool fits = wire.streams >= 1 && wire.streams <= kMaxStreams && wire.chunk_bytes >= 64 && wire.chunk_bytes % 64 == 0 &&
                    wire.in_flight_bytes >= 4096 && wire.in_flight_bytes <= INT32_MAX;
  if (!fits || peer < 0 || peer >= size_) {
    return fail(LAKH_C3_INVALID, "wire to rank " + std::to_string(peer) + ": 1 to 64 streams, chunks of whole 64 bytes, at least 4 KB in flight");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  wires_[peer] = wire;
  return {};
}

Wire Links::wire(int32_t peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = wires_.find(peer);
  return found == wires_.end() ? wire_ : found->second;
}

bool Links::has_left(int32_t peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[peer].left;
}

std::vector<std::pair<int32_t, int>> Links::controls() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<int32_t, int>> found;
  for (const auto &[peer, state] : peers_) {
    const auto control = state.fds.find(kControl);
    if (control != state.fds.end() && !state.left) found.emplace_back(peer, control->second);
  }
  return found;
}

void Links::control_readable(int32_t peer, int fd) {
  char buffer[4096];
  const ssize_t n = ::recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    if (n == 0) {
      on_peer_lost(peer, LAKH_C3_DIED, "closed its connection: its process died");
    } else {
      on_socket_error(peer, errno);
    }
    return;
  }
  std::vector<ControlMessage> messages;
  bool valid = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string &inbox = peers_[peer].inbox;
    inbox.append(buffer, static_cast<size_t>(n));
    while (inbox.size() >= sizeof(ControlMessage)) {
      ControlMessage message;
      std::memcpy(&message, inbox.data(), sizeof message);
      inbox.erase(0, sizeof message);
      valid = valid && is_valid(message);
      if (!valid) break;
      messages.push_back(message);
      if (message.kind == 1) peers_[peer].left = true;
    }
  }
  for (const ControlMessage &message : messages) {
    if (message.kind == 2) group_state_->end(fail(message.code, readable(message.text)), message.dead);
  }
  if (!valid) on_peer_lost(peer, LAKH_C3_DISCONNECTED, "sends data that is not c3");
  changed_.notify_all();
}

void Links::on_socket_error(int32_t peer, int error) {
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    on_peer_lost(peer, LAKH_C3_UNREACHABLE, "sends no acknowledgements: its link is cut");
  } else {
    on_peer_lost(peer, LAKH_C3_DISCONNECTED, std::string("lost its connection: ") + std::strerror(error));
  }
}

void Links::on_peer_lost(int32_t peer, int32_t code, const std::string &how) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (peers_[peer].left || closing_.load()) return;
    peers_[peer].left = true;
  }
  const std::string at = static_cast<size_t>(peer) < addresses_.size() ? " at " + addresses_[static_cast<size_t>(peer)] : "";
  group_state_->end(fail(code, "rank " + std::to_string(peer) + at + " " + how), peer);
}

void Links::send_heartbeats() {
  ControlMessage message{};
  for (const auto &[peer, fd] : controls()) {
    if (::send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != EINTR) {
      on_socket_error(peer, errno);
    }
  }
}

void Links::send_goodbye() {
  closing_.store(true);
  ControlMessage message{};
  message.kind = 1;
  for (const auto &[peer, fd] : controls()) {
    if (::send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) continue;
  }
}

void Links::broadcast_failure(const Status &why, int32_t dead) {
  ControlMessage message{2, why.code, dead, {}};
  std::strncpy(message.text, why.text.c_str(), sizeof message.text - 1);
  for (const auto &[peer, fd] : controls()) {
    if (::send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) continue;
  }
  changed_.notify_all();
}

Status Links::shape(int32_t peer, const char *file, int32_t link, double bytes_per_s, int64_t delay_us) {
  const std::lock_guard<std::mutex> lock(mutex_);
  void *&memory = shaper_files_[file];
  if (memory == nullptr) {
    const int fd = ::open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ::ftruncate(fd, 4096) != 0) {
      if (fd >= 0) ::close(fd);
      shaper_files_.erase(file);
      return fail(LAKH_C3_SYSTEM, std::string(file) + ": " + std::strerror(errno));
    }
    memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) {
      shaper_files_.erase(file);
      return fail(LAKH_C3_SYSTEM, std::string(file) + ": mmap: " + std::strerror(errno));
    }
  }
  if (link < 0 || link >= 512 || bytes_per_s <= 0 || delay_us < 0) return fail(LAKH_C3_INVALID, "an emulated link is out of range");
  shapers_[peer].hops.push_back({static_cast<std::atomic<int64_t> *>(memory) + link, bytes_per_s});
  shapers_[peer].delay_ns += delay_us * 1000;
  return {};
}

const Shaper *Links::shaper(int32_t peer) const {
  const auto found = shapers_.find(peer);
  return found == shapers_.end() ? nullptr : &found->second;
}

}  // namespace lakh
