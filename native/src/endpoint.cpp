#include "endpoint.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace lakh {
namespace {

constexpr int64_t kHeartbeatNs = 250000000;
constexpr unsigned kUnacknowledgedMs = 1500;   // a link without acknowledgements for this time is cut
constexpr int64_t kHelloTimeoutNs = 5000000000;
constexpr int64_t kParkedNs = 60000000000;
constexpr size_t kDepartedKept = 256;

// The most unfinished connections, and the most parked ones.
size_t waiting_limit() {
  rlimit descriptors{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &descriptors) == 0 && descriptors.rlim_cur != RLIM_INFINITY;
  return std::max<size_t>(64, known ? descriptors.rlim_cur / 8 : 1 << 16);
}

class Endpoint {
 public:
  static Endpoint &get() {
    static Endpoint *instance = new Endpoint;
    return *instance;
  }

  int32_t listen(const char *address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ != ::getpid()) start();  // after a fork the child has no thread and must not share the sockets
    const std::string name = address == nullptr ? "" : address;
    for (const Listener &one : listeners_) {
      if (one.address == name) return one.port;
    }
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    hints.ai_family = name.empty() ? AF_INET : AF_UNSPEC;
    if (epoll_ < 0 || ::getaddrinfo(name.empty() ? nullptr : name.c_str(), "0", &hints, &found) != 0) return 0;
    const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool bound = fd >= 0 && ::bind(fd, found->ai_addr, found->ai_addrlen) == 0 && ::listen(fd, 4096) == 0;
    ::freeaddrinfo(found);
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    if (!bound || ::getsockname(fd, reinterpret_cast<sockaddr *>(&local), &length) != 0) {
      if (fd >= 0) ::close(fd);
      return 0;
    }
    const int32_t port = ntohs(local.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&local)->sin6_port
                                                           : reinterpret_cast<sockaddr_in *>(&local)->sin_port);
    listeners_.push_back(Listener{name, fd, port});
    subscribe(fd);
    return port;
  }

  void add(Links *links) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(links);
    std::deque<PendingConnection> others;
    for (const PendingConnection &connection : parked_) {
      if (addressed_to(connection.hello, links)) {
        accept(connection, links);
      } else {
        others.push_back(connection);
      }
    }
    parked_.swap(others);
  }

  void remove(Links *links, const ControlMessage &why) {
    const std::lock_guard<std::mutex> lock(mutex_);  // the thread holds it while it uses a group
    {
      const std::lock_guard<std::mutex> watching(watch_mutex_);
      for (auto it = watched_.begin(); it != watched_.end();) {
        if (it->second.links == links) {
          unsubscribe(it->first);
          it = watched_.erase(it);
        } else {
          ++it;
        }
      }
    }
    const size_t before = groups_.size();
    groups_.erase(std::remove(groups_.begin(), groups_.end(), links), groups_.end());
    if (groups_.size() == before) return;  // it was never added
    DepartedGroup gone{{}, links->rank(), links->secret(), why};
    std::memcpy(gone.uuid, links->uuid(), 16);
    departed_.push_back(gone);
    if (departed_.size() > kDepartedKept) departed_.pop_front();
  }

  void watch(Links *links, int32_t peer, int fd) {
    const std::lock_guard<std::mutex> lock(watch_mutex_);
    watched_[fd] = Watched{links, peer};
    subscribe(fd);
  }

 private:
  struct Listener {
    std::string address;
    int fd;
    int32_t port;
  };

  struct PendingConnection {
    int fd;
    int64_t since_ns;
    Challenge challenge;
    size_t got = 0;
    Hello hello{};
  };

  struct Watched {
    Links *links;
    int32_t peer;
  };

  void start() {
    owner_ = ::getpid();
    listeners_.clear();
    groups_.clear();
    parked_.clear();
    {
      const std::lock_guard<std::mutex> watching(watch_mutex_);
      if (epoll_ >= 0) ::close(epoll_);  // a copy after a fork; the parent keeps its own
      watched_.clear();
      epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    }
    std::thread([this] { serve(); }).detach();
  }

  bool is_listener(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(listeners_.begin(), listeners_.end(), [&](const Listener &one) { return one.fd == fd; });
  }

  void subscribe(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }

  // Always before the descriptor is closed: a fork may keep the connection open, and its events would continue.
  void unsubscribe(int fd) { ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

  bool find_watched(int fd, Watched *found) {
    const std::lock_guard<std::mutex> lock(watch_mutex_);
    const auto at = watched_.find(fd);
    if (at == watched_.end()) return false;
    *found = at->second;
    return true;
  }

  // The end of a removed group, for peers that were not connected at the time.
  struct DepartedGroup {
    uint8_t uuid[16];
    int32_t rank;
    Secret secret;
    ControlMessage why;
  };

  const DepartedGroup *find_departed(const Hello &hello) const {
    for (const DepartedGroup &gone : departed_) {
      if (gone.rank == hello.to && std::memcmp(gone.uuid, hello.uuid, 16) == 0) return &gone;
    }
    return nullptr;
  }

  template <class Message>
  static void reply(int fd, const Message &message) {
    if (::send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;  // the peer has disconnected
  }

  // Sends the Welcome if the dialler has the secret; else denies the connection and closes it.
  static bool welcome(const PendingConnection &connection, const Secret &secret) {
    const bool proven = equal_digests(dialler_proof(secret, connection.challenge, connection.hello), connection.hello.proof);
    Welcome answer{proven ? kWelcomeMagic : kDeniedMagic, {}};
    if (proven) answer.proof = listener_proof(secret, connection.challenge, connection.hello);
    reply(connection.fd, answer);
    if (!proven) ::close(connection.fd);
    return proven;
  }

  static void accept(const PendingConnection &connection, Links *links) {
    const Hello &hello = connection.hello;
    if (!welcome(connection, links->secret())) return;
    endpoint::set_options(connection.fd, hello.lane);
    if (links->may_dial(hello.from, hello.lane)) {
      links->on_connected(hello.from, hello.lane, connection.fd);
    } else {
      ::close(connection.fd);
    }
  }

  static bool addressed_to(const Hello &hello, const Links *links) {
    return hello.to == links->rank() && std::memcmp(hello.uuid, links->uuid(), 16) == 0;
  }

  // An iteration costs what its events cost, independent of the number of connections.
  void serve() {
    std::deque<PendingConnection> pending;
    std::vector<epoll_event> events(256);
    int64_t next_heartbeat = now_ns() + kHeartbeatNs;
    while (true) {
      const int64_t left_ms = std::max<int64_t>(0, (next_heartbeat - now_ns()) / 1000000);
      const int ready = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), static_cast<int>(left_ms));
      for (int i = 0; i < ready; ++i) {
        if (is_listener(events[i].data.fd)) accept_all(events[i].data.fd, &pending);
      }
      handle_hellos(&pending);
      const std::lock_guard<std::mutex> lock(mutex_);  // no group is removed while it is notified
      for (int i = 0; i < ready; ++i) {
        const int fd = events[i].data.fd;
        Watched watched{};
        if (!find_watched(fd, &watched)) continue;
        watched.links->control_readable(watched.peer, fd);
        if (!watched.links->has_left(watched.peer)) continue;
        const std::lock_guard<std::mutex> watching(watch_mutex_);
        unsubscribe(fd);
        watched_.erase(fd);
      }
      if (now_ns() >= next_heartbeat) {
        for (Links *links : groups_) links->send_heartbeats();
        next_heartbeat = now_ns() + kHeartbeatNs;
        while (!parked_.empty() && parked_.front().since_ns < now_ns() - kParkedNs) close_oldest(&parked_);
      }
    }
  }

  static void close_oldest(std::deque<PendingConnection> *connections) {
    ::close(connections->front().fd);
    connections->pop_front();
  }

  void accept_all(int listener, std::deque<PendingConnection> *pending) {
    const size_t limit = waiting_limit();
    while (true) {
      const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0 && (errno == EMFILE || errno == ENFILE)) ::usleep(10000);  // the listener stays ready: do not spin
      if (fd < 0) return;
      PendingConnection connection{fd, now_ns(), Challenge{kHelloMagic, random_nonce()}};
      reply(fd, connection.challenge);
      if (pending->size() >= limit) {
        unsubscribe(pending->front().fd);
        close_oldest(pending);
      }
      pending->push_back(connection);
      subscribe(fd);
    }
  }

  void handle_hellos(std::deque<PendingConnection> *pending) {
    for (auto it = pending->begin(); it != pending->end();) {
      const ssize_t n = ::read(it->fd, reinterpret_cast<char *>(&it->hello) + it->got, sizeof(Hello) - it->got);
      if (n > 0) it->got += static_cast<size_t>(n);
      const bool gone = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR) || now_ns() - it->since_ns > kHelloTimeoutNs;
      const bool complete = it->got == sizeof(Hello);
      if (!complete && !gone) {
        ++it;
        continue;
      }
      unsubscribe(it->fd);
      if (complete && it->hello.magic == kHelloMagic) {
        handle_hello(*it);
      } else {
        ::close(it->fd);
      }
      it = pending->erase(it);
    }
  }

  void handle_hello(const PendingConnection &connection) {
    const Hello &hello = connection.hello;
    const bool query = hello.lane == kStatusQuery;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto group = std::find_if(groups_.begin(), groups_.end(), [&](Links *l) { return addressed_to(hello, l); });
    const DepartedGroup *over = find_departed(hello);
    if (over != nullptr || (query && group != groups_.end())) {
      if (!welcome(connection, over != nullptr ? over->secret : (*group)->secret())) return;
      reply(connection.fd, over != nullptr ? over->why : (*group)->failure_message());
      ::close(connection.fd);
    } else if (group != groups_.end()) {
      accept(connection, *group);
    } else if (query) {
      ::close(connection.fd);
    } else {  // its group is not open here yet
      if (parked_.size() >= waiting_limit()) close_oldest(&parked_);
      parked_.push_back(connection);
    }
  }

  std::mutex mutex_;
  pid_t owner_ = 0;
  int epoll_ = -1;
  std::vector<Listener> listeners_;
  std::vector<Links *> groups_;
  std::deque<PendingConnection> parked_;  // the oldest first
  std::deque<DepartedGroup> departed_;
  std::mutex watch_mutex_;  // taken last, also by threads that dial
  std::unordered_map<int, Watched> watched_;
};

}  // namespace

namespace endpoint {

void set_options(int fd, int lane) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  const unsigned limit = kUnacknowledgedMs;
  if (lane == kControl) {
    ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit);
    // Detects a cut link while the dialler waits for the Welcome, before heartbeats begin.
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &one, sizeof one);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &one, sizeof one);
  }
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

int32_t listen(const char *address) { return Endpoint::get().listen(address); }

void add(Links *links) { Endpoint::get().add(links); }

void remove(Links *links, const ControlMessage &why) { Endpoint::get().remove(links, why); }

void watch(Links *links, int32_t peer, int fd) { Endpoint::get().watch(links, peer, fd); }

}  // namespace endpoint
}  // namespace lakh
