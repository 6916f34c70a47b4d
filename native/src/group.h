// One rank's communicator: the ranks on this host, the ranks elsewhere, and the queue of its operations.
//
// Operations run one after another in the order of their calls: in the caller's thread if the queue is empty, else in the
// group's thread, which the first asynchronous call starts.
#ifndef LAKH_GROUP_H
#define LAKH_GROUP_H

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "exchange.h"
#include "group_state.h"
#include "host_ranks.h"
#include "links.h"
#include "messages.h"

struct lakh_c3_group {
 public:
  lakh_c3_group(const uint8_t uuid[16], const lakh::Secret &secret, int32_t rank, int32_t size);
  ~lakh_c3_group();

  lakh::Status open(const uint8_t uuid[16]) { return host.open(uuid); }
  lakh::Status join(const int32_t *hosts, const int32_t *pids, const int32_t *memories, const char *const *addresses,
                    int64_t timeout, int32_t streams, int64_t single_copy_from_bytes);
  lakh::Status run(const lakh_c3_call &call, int64_t *ticket);
  lakh::Status wait(int64_t ticket, int64_t timeout);
  bool done(int64_t ticket);
  void close();

  lakh::GroupState group_state;
  lakh::HostRanks host;
  lakh::Links links;
  std::atomic<int64_t> timeout_ms{600000};
  lakh::Messages messages;
  std::atomic<uint64_t> operations{0}, bytes_in{0}, sent{0}, received{0};
  const int32_t rank, size;

 private:
  struct Job {
    int64_t ticket;
    lakh_c3_call call;
  };
  lakh::Status execute(const lakh_c3_call &call);
  lakh::Status validate(const lakh_c3_call &call) const;
  lakh::Status run_schedule(const lakh_c3_call &call, int64_t deadline_ns);
  void work();

  lakh::Exchange exchange_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool busy_ = false, closing_ = false;
  int64_t next_ticket_ = 1, finished_ = 0;
  std::map<int64_t, lakh::Status> failed_;
  std::thread worker_;
  uint32_t number_ = 0;
  std::vector<char> scratch_, landing_;
  std::vector<uint8_t> wire_;
};

#endif
