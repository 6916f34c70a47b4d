#include "messages.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>

#include "clock.h"

namespace lakh {
namespace {

struct Envelope {
  uint32_t magic;
  int32_t tag;
  int64_t bytes;
};
constexpr uint32_t kMagic = 0x6c63336d;
constexpr int kTickMs = 50;
constexpr int64_t kGrowBytes = 1 << 20;
constexpr int64_t kStashBytes = int64_t{8} << 30;  // of one peer's messages that no receive has asked for yet

}  // namespace

Messages::~Messages() { stop(); }

void Messages::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (auto &[key, worker] : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

int64_t Messages::send(int32_t peer, int32_t tag, const void *data, int64_t bytes) {
  return post(2 * peer + 1, Job{0, peer, tag, static_cast<char *>(const_cast<void *>(data)), bytes, nullptr, true});
}

int64_t Messages::receive(int32_t peer, int32_t tag, void *data, int64_t bytes, int32_t *source) {
  // Receives from any rank share a worker; do not mix them with receives from a single peer in one phase.
  return post(2 * peer, Job{0, peer, tag, static_cast<char *>(data), bytes, source, false});
}

int64_t Messages::post(int key, Job job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  job.ticket = next_++;
  Worker &worker = workers_[key];
  worker.jobs.push_back(job);
  if (!worker.thread.joinable()) worker.thread = std::thread([this, key] { work(key); });
  changed_.notify_all();
  return job.ticket;
}

void Messages::work(int key) {
  while (true) {
    Job job;
    Worker *worker;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      worker = &workers_[key];
      changed_.wait(lock, [&] { return stopping_ || !worker->jobs.empty(); });
      if (worker->jobs.empty()) return;
      job = worker->jobs.front();
      worker->jobs.pop_front();
    }
    const Status status = group_state_->ended() ? group_state_->status() : transfer_guarded(worker, job);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_[job.ticket] = status;
    }
    changed_.notify_all();
  }
}

// An exception in this thread would end the process.
Status Messages::transfer_guarded(Worker *worker, const Job &job) {
  try {
    return transfer(worker, job);
  } catch (const std::exception &error) {
    return group_state_->end(fail(LAKH_C3_SYSTEM, "a message of rank " + std::to_string(job.peer) + ": " + error.what()), -1);
  }
}

Status Messages::transfer(Worker *worker, const Job &job) {
  const int64_t deadline = now_ns() + timeout_ms_->load() * 1000000;
  Status status;
  if (job.peer < 0) {
    status = receive_any(job, deadline);
  } else {
    int fd;
    status = links_->lane(job.peer, kMessages, deadline, &fd);
    if (status.ok() && job.out) {
      Envelope envelope{kMagic, job.tag, job.bytes};
      status = move(fd, reinterpret_cast<char *>(&envelope), sizeof envelope, true, job.peer, deadline);
      if (status.ok()) status = move(fd, job.data, job.bytes, true, job.peer, deadline);
    } else if (status.ok()) {
      status = receive_matching(&worker->stash, job, fd, deadline);
    }
  }
  if (!status.ok() && status.code != LAKH_C3_INVALID) return group_state_->end(status, is_peer_loss(status.code) ? job.peer : -1);
  return status;
}

