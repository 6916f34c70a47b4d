#include "endpoint.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace lakh {
namespace {

constexpr int64_t kHeartbeatNs = 250000000;
constexpr unsigned kUnacknowledgedMs = 1500;   // a link without acknowledgements for this time is cut
constexpr int64_t kHelloTimeoutNs = 5000000000;
constexpr size_t kDepartedKept = 256;

class Endpoint {
 public:
  static Endpoint &get() {
    static Endpoint *instance = new Endpoint;
    return *instance;
  }

  int32_t listen(const char *address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ == ::getpid()) return port_;
    owner_ = ::getpid();  // after a fork the child has no thread and must not share the socket
    port_ = 0;
    groups_.clear();
    parked_.clear();
    {
      const std::lock_guard<std::mutex> watching(watch_mutex_);
      if (epoll_ >= 0) ::close(epoll_);  // a copy after a fork; the parent keeps its own
      watched_.clear();
      epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    }
    const bool any = address == nullptr || *address == '\0';
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    hints.ai_family = any ? AF_INET : AF_UNSPEC;
    if (::getaddrinfo(any ? nullptr : address, "0", &hints, &found) != 0) return 0;
    listener_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool bound = listener_ >= 0 && ::bind(listener_, found->ai_addr, found->ai_addrlen) == 0 && ::listen(listener_, 4096) == 0;
    ::freeaddrinfo(found);
    sockaddr_storage name{};
    socklen_t length = sizeof name;
    if (!bound || epoll_ < 0 || ::getsockname(listener_, reinterpret_cast<sockaddr *>(&name), &length) != 0) {
      if (listener_ >= 0) ::close(listener_);
      owner_ = 0;
      return 0;
    }
    port_ = ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&name)->sin6_port
                                              : reinterpret_cast<sockaddr_in *>(&name)->sin_port);
    subscribe(listener_);
    std::thread([this] { serve(); }).detach();
    return port_;
  }

  void add(Links *links) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(links);
    for (auto it = parked_.begin(); it != parked_.end();) {
      if (addressed_to(it->hello, links)) {
        links->on_connected(it->hello.from, it->hello.lane, it->fd);
        it = parked_.erase(it);
      } else {
        ++it;
      }
    }
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
    DepartedGroup gone{{}, links->rank(), why};
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
  struct PendingConnection {
    int fd;
    int64_t since_ns;
    size_t got = 0;
    Hello hello{};
  };

  struct Watched {
    Links *links;
    int32_t peer;
  };

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
    ControlMessage why;
  };

  const ControlMessage *find_departed(const Hello &hello) const {
    for (const DepartedGroup &gone : departed_) {
      if (gone.rank == hello.to && std::memcmp(gone.uuid, hello.uuid, 16) == 0) return &gone.why;
    }
    return nullptr;
  }

  static void reply(int fd, const ControlMessage &message) {
    if (::send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;  // the peer has disconnected
  }

  static bool addressed_to(const Hello &hello, const Links *links) {
    return hello.to == links->rank() && std::memcmp(hello.uuid, links->uuid(), 16) == 0;
  }

  // An iteration costs what its events cost, independent of the number of connections.
  void serve() {
    std::vector<PendingConnection> pending;
    std::vector<epoll_event> events(256);
    int64_t next_heartbeat = now_ns() + kHeartbeatNs;
    while (true) {
      const int64_t left_ms = std::max<int64_t>(0, (next_heartbeat - now_ns()) / 1000000);
      const int ready = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), static_cast<int>(left_ms));
      for (int i = 0; i < ready; ++i) {
        int fd;
        while (events[i].data.fd == listener_ && (fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
          pending.push_back(PendingConnection{fd, now_ns()});
          subscribe(fd);
        }
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
        const int64_t old = now_ns() - 60000000000;
        parked_.erase(std::remove_if(parked_.begin(), parked_.end(), [&](const PendingConnection &g) {
          if (g.since_ns < old) ::close(g.fd);
          return g.since_ns < old;
        }), parked_.end());
      }
    }
  }

  void handle_hellos(std::vector<PendingConnection> *pending) {
    for (auto it = pending->begin(); it != pending->end();) {
      const ssize_t n = ::read(it->fd, reinterpret_cast<char *>(&it->hello) + it->got, sizeof(Hello) - it->got);
      if (n > 0) it->got += static_cast<size_t>(n);
      const bool gone = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR) || now_ns() - it->since_ns > kHelloTimeoutNs;
      if (it->got == sizeof(Hello)) {
        unsubscribe(it->fd);
        if (it->hello.magic != kHelloMagic) {
          ::close(it->fd);
        } else {
          endpoint::set_options(it->fd, it->hello.lane);
          const std::lock_guard<std::mutex> lock(mutex_);
          const auto group = std::find_if(groups_.begin(), groups_.end(), [&](Links *l) { return addressed_to(it->hello, l); });
          const ControlMessage *over = find_departed(it->hello);
          if (it->hello.lane == kStatusQuery || over != nullptr) {
            ControlMessage message{};
            if (group != groups_.end()) message = (*group)->failure_message();
            reply(it->fd, over != nullptr ? *over : message);
            ::close(it->fd);
          } else if (group != groups_.end()) {
            (*group)->on_connected(it->hello.from, it->hello.lane, it->fd);
          } else {
            parked_.push_back(*it);  // its group is not open here yet
          }
        }
        it = pending->erase(it);
      } else if (gone) {
        unsubscribe(it->fd);
        ::close(it->fd);
        it = pending->erase(it);
      } else {
        ++it;
      }
    }
  }

  std::mutex mutex_;
  pid_t owner_ = 0;
  int32_t port_ = 0;
  int listener_ = -1, epoll_ = -1;
  std::vector<Links *> groups_;
  std::vector<PendingConnection> parked_;
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
  if (lane == kControl) ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

int32_t listen(const char *address) { return Endpoint::get().listen(address); }

void add(Links *links) { Endpoint::get().add(links); }

void remove(Links *links, const ControlMessage &why) { Endpoint::get().remove(links, why); }

void watch(Links *links, int32_t peer, int fd) { Endpoint::get().watch(links, peer, fd); }

}  // namespace endpoint
}  // namespace lakh
