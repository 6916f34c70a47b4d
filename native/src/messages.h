// Messages between two ranks: ordered per direction, matched by tag, one thread per direction.
//
// Sends and receives never wait for each other, so two ranks may both send first and receive afterwards.
#ifndef LAKH_MESSAGES_H
#define LAKH_MESSAGES_H

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "links.h"

namespace lakh {

class Messages {
 public:
  Messages(GroupState *group_state, Links *links, std::atomic<int64_t> *timeout_ms) : group_state_(group_state), links_(links), timeout_ms_(timeout_ms) {}
  ~Messages();

  int64_t send(int32_t peer, int32_t tag, const void *data, int64_t bytes);
  int64_t receive(int32_t peer, int32_t tag, void *data, int64_t bytes, int32_t *source);
  Status wait(int64_t ticket, int64_t timeout_ms);
  bool done(int64_t ticket);
  void stop();

 private:
  struct Job {
    int64_t ticket;
    int32_t peer, tag;
    char *data;
    int64_t bytes;
    int32_t *source;
    bool out;
  };
  struct Stash {
    int32_t tag;
    std::vector<char> data;
  };
  struct Worker {
    std::deque<Job> jobs;
    std::deque<Stash> stash;
    std::thread thread;
  };
  int64_t post(int key, Job job);
  void work(int key);
  Status transfer(Worker *worker, const Job &job);
  Status transfer_guarded(Worker *worker, const Job &job);
  Status receive_matching(std::deque<Stash> *stash, const Job &job, int fd, int64_t deadline_ns);
  Status receive_any(const Job &job, int64_t deadline_ns);
  Status move(int fd, char *data, int64_t bytes, bool out, int32_t peer, int64_t deadline_ns);

  GroupState *group_state_;
  Links *links_;
  std::atomic<int64_t> *timeout_ms_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Worker> workers_;  // 2 * peer + out
  std::map<int64_t, Status> done_;
  int64_t next_ = 1;
  bool stopping_ = false;
};

}  // namespace lakh
#endif