Status Messages::receive_matching(std::deque<Stash> *stash, const Job &job, int fd, int64_t deadline_ns) {
  const auto wrong = [&](int64_t sent) {
    return fail(LAKH_C3_INVALID, "recv: rank " + std::to_string(job.peer) + " sent " + std::to_string(sent) + " bytes and " +
                                     std::to_string(job.bytes) + " are expected");
  };
  for (auto it = stash->begin(); it != stash->end(); ++it) {
    if (it->tag != job.tag) continue;
    const int64_t sent = static_cast<int64_t>(it->data.size());
    if (sent == job.bytes && sent > 0) std::memcpy(job.data, it->data.data(), it->data.size());
    stash->erase(it);
    if (sent == job.bytes && job.source != nullptr) *job.source = job.peer;
    return sent == job.bytes ? Status{} : wrong(sent);
  }
  while (true) {
    Envelope envelope{};
    Status status = move(fd, reinterpret_cast<char *>(&envelope), sizeof envelope, false, job.peer, deadline_ns);
    if (!status.ok()) return status;
    if (envelope.magic != kMagic || envelope.bytes < 0) return fail(LAKH_C3_SYSTEM, "rank " + std::to_string(job.peer) + " sends data that is not c3");
    if (envelope.tag == job.tag && envelope.bytes == job.bytes) {
      status = move(fd, job.data, job.bytes, false, job.peer, deadline_ns);
      if (status.ok() && job.source != nullptr) *job.source = job.peer;
      return status;
    }
    int64_t stashed = 0;
    for (const Stash &one : *stash) stashed += static_cast<int64_t>(one.data.size());
    if (envelope.bytes > kStashBytes - stashed) {
      return fail(LAKH_C3_SYSTEM, "rank " + std::to_string(job.peer) + " announces " + std::to_string(envelope.bytes) +
                                      " bytes that no receive expects; at most 8 GiB can wait");
    }
    Stash arriving{envelope.tag, {}};
    for (int64_t done = 0; done < envelope.bytes;) {  // grows with the data that arrives, not with the announced length
      const int64_t more = std::min(envelope.bytes - done, std::max(kGrowBytes, done));
      arriving.data.resize(static_cast<size_t>(done + more));
      status = move(fd, arriving.data.data() + done, more, false, job.peer, deadline_ns);
      if (!status.ok()) return status;
      done += more;
    }
    stash->push_back(std::move(arriving));
    if (envelope.tag == job.tag) {
      stash->pop_back();
      return wrong(envelope.bytes);
    }
  }
}

Status Messages::receive_any(const Job &job, int64_t deadline_ns) {
  std::map<int32_t, int> fds;
  while (true) {
    for (int32_t peer = 0; peer < links_->size(); ++peer) {
      if (peer == links_->rank() || fds.count(peer) != 0) continue;
      int fd;
      // Higher ranks wait for this rank to dial; lower ones dial when they send.
      const int64_t lane_deadline_ns = links_->rank() < peer ? deadline_ns : 0;
      const Status status = links_->lane(peer, kMessages, lane_deadline_ns, &fd);
      if (status.ok()) fds[peer] = fd;
      else if (is_peer_loss(status.code)) return status;
    }
    if (group_state_->ended()) return group_state_->status();
    for (auto &[peer, fd] : fds) {
      Worker *worker;
      bool stashed = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        worker = &workers_[2 * peer];
        for (const Stash &stash : worker->stash) stashed = stashed || stash.tag == job.tag;
      }
      pollfd ready = {fd, POLLIN, 0};
      if (!stashed && ::poll(&ready, 1, 0) != 1) continue;
      Job one = job;
      one.peer = peer;
      return receive_matching(&worker->stash, one, fd, deadline_ns);
    }
    if (now_ns() > deadline_ns) return fail(LAKH_C3_TIMEOUT, "recv from any rank: timed out");
    ::usleep(200);
  }
}

Status Messages::move(int fd, char *data, int64_t bytes, bool out, int32_t peer, int64_t deadline_ns) {
  int64_t done = 0;
  while (done < bytes) {
    const size_t chunk = static_cast<size_t>(bytes - done);
    const ssize_t n = out ? ::send(fd, data + done, chunk, MSG_NOSIGNAL | MSG_DONTWAIT) : ::recv(fd, data + done, chunk, MSG_DONTWAIT);
    if (n > 0) {
      done += n;
      continue;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (group_state_->ended()) return group_state_->status();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) return fail(LAKH_C3_ABORTED, "the group was closed");
      }
      if (now_ns() > deadline_ns) {
        return fail(LAKH_C3_TIMEOUT, std::string(out ? "send to" : "recv from") + " rank " + std::to_string(peer) + ": timed out");
      }
      pollfd ready = {fd, static_cast<short>(out ? POLLOUT : POLLIN), 0};
      ::poll(&ready, 1, kTickMs);
      continue;
    }
    return fail(LAKH_C3_DISCONNECTED, "rank " + std::to_string(peer) + (n == 0 ? " closed its connection" : std::string(" lost its connection: ") + std::strerror(errno)));
  }
  return {};
}

bool Messages::done(int64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_.count(ticket) != 0;
}

Status Messages::wait(int64_t ticket, int64_t timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool finished = changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return done_.count(ticket) != 0; });
  if (!finished) return fail(LAKH_C3_TIMEOUT, "a message: timed out");
  const Status status = done_[ticket];
  done_.erase(ticket);
  return status;
}

}  // namespace lakh
