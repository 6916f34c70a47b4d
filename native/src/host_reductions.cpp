// Reductions among the ranks of one host. Every rank reduces one part in rank order: all have identical bits.

#include <algorithm>
#include <cstring>

#include "host_ranks.h"
#include "reduce.h"

namespace lakh {
namespace {

constexpr size_t kPieceBytes = kSlotBytes;  // chunk size through the slots
constexpr size_t kBlockBytes = 128 << 10;   // read and reduced while it is in the second-level cache

}  // namespace

// Reduces [begin, ...) of all ranks' input, in rank order, block by block.
Status HostRanks::fold_direct(int32_t dtype, int32_t op, uint64_t begin_bytes, size_t count, char *to) {
  const size_t width = element_bytes(dtype);
  const size_t block = kBlockBytes / width;
  const void **sources = sources_.data();
  std::vector<char *> bases(static_cast<size_t>(size()));
  for (int i = 0; i < size(); ++i) {
    bases[i] = i == me_ ? reinterpret_cast<char *>(announced(i).address)
                        : (announced(i).in_slot ? slot(i) : local_address(i));
    if (i == me_ && announced(i).in_slot) bases[i] = slot(i);
  }
  scratch_.resize(std::max(scratch_.size(), kBlockBytes * static_cast<size_t>(size())));
  for (size_t at = 0; at < count; at += block) {
    const size_t n = std::min(block, count - at);
    for (int i = 0; i < size(); ++i) {
      if (bases[i] != nullptr) {
        sources[i] = bases[i] + begin_bytes + at * width;
        continue;
      }
      char *landing = scratch_.data() + kBlockBytes * static_cast<size_t>(i);
      const Status status = read(i, begin_bytes + at * width, n * width, landing);
      if (!status.ok()) return status;
      sources[i] = landing;
    }
    void *destination = to + at * width;
    fold(dtype, op, &destination, 1, sources, size(), n, size());
  }
  return {};
}

Status HostRanks::all_reduce_in_slots(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns) {
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  Announcement mine = describe(LAKH_C3_ALL_REDUCE, dtype, op, -1, count, data, 0);
  mine.in_slot = 1;
  const size_t begin = static_cast<size_t>(share(count, me_)), end = static_cast<size_t>(share(count, me_ + 1));
  if (bytes <= kTinyBytes) {
    if (bytes > 0) std::memcpy(slot(me_), data, bytes);
  } else {  // no other rank needs this rank's own part
    std::memcpy(slot(me_), data, begin * width);
    std::memcpy(slot(me_) + end * width, data + end * width, bytes - end * width);
  }
  Status status = announce(mine, deadline_ns, "all_reduce");
  if (!status.ok()) return status;
  const void **sources = sources_.data();
  if (bytes <= kTinyBytes) {
    for (int i = 0; i < size(); ++i) sources[i] = slot(i);
    void *destination = data;
    fold(dtype, op, &destination, 1, sources, size(), static_cast<size_t>(count), size());
    ++seq_;
    return {};
  }
  for (int i = 0; i < size(); ++i) sources[i] = (i == me_ ? data : slot(i)) + begin * width;
  void *destinations[2] = {slot(me_) + begin * width, data + begin * width};
  fold(dtype, op, destinations, 2, sources, size(), end - begin, size());
  advance(2);
  for (int k = 1; k < size(); ++k) {
    const int i = (me_ + k) % size();
    status = wait_for(i, seq_ * 4 + 2);
    if (!status.ok()) return status;
    const size_t b = static_cast<size_t>(share(count, i)) * width, e = static_cast<size_t>(share(count, i + 1)) * width;
    std::memcpy(data + b, slot(i) + b, e - b);
  }
  ++seq_;
  return {};
}

Status HostRanks::all_reduce(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns) {
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  if (bytes <= single_copy_from_) return all_reduce_in_slots(dtype, op, data, count, deadline_ns);
  Status status = announce(describe(LAKH_C3_ALL_REDUCE, dtype, op, -1, count, data, bytes), deadline_ns, "all_reduce");
  if (!status.ok()) return status;
  const size_t begin = static_cast<size_t>(share(count, me_)), mine = static_cast<size_t>(share(count, me_ + 1)) - begin;
  if (all_registered()) {
    std::vector<void *> to(static_cast<size_t>(size()));
    for (int i = 0; i < size(); ++i) {
      char *base = i == me_ ? data : local_address(i);
      if (base == nullptr) return group_state_->end(fail(LAKH_C3_SYSTEM, "registered memory of " + rank_name(ranks_[i]) + " cannot be mapped"), -1);
      to[i] = base + begin * width;
    }
    fold(dtype, op, to.data(), size(), to.data(), size(), mine, size());
    advance(3);
    status = wait_all(3);
    ++seq_;
    return status;
  }
  if (all_can_read()) {
    status = fold_direct(dtype, op, begin * width, mine, data + begin * width);
    if (!status.ok()) return status;
    advance(2);
    for (int k = 1; k < size(); ++k) {
      const int i = (me_ + k) % size();
      status = wait_for(i, seq_ * 4 + 2);
      if (!status.ok()) return status;
      const size_t b = static_cast<size_t>(share(count, i)) * width, e = static_cast<size_t>(share(count, i + 1)) * width;
      status = read(i, b, e - b, data + b);
      if (!status.ok()) return status;
    }
    advance(3);
    status = wait_all(3);
    ++seq_;
    return status;
  }
  ++seq_;
  const int64_t piece = static_cast<int64_t>(kPieceBytes / width);
  for (int64_t at = 0; at < count; at += piece) {
    status = all_reduce_in_slots(dtype, op, data + static_cast<size_t>(at) * width, std::min(piece, count - at), deadline_ns);
    if (!status.ok()) return status;
  }
  return {};
}

Status HostRanks::reduce_scatter(const lakh_c3_call &call, int64_t deadline_ns) {
  const size_t width = element_bytes(call.dtype);
  const size_t bytes = static_cast<size_t>(call.count) * width * static_cast<size_t>(size());
  const char *input = static_cast<const char *>(call.input);
  Announcement mine = describe(LAKH_C3_REDUCE_SCATTER, call.dtype, call.op, -1, call.count, input, bytes);
  mine.in_slot = bytes <= single_copy_from_ ? 1 : 0;
  if (mine.in_slot && bytes > 0) std::memcpy(slot(me_), input, bytes);
  Status status = announce(mine, deadline_ns, "reduce_scatter");
  if (!status.ok()) return status;
  const size_t part = static_cast<size_t>(call.count) * width;
  if (mine.in_slot || all_registered() || all_can_read()) {
    status = fold_direct(call.dtype, call.op, part * static_cast<size_t>(me_), static_cast<size_t>(call.count),
                         static_cast<char *>(call.output));
    if (!status.ok()) return status;
    if (!mine.in_slot) {
      advance(3);
      status = wait_all(3);
    }
    ++seq_;
    return status;
  }
  // Through the slots, a few columns of every part at a time. The output may overlap the input only in this rank's own part,
  // whose columns are read before they are written.
  const size_t columns = kPieceBytes / width / static_cast<size_t>(size());
  for (size_t at = 0; at < static_cast<size_t>(call.count); at += columns) {
    const size_t n = std::min(columns, static_cast<size_t>(call.count) - at);
    ++seq_;
    for (int i = 0; i < size(); ++i) {
      if (i != me_) std::memcpy(slot(me_) + static_cast<size_t>(i) * n * width, input + part * static_cast<size_t>(i) + at * width, n * width);
    }
    mine.in_slot = 1;
    status = announce(mine, deadline_ns, "reduce_scatter");
    if (!status.ok()) return status;
    for (int i = 0; i < size(); ++i) sources_[i] = slot(i) + static_cast<size_t>(me_) * n * width;
    sources_[me_] = input + part * static_cast<size_t>(me_) + at * width;
    void *destination = static_cast<char *>(call.output) + at * width;
    fold(call.dtype, call.op, &destination, 1, sources_.data(), size(), n, size());
  }
  ++seq_;
  return {};
}

Status HostRanks::reduce(const lakh_c3_call &call, int64_t deadline_ns) {
  const size_t width = element_bytes(call.dtype);
  const int64_t piece = static_cast<int64_t>(std::min(kSlotBytes, single_copy_from_) / width);
  const bool is_root = me_ == call.root;
  const size_t bytes = static_cast<size_t>(call.count) * width;
  const char *input = static_cast<const char *>(call.input);
  if (bytes > single_copy_from_) {
    Status status = announce(describe(LAKH_C3_REDUCE, call.dtype, call.op, call.root, call.count, input, bytes), deadline_ns, "reduce");
    if (!status.ok()) return status;
    const bool direct = all_registered() || all_can_read();
    if (direct && is_root) status = fold_direct(call.dtype, call.op, 0, static_cast<size_t>(call.count), static_cast<char *>(call.output));
    if (!status.ok()) return status;
    advance(3);
    status = wait_all(3);
    ++seq_;
    if (direct || !status.ok()) return status;
  }
  for (int64_t at = 0; at < call.count; at += piece) {
    const int64_t n = std::min(piece, call.count - at);
    Announcement mine = describe(LAKH_C3_REDUCE, call.dtype, call.op, call.root, n, input, 0);
    mine.in_slot = 1;
    std::memcpy(slot(me_), input + static_cast<size_t>(at) * width, static_cast<size_t>(n) * width);
    Status status = announce(mine, deadline_ns, "reduce");
    if (!status.ok()) return status;
    if (is_root) {
      status = fold_direct(call.dtype, call.op, 0, static_cast<size_t>(n),
                           static_cast<char *>(call.output) + static_cast<size_t>(at) * width);
    }
    if (!status.ok()) return status;
    ++seq_;
  }
  return {};
}

Status HostRanks::reduce_shares(int32_t dtype, int32_t op, char *data, int64_t count, int64_t deadline_ns) {
  // An all_reduce without its second half. Small or unreadable data uses a complete all_reduce, which is also correct: the
  // part is then reduced on every rank.
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  const int32_t plain = op == LAKH_C3_AVG ? LAKH_C3_SUM : op;  // the schedule divides once, at the end
  if (bytes <= single_copy_from_) return all_reduce_in_slots(dtype, plain, data, count, deadline_ns);
  Status status = announce(describe(LAKH_C3_SCHEDULE, dtype, plain, -1, count, data, bytes), deadline_ns, "reduce in the host");
  if (!status.ok()) return status;
  if (!all_can_read() && !all_registered()) {
    advance(3);
    status = wait_all(3);
    ++seq_;
    return status.ok() ? all_reduce(dtype, plain, data, count, deadline_ns) : status;
  }
  const size_t begin = static_cast<size_t>(share(count, me_)), end = static_cast<size_t>(share(count, me_ + 1));
  status = fold_direct(dtype, plain, begin * width, end - begin, data + begin * width);
  if (!status.ok()) return status;
  advance(3);
  status = wait_all(3);
  ++seq_;
  return status;
}

}  // namespace lakh
