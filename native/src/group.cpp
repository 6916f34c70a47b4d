#include "group.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "codec.h"
#include "reduce.h"

using lakh::fail;
using lakh::Status;

lakh_c3_group::lakh_c3_group(const uint8_t uuid[16], const lakh::Secret &secret, int32_t rank_, int32_t size_)
    : host(&group_state, rank_), links(&group_state, uuid, secret, rank_, size_), messages(&group_state, &links, &timeout_ms), rank(rank_), size(size_),
      exchange_(&group_state, &links, &sent, &received, &host.waited_us) {
  host.waited_us = std::vector<std::atomic<uint64_t>>(static_cast<size_t>(size_));
  group_state.on_end = [this](const Status &why, int32_t dead) {
    host.publish_failure(why, dead);
    links.broadcast_failure(why, dead);
    changed_.notify_all();
  };
}

lakh_c3_group::~lakh_c3_group() { close(); }

Status lakh_c3_group::join(const int32_t *hosts, const int32_t *pids, const int32_t *memories, const char *const *addresses,
                           int64_t timeout, int32_t streams, int64_t single_copy_from_bytes) {
  timeout_ms.store(timeout);
  std::vector<int32_t> ranks, host_pids, host_memories;
  std::vector<std::string> where;
  for (int32_t r = 0; r < size; ++r) {
    where.emplace_back(addresses[r] != nullptr ? addresses[r] : "");
    if (hosts[r] != hosts[rank]) continue;
    ranks.push_back(r);
    host_pids.push_back(pids[r]);
    host_memories.push_back(memories[r]);
  }
  const size_t from = single_copy_from_bytes < 0 ? SIZE_MAX : static_cast<size_t>(single_copy_from_bytes);
  const Status status = host.attach(ranks, host_pids, host_memories, from);
  if (!status.ok()) return status;
  links.join(std::move(where), streams);
  return {};
}

Status lakh_c3_group::validate(const lakh_c3_call &call) const {
  const bool reduces = call.operation == LAKH_C3_ALL_REDUCE || call.operation == LAKH_C3_REDUCE_SCATTER || call.operation == LAKH_C3_REDUCE;
  if (call.operation != LAKH_C3_BARRIER && lakh::element_bytes(call.dtype) == 0) return fail(LAKH_C3_INVALID, "unknown element type");
  if (reduces && !lakh::reducible(call.dtype, call.op)) return fail(LAKH_C3_INVALID, "this operator does not support this element type");
  if (call.count < 0) return fail(LAKH_C3_INVALID, "negative number of elements");
  if (call.root >= size) return fail(LAKH_C3_INVALID, "root is not a rank of the group");
  return {};
}

Status lakh_c3_group::run(const lakh_c3_call &call, int64_t *ticket) {
  const Status invalid = validate(call);
  if (!invalid.ok()) return invalid;
  std::unique_lock<std::mutex> lock(mutex_);
  if (group_state.ended()) return group_state.status();
  if (ticket == nullptr && jobs_.empty() && !busy_) {
    busy_ = true;
    lock.unlock();
    const Status status = execute(call);
    lock.lock();
    busy_ = false;
    if (!jobs_.empty() || closing_) changed_.notify_all();
    return status;
  }
  const int64_t number = next_ticket_++;
  jobs_.push_back(Job{number, call});
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
  if (ticket != nullptr) {
    *ticket = number;
    return {};
  }
  lock.unlock();
  return wait(number, INT64_MAX / 4000000);
}

void lakh_c3_group::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return (closing_ && jobs_.empty()) || (!jobs_.empty() && !busy_); });
    if (jobs_.empty()) return;
    const Job job = jobs_.front();
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    const Status status = execute(job.call);
    lock.lock();
    busy_ = false;
    finished_ = job.ticket;
    if (!status.ok()) failed_[job.ticket] = status;
    changed_.notify_all();
  }
}

Status lakh_c3_group::wait(int64_t ticket, int64_t timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout), [&] { return finished_ >= ticket; })) {
    return fail(LAKH_C3_TIMEOUT, "the operation has not completed");
  }
  const auto found = failed_.find(ticket);
  return found == failed_.end() ? Status{} : found->second;
}

bool lakh_c3_group::done(int64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_ >= ticket;
}

void lakh_c3_group::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  links.send_goodbye();
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();  // every operation has a deadline
  messages.stop();
  host.leave();
}

Status lakh_c3_group::execute(const lakh_c3_call &call) {
  if (group_state.ended()) return group_state.status();
  ++number_;
  operations.fetch_add(1, std::memory_order_relaxed);
  bytes_in.fetch_add(static_cast<uint64_t>(call.count) * lakh::element_bytes(call.dtype), std::memory_order_relaxed);
  const int64_t deadline = lakh::now_ns() + timeout_ms.load() * 1000000;
  if (call.steps != nullptr || call.operation == LAKH_C3_SCHEDULE) return run_schedule(call, deadline);  // also without steps
  if (host.size() == size) return host.run(call, deadline);
  return fail(LAKH_C3_INVALID, "ranks on several hosts require a schedule");
}

