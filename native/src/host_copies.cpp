// Copying operations among the ranks of one host, and the dispatch of all operations.

#include <algorithm>
#include <cstring>

#include "host_ranks.h"
#include "reduce.h"

namespace lakh {
namespace {

constexpr size_t kCopyPieceBytes = 256 << 10;  // own slot, a peer's slot and the input together fit a second-level cache

// Reads memory once and writes twice, in blocks that stay in the cache between the copies. One cache line at a time, the three
// streams conflict at some addresses (9.5 ms for 64 MB instead of 5.7 ms).
void copy_to_both(char *one, char *other, const char *from, size_t bytes) {
  constexpr size_t kBlock = 64 << 10;
  for (size_t at = 0; at < bytes; at += kBlock) {
    const size_t length = std::min(kBlock, bytes - at);
    std::memcpy(one + at, from + at, length);
    std::memcpy(other + at, from + at, length);
  }
}

}  // namespace

Status HostRanks::copy(Announcement mine, const char *input, const RangesOf &ranges, int64_t deadline_ns,
                       const char *what, const std::vector<SentPart> &sent_parts) {
  mine.in_slot = mine.input_bytes <= single_copy_from_ ? 1 : 0;
  mine.piece_bytes = oversubscribed_ ? kSlotBytes : kCopyPieceBytes;  // each piece is a wait that other ranks must run for
  if (mine.in_slot && mine.input_bytes > 0) std::memcpy(slot(me_), input, mine.input_bytes);
  Status status = announce(mine, deadline_ns, what);
  if (!status.ok()) return status;
  bool all_in_slots = true;
  for (int i = 0; i < size(); ++i) all_in_slots = all_in_slots && announced(i).in_slot;
  std::vector<std::vector<CopyRange>> wanted(static_cast<size_t>(size()));
  for (int i = 0; i < size(); ++i) {
    status = ranges(i, announced(i), &wanted[i]);
    // An error of this rank only: end the group so that peers do not wait.
    if (!status.ok()) return group_state_->end(status, -1);
  }
  if (all_in_slots || all_registered() || all_can_read()) {
    for (int k = 0; k < size(); ++k) {
      const int i = (me_ + k) % size();
      for (const CopyRange &range : wanted[i]) {
        if (i == me_) {
          if (range.bytes > 0 && range.to != input + range.begin) std::memmove(range.to, input + range.begin, range.bytes);
          continue;
        }
        status = read(i, range.begin, range.bytes, range.to);
        if (!status.ok()) return status;
      }
    }
    if (!all_in_slots) {  // peers may change their data only after all have read it
      advance(3);
      status = wait_all(3);
    }
    ++seq_;
    return status;
  }
  // One chunk of all ranks' input after another, through the slots. A slot is reused two chunks later, when every peer has
  // announced the chunk in between and has therefore finished reading: one synchronisation per chunk.
  std::vector<uint64_t> input_bytes(static_cast<size_t>(size()));  // announcements are overwritten by those of chunks
  std::vector<SentPart> sent = sent_parts;
  uint64_t longest = 0, piece = 0;
  for (int i = 0; i < size(); ++i) {
    piece = std::max<uint64_t>(piece, announced(i).piece_bytes);
    input_bytes[i] = announced(i).input_bytes;
    if (sent_parts.empty()) sent.push_back(SentPart{0, input_bytes[i]});
    longest = std::max(longest, sent[i].bytes);
  }
  // Up to two segments of the input of rank i are the chunk at `at`: the second one after the end of the input.
  const auto each_segment = [&](int i, uint64_t at, const auto &visit) {
    if (at >= sent[i].bytes) return;
    const uint64_t length = std::min<uint64_t>(piece, sent[i].bytes - at);
    const uint64_t begin = (sent[i].begin + at) % input_bytes[i], first = std::min(length, input_bytes[i] - begin);
    visit(begin, first, uint64_t{0});
    if (first < length) visit(uint64_t{0}, length - first, first);
  };
  const auto copy_out = [&](int i, const char *from, uint64_t input_begin, uint64_t bytes) {
    for (const CopyRange &range : wanted[i]) {
      const uint64_t begin = std::max(range.begin, input_begin), end = std::min(range.begin + range.bytes, input_begin + bytes);
      if (begin >= end) continue;
      char *to = range.to + (begin - range.begin);
      if (to != from + (begin - input_begin)) std::memmove(to, from + (begin - input_begin), end - begin);
    }
  };
  // If the whole input has one destination that it does not overlap, it is copied there in the same pass.
  const std::vector<CopyRange> &own = wanted[static_cast<size_t>(me_)];
  const bool together = own.size() == 1 && own[0].begin == 0 && own[0].bytes == mine.input_bytes &&
                        sent[me_].bytes == mine.input_bytes &&
                        (own[0].to + own[0].bytes <= input || input + mine.input_bytes <= own[0].to);
  for (uint64_t at = 0; at < longest; at += piece) {
    ++seq_;
    each_segment(me_, at, [&](uint64_t begin, uint64_t bytes, uint64_t in_slot) {
      if (together) {
        copy_to_both(slot(me_) + in_slot, own[0].to + begin, input + begin, bytes);
      } else {
        std::memcpy(slot(me_) + in_slot, input + begin, bytes);
      }
    });
    mine.in_slot = 1;
    publish(mine, deadline_ns, what);
    if (!together) {  // while it is in the cache, and before waiting
      each_segment(me_, at, [&](uint64_t begin, uint64_t bytes, uint64_t) { copy_out(me_, input + begin, begin, bytes); });
    }
    status = check_announcements(mine);
    if (!status.ok()) return status;
    for (int k = 1; k < size(); ++k) {
      const int i = (me_ + k) % size();
      each_segment(i, at, [&](uint64_t begin, uint64_t bytes, uint64_t in_slot) { copy_out(i, slot(i) + in_slot, begin, bytes); });
    }
  }
  ++seq_;
  // What was not sent is this rank's own, and no peer waits for it.
  const uint64_t unsent = mine.input_bytes - sent[me_].bytes;
  if (unsent > 0) {
    const uint64_t begin = (sent[me_].begin + sent[me_].bytes) % mine.input_bytes;
    copy_out(me_, input + begin, begin, unsent);
  }
  return {};
}

Status HostRanks::run(const lakh_c3_call &call, int64_t deadline_ns) {
  const size_t width = call.operation == LAKH_C3_BARRIER ? 1 : element_bytes(call.dtype);
  const size_t bytes = static_cast<size_t>(call.count) * width;
  const char *input = static_cast<const char *>(call.input);
  char *output = static_cast<char *>(call.output);
  const char *what = operation_name(call.operation);
  const auto describe_copy = [&](size_t input_bytes) {
    return describe(call.operation, call.dtype, -1, call.root, call.count, input, input_bytes);
  };
  switch (call.operation) {
    case LAKH_C3_ALL_REDUCE:
      return all_reduce(call.dtype, call.op, output, call.count, deadline_ns);
    case LAKH_C3_REDUCE_SCATTER:
      return reduce_scatter(call, deadline_ns);
    case LAKH_C3_REDUCE:
      return reduce(call, deadline_ns);
    case LAKH_C3_BARRIER: {
      const Status status = announce(describe(LAKH_C3_BARRIER, 0, -1, -1, 0, nullptr, 0), deadline_ns, what);
      if (status.ok()) ++seq_;
      return status;
    }
    case LAKH_C3_ALL_GATHER:
      return copy(describe_copy(bytes), input, [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
        ranges->push_back(CopyRange{0, bytes, output + bytes * static_cast<size_t>(i)});
        return Status{};
      }, deadline_ns, what);
    case LAKH_C3_BROADCAST:
      return copy(describe(LAKH_C3_BROADCAST, call.dtype, -1, call.root, call.count, output, me_ == call.root ? bytes : 0), output,
                  [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
                    if (i == call.root && me_ != call.root) ranges->push_back(CopyRange{0, bytes, output});
                    return Status{};
                  }, deadline_ns, what);
    case LAKH_C3_GATHER:
      return copy(describe_copy(bytes), input, [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
        if (me_ == call.root) ranges->push_back(CopyRange{0, bytes, output + bytes * static_cast<size_t>(i)});
        return Status{};
      }, deadline_ns, what);
    case LAKH_C3_SCATTER:
      return copy(describe_copy(me_ == call.root ? bytes * static_cast<size_t>(size()) : 0), input,
                  [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
                    if (i == call.root) ranges->push_back(CopyRange{bytes * static_cast<size_t>(me_), bytes, output});
                    return Status{};
                  }, deadline_ns, what);
    case LAKH_C3_ALL_TO_ALL: {
      // First all ranks' offsets, then the data: the offsets locate this rank's part in each peer's input.
      const size_t table = (static_cast<size_t>(size()) + 1) * sizeof(int64_t);
      std::vector<int64_t> offsets(static_cast<size_t>(size() + 1) * static_cast<size_t>(size()));
      Announcement first = describe(LAKH_C3_ALL_TO_ALL, call.dtype, -1, -1, 0, call.splits, table);
      Status status = copy(first, reinterpret_cast<const char *>(call.splits),
                           [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
                             char *row = reinterpret_cast<char *>(offsets.data()) + table * static_cast<size_t>(i);
                             ranges->push_back(CopyRange{0, table, row});
                             return Status{};
                           }, deadline_ns, what);
      if (!status.ok()) return status;
      const int64_t *receive = call.splits + size() + 1;
      std::string wrong;
      for (int from = 0; from < size(); ++from) {
        const int64_t *row = offsets.data() + static_cast<size_t>(from) * static_cast<size_t>(size() + 1);
        const int64_t sent = row[me_ + 1] - row[me_], expected = receive[from + 1] - receive[from];
        if (sent != expected) {
          wrong += (wrong.empty() ? "" : "; ") + rank_name(ranks_[from]) + " sends " + std::to_string(sent) + " elements to " +
                   rank_name(rank_) + ", which expects " + std::to_string(expected);
        }
      }
      // All ranks must know of an error before data moves, or the others would wait forever.
      int32_t bad = wrong.empty() ? 0 : 1;
      status = all_reduce_in_slots(LAKH_C3_I32, LAKH_C3_MAX, reinterpret_cast<char *>(&bad), 1, deadline_ns);
      if (!status.ok()) return status;
      if (bad) return fail(LAKH_C3_INVALID, "all_to_all: " + (wrong.empty() ? "the splits of other ranks disagree" : wrong));
      Announcement mine = describe(LAKH_C3_ALL_TO_ALL, call.dtype, -1, -1, 1, input, static_cast<size_t>(call.splits[size()]) * width);
      // Each rank sends first to the next one, so that all ranks receive at the same time, and its own part never.
      std::vector<SentPart> sent;
      for (int i = 0; i < size(); ++i) {
        const int64_t *row = offsets.data() + static_cast<size_t>(i) * static_cast<size_t>(size() + 1);
        const int64_t others = row[size()] - (row[i + 1] - row[i]);
        sent.push_back(SentPart{static_cast<uint64_t>(row[i + 1]) * width, static_cast<uint64_t>(others) * width});
      }
      return copy(mine, input, [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
        const int64_t *row = offsets.data() + static_cast<size_t>(i) * static_cast<size_t>(size() + 1);
        ranges->push_back(CopyRange{static_cast<uint64_t>(row[me_]) * width, static_cast<uint64_t>(row[me_ + 1] - row[me_]) * width,
                              output + static_cast<size_t>(receive[i]) * width});
        return Status{};
      }, deadline_ns, what, sent);
    }
    default:
      return fail(LAKH_C3_INVALID, "no such operation");
  }
}

Status HostRanks::gather_shares(int32_t dtype, char *data, int64_t count, int64_t deadline_ns) {
  const size_t width = element_bytes(dtype);
  const size_t bytes = static_cast<size_t>(count) * width;
  Announcement mine = describe(LAKH_C3_SCHEDULE, dtype, -1, -1, count, data, bytes);
  return copy(mine, data, [&](int i, const Announcement &, std::vector<CopyRange> *ranges) {
    if (i != me_) {
      const size_t b = static_cast<size_t>(share(count, i)) * width, e = static_cast<size_t>(share(count, i + 1)) * width;
      ranges->push_back(CopyRange{b, e - b, data + b});
    }
    return Status{};
  }, deadline_ns, "gather in the host");
}

Status HostRanks::broadcast(char *data, int64_t bytes, int root_index, int64_t deadline_ns) {
  lakh_c3_call call{};
  call.operation = LAKH_C3_BROADCAST;
  call.dtype = LAKH_C3_U8;
  call.root = root_index;
  call.count = bytes;
  call.output = data;
  return run(call, deadline_ns);
}

}  // namespace lakh