Status lakh_c3_group::run_schedule(const lakh_c3_call &call, int64_t deadline_ns) {
  const int64_t width = static_cast<int64_t>(lakh::element_bytes(call.dtype));
  const int32_t op = call.op == LAKH_C3_AVG ? LAKH_C3_SUM : call.op;
  if (static_cast<int64_t>(scratch_.size()) < call.scratch_count * width) scratch_.resize(static_cast<size_t>(call.scratch_count * width));
  if (static_cast<int64_t>(wire_.size()) < call.wire_bytes) wire_.resize(static_cast<size_t>(call.wire_bytes));
  char *const buffers[] = {static_cast<char *>(call.output), static_cast<char *>(const_cast<void *>(call.input)), scratch_.data(),
                           reinterpret_cast<char *>(wire_.data())};
  const auto at = [&](int32_t buffer, int64_t offset) { return buffers[buffer] + offset * (buffer == LAKH_C3_BUFFER_WIRE ? 1 : width); };
  const auto bytes = [&](int32_t buffer, int64_t count) { return count * (buffer == LAKH_C3_BUFFER_WIRE ? 1 : width); };
  const char *what = lakh::operation_name(call.operation);
  exchange_.begin(lakh::Header{0, number_, call.operation, call.dtype, call.op, call.root, call.count, 0});

  for (int64_t first = 0; first < call.num_steps;) {
    int64_t end = first;
    int64_t landing = 0;
    while (end < call.num_steps && call.steps[end].stage == call.steps[first].stage) {
      if (call.steps[end].kind == LAKH_C3_STEP_RECV_REDUCE) landing += call.steps[end].count * width;
      ++end;
    }
    if (static_cast<int64_t>(landing_.size()) < landing) landing_.resize(static_cast<size_t>(landing));
    int64_t on_data = 0;
    bool communicates = false;
    for (int64_t i = first; i < end; ++i) {
      const lakh_c3_step &step = call.steps[i];
      char *to = at(step.dst, step.dst_offset);
      char *from = at(step.src, step.src_offset);
      Status status;
      switch (step.kind) {
        case LAKH_C3_STEP_SEND:
          exchange_.send(step.peer, from, bytes(step.src, step.count));
          communicates = true;
          break;
        case LAKH_C3_STEP_RECV:
          exchange_.receive(step.peer, to, bytes(step.dst, step.count));
          communicates = true;
          break;
        case LAKH_C3_STEP_RECV_REDUCE: {
          char *base = landing_.data() + on_data;
          const int32_t dtype = call.dtype;
          on_data += step.count * width;
          exchange_.receive(step.peer, base, step.count * width, [=](char *piece, int64_t n) {
            void *target = to + (piece - base);
            const void *sources[2] = {target, piece};
            lakh::fold(dtype, op, &target, 1, sources, 2, static_cast<size_t>(n / width), 1);
          });
          communicates = true;
          break;
        }
        case LAKH_C3_STEP_COPY:
          if (to != from) std::memmove(to, from, static_cast<size_t>(bytes(step.src, step.count)));
          break;
        case LAKH_C3_STEP_FOLD: {
          std::vector<const void *> sources(static_cast<size_t>(step.fan));
          for (int32_t k = 0; k < step.fan; ++k) sources[static_cast<size_t>(k)] = from + static_cast<int64_t>(k) * step.count * width;
          void *target = to;
          lakh::fold(call.dtype, op, &target, 1, sources.data(), step.fan, static_cast<size_t>(step.count), 1);
          break;
        }
        case LAKH_C3_STEP_HOST_REDUCE_SCATTER:
          status = host.reduce_shares(call.dtype, op, to, step.count, deadline_ns);
          break;
        case LAKH_C3_STEP_HOST_ALL_GATHER:
          status = host.gather_shares(call.dtype, to, step.count, deadline_ns);
          break;
        case LAKH_C3_STEP_HOST_BROADCAST:
          status = host.broadcast(to, bytes(step.dst, step.count), step.fan, deadline_ns);
          break;
        case LAKH_C3_STEP_ENCODE: {
          float *residual = call.residual != nullptr && step.fan == 0 ? call.residual + step.src_offset : nullptr;
          lakh::encode(call.codec, reinterpret_cast<float *>(from), step.count, call.seed + static_cast<uint64_t>(step.src_offset),
                       reinterpret_cast<uint8_t *>(to), residual);
          break;
        }
        case LAKH_C3_STEP_DECODE:
        case LAKH_C3_STEP_DECODE_REDUCE:
          lakh::decode(call.codec, reinterpret_cast<uint8_t *>(from), step.count, reinterpret_cast<float *>(to),
                       step.kind == LAKH_C3_STEP_DECODE_REDUCE);
          break;
        default:
          status = fail(LAKH_C3_INVALID, "a step has an unknown kind");
      }
      if (!status.ok()) return status;
    }
    if (communicates) {
      const Status status = exchange_.finish(deadline_ns, what);
      if (!status.ok()) return status;
    }
    first = end;
  }
  if (call.op == LAKH_C3_AVG && call.operation != LAKH_C3_SCHEDULE) {
    void *target = call.output;
    const void *source = call.output;
    lakh::fold(call.dtype, LAKH_C3_AVG, &target, 1, &source, 1, static_cast<size_t>(call.count), size);
  }
  return {};
}
