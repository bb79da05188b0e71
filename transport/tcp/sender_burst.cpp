#include <algorithm>
#include <limits>

#include "troupe/transport/tcp/sender.hpp"

// Builds one burst of a lane: chooses the next frames and fills them.
namespace troupe::transport::tcp {

namespace {

constexpr std::size_t longest_reason = 1000;  // of a refusal, which must fit where a table would

std::uint8_t end_of_request(const outgoing& job) noexcept {
  return static_cast<std::uint8_t>(flag_end_of_request | (job.last ? flag_last : 0));
}

}  // namespace

bool lane_sender::room_for_frame() const noexcept {
  return staging_size - staged_ >= max_head + trailer_size && iov_.size() + 8 < max_iov &&
         segments_ < max_segments_ && burst_size_ < burst_bytes;
}

// Threads that push while this runs count themselves in `flush`, so it runs again: it need not see
// jobs pushed in the meantime.
bool lane_sender::build() {
  if (!current_write_ && !pushed_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock{mutex_};
    burst_control_.swap(control_);
    while (!requests_.empty() && open_reads_ < max_open_reads && room_for_frame()) {
      // Its `cancel` is sent first, so the peer would answer the request for nobody.
      if (requests_.front()->withdrawn()) {
        requests_.pop_front();
        continue;
      }
      ++open_reads_;
      if (add_request_frame(*requests_.front())) requests_.pop_front();
    }
    take_jobs();
  }
  if (!burst_control_.empty()) iov_.push_back({burst_control_.data(), burst_control_.size()});
  // Control frames go before the requests: acknowledgements free memory. Correctness does not
  // depend on it.
  if (iov_.size() > 1) std::rotate(iov_.begin(), iov_.end() - 1, iov_.end());
  if (waits_for_gpus()) stage_ahead();
  while (room_for_frame()) {
    const bool write = current_write_ && current_write_->may_go();
    const bool reply = current_reply_ && current_reply_->may_go();
    if (!write && !reply) break;
    reply_turn_ = reply && (!write || !reply_turn_);
    auto& job = reply_turn_ ? current_reply_ : current_write_;
    add_frames(job);
    if (job || (!reply_turn_ && !pushed_.load(std::memory_order_acquire))) continue;
    const std::lock_guard lock{mutex_};
    if (reply_turn_) replies_.pop_front();
    take_jobs();
  }
  current_reply_.reset();
  return !iov_.empty();
}

// Starts copies for the next jobs, in each queue as far as its chunks suffice. Chunks are given out
// in the order of sending, so that no job waits for a chunk held by a later one. A chunk may come
// back at any time, even during this loop, so the first job left without one ends its queue's
// round.
void lane_sender::stage_ahead() {
  for (const auto* queue : {&writes_, &replies_}) {
    ahead_.clear();
    if (queue == &writes_ && current_write_) ahead_.push_back(current_write_);
    {
      const std::lock_guard lock{mutex_};
      const auto next = std::min<std::size_t>(queue->size(), staging::chunk_quota::most);
      ahead_.insert(ahead_.end(), queue->begin(),
                    queue->begin() + static_cast<std::ptrdiff_t>(next));
    }
    for (const auto& job : ahead_) {
      if (job->stage && !job->stage->fill(*job)) break;
    }
  }
  ahead_.clear();
}

void lane_sender::drop(std::shared_ptr<outgoing>& job) {
  if (job->stage) {
    job->stage.reset();
    staged_jobs_.fetch_sub(1, std::memory_order_relaxed);
  }
  job.reset();
}

// Under the lock: chooses the next jobs. A reply stays in its queue, where a cancel finds it.
void lane_sender::take_jobs() {
  if (!current_write_ && !writes_.empty()) {
    current_write_ = std::move(writes_.front());
    writes_.pop_front();
  }
  current_reply_ = replies_.empty() ? nullptr : replies_.front();
  pushed_.store(!control_.empty() || !requests_.empty() || !writes_.empty() || !replies_.empty(),
                std::memory_order_relaxed);
}

// Adds one frame of the job; drops the job after its last frame.
void lane_sender::add_frames(std::shared_ptr<outgoing>& job) {
  if (job->must_end()) {
    add_end(*job);
    drop(job);
    return;
  }
  if (job->type == frame_type::write) {
    add_write_frame(job);
  } else {
    add_read_frame(job);
  }
  if (finished(*job)) drop(job);
}

bool lane_sender::finished(const outgoing& job) const noexcept {
  return job.cursor.run() >= job.runs.size();
}

std::byte* lane_sender::stage(std::size_t size) noexcept {
  auto* at = staging_.data() + staged_;
  staged_ += size;
  return at;
}

// Merges staged bytes that are adjacent in memory and on the wire into one piece.
void lane_sender::add_staged(const std::byte* at, std::size_t size) {
  if (!iov_.empty()) {
    auto& last = iov_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == at &&
        last.iov_base >= staging_.data()) {
      last.iov_len += size;
      return;
    }
  }
  iov_.push_back({const_cast<std::byte*>(at), size});
}

// Ends a job that must send no more data, without accessing its memory.
void lane_sender::add_end(outgoing& job) {
  const auto* const why = job.stage ? job.stage->failure() : nullptr;
  if (job.type == frame_type::read_data && why != nullptr) {
    add_refusal(job, *why);
  } else {
    add_withdrawn(job);
  }
  // Bytes that will not be sent must not count as queued.
  auto done = staging::bytes_of(std::span{job.runs}.first(job.cursor.run()));
  if (job.cursor.run() < job.runs.size()) {
    done += job.runs[job.cursor.run()].length * job.cursor.repetition() + job.cursor.offset();
  }
  queued_bytes_.fetch_sub(job.bytes - done, std::memory_order_relaxed);
}

// Ends a job whose memory was withdrawn or whose data were cancelled.
void lane_sender::add_withdrawn(const outgoing& job) {
  auto* at = stage(header_size + trailer_size);
  const bool write = job.type == frame_type::write;
  const frame_header header{
      .type = job.type,
      .flags = static_cast<std::uint8_t>(write ? flag_last | flag_aborted : end_of_request(job)),
      .parts = job.parts,
      .batch = job.batch,
      .transfer = job.transfer};
  encode(header, at);
  encode_trailer(static_cast<std::uint32_t>(write ? errc::aborted : errc::grant_revoked),
                 at + header_size);
  add_staged(at, header_size + trailer_size);
}

// Answers a read whose data a GPU could not provide. A trailer has no room for a sentence.
void lane_sender::add_refusal(const outgoing& job, const troupe::error& why) {
  const auto body = encode(completion_body{
      {}, "it could not read its memory: " + why.message.substr(0, longest_reason)});
  auto* at = stage(header_size + body.size());
  const frame_header header{.type = frame_type::completion,
                            .flags = end_of_request(job),
                            .status = static_cast<std::uint8_t>(why.code),
                            .session_size = static_cast<std::uint32_t>(body.size()),
                            .batch = job.batch};
  encode(header, at);
  std::ranges::copy(body, at + header_size);
  add_staged(at, header_size + body.size());
}

// The next piece of the job as an entry: whole repetitions of a run if they fit, otherwise part of
// one.
wire_entry lane_sender::next_entry(const outgoing& job, std::size_t room,
                                   std::size_t pieces) const {
  const auto& run = job.runs[job.cursor.run()];
  const auto offset = job.cursor.offset();
  wire_entry entry;
  if (offset != 0 || run.length > room) {
    entry.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(run.length - offset, room));
  } else {
    const auto most =
        std::min<std::uint64_t>({run.count - job.cursor.repetition(), room / run.length, pieces});
    entry.length = static_cast<std::uint32_t>(run.length);
    entry.count = static_cast<std::uint32_t>(most);
  }
  if (!job.remote.empty()) {
    const auto& remote = job.remote[job.cursor.run()];
    entry.offset = remote.offset + job.cursor.repetition() * remote.stride + offset;
    entry.stride = entry.count > 1 ? remote.stride : 0;
    entry.index = remote.index;
  }
  return entry;
}

void lane_sender::add_payload(outgoing& job, const wire_entry& entry, std::size_t first_iov) {
  if (job.stage) {
    add_from_chunk(job, std::size_t{entry.length} * entry.count, first_iov);
    return;
  }
  const auto& run = job.runs[job.cursor.run()];
  const std::uint64_t first = job.cursor.repetition();
  for (std::uint32_t i = 0; i < entry.count; ++i) {
    auto* at = run.at + (first + i) * run.stride + job.cursor.offset();
    if (iov_.size() > first_iov) {
      auto& last = iov_.back();
      if (static_cast<std::byte*>(last.iov_base) + last.iov_len == at) {
        last.iov_len += entry.length;
        continue;
      }
    }
    iov_.push_back({at, entry.length});
  }
  segments_ += entry.count;
}

// Adds bytes that a GPU has copied into a chunk.
void lane_sender::add_from_chunk(outgoing& job, std::size_t bytes, std::size_t first_iov) {
  auto [at, copy] = job.stage->take(bytes);
  if (kept_copies_.empty() || kept_copies_.back() != copy) kept_copies_.push_back(std::move(copy));
  if (iov_.size() > first_iov) {
    iov_.back().iov_len += bytes;  // a frame's bytes come from one chunk
  } else {
    iov_.push_back({at, bytes});
  }
}

void lane_sender::add_write_frame(const std::shared_ptr<outgoing>& job) {
  auto* head = stage(header_size);
  frame_header header{.type = frame_type::write,
                      .parts = job->parts,
                      .batch = job->batch,
                      .transfer = job->transfer};
  // The table directly follows the header, so both are one piece; the table's length is added once
  // it is known.
  add_staged(head, header_size);
  const auto head_iov = iov_.size() - 1;
  std::size_t session_iov = 0;
  if (!job->session.empty()) {
    session_iov = iov_.size();
    iov_.push_back({job->session.data(), 0});
  }
  const auto first_iov = iov_.size();
  if (!finished(*job)) header.grant = job->remote[job->cursor.run()].grant;
  const auto most_data = job->stage ? std::min(job->stage->ready(), max_data) : max_data;
  while (!finished(*job) && header.entries < max_entries && header.data_size < most_data &&
         iov_.size() + 2 < max_iov && segments_ < max_segments_ &&
         job->remote[job->cursor.run()].grant == header.grant) {
    const auto pieces = std::min(max_iov - 2 - iov_.size(), max_segments_ - segments_);
    const auto entry = next_entry(*job, most_data - header.data_size, pieces);
    if (entry.count == 0) break;
    encode(entry, stage(entry_size));
    const auto bytes = std::uint64_t{entry.length} * entry.count;
    add_payload(*job, entry, first_iov);
    header.data_size += static_cast<std::uint32_t>(bytes);
    ++header.entries;
    job->cursor.advance(job->runs, bytes);
  }
  iov_[head_iov].iov_len += header.entries * entry_size;
  if (finished(*job)) {
    header.flags = flag_last;
    header.session_size = static_cast<std::uint32_t>(job->session.size());
    if (!job->session.empty()) {
      iov_[session_iov].iov_len = job->session.size();
      kept_.push_back(job);
    }
  }
  end_data_frame(header, head, first_iov, job);
}

void lane_sender::add_read_frame(const std::shared_ptr<outgoing>& job) {
  auto* head = stage(header_size);
  frame_header header{
      .type = frame_type::read_data, .batch = job->batch, .transfer = job->transfer};
  add_staged(head, header_size);
  const auto first_iov = iov_.size();
  const auto most_data = job->stage ? std::min(job->stage->ready(), max_data) : max_data;
  while (!finished(*job) && header.data_size < most_data && iov_.size() + 2 < max_iov &&
         segments_ < max_segments_) {
    const auto pieces = std::min(max_iov - 2 - iov_.size(), max_segments_ - segments_);
    const auto entry = next_entry(*job, most_data - header.data_size, pieces);
    if (entry.count == 0) break;
    const auto bytes = std::uint64_t{entry.length} * entry.count;
    add_payload(*job, entry, first_iov);
    header.data_size += static_cast<std::uint32_t>(bytes);
    job->cursor.advance(job->runs, bytes);
  }
  if (finished(*job)) {
    header.flags = end_of_request(*job);
  }
  end_data_frame(header, head, first_iov, job);
}

void lane_sender::end_data_frame(const frame_header& header, std::byte* head, std::size_t first_iov,
                                 const std::shared_ptr<outgoing>& job) {
  encode(header, head);
  auto* trailer = stage(trailer_size);
  encode_trailer(0, trailer);
  if (header.data_size > 0) spans_.push_back({first_iov, iov_.size(), trailer, job});
  add_staged(trailer, trailer_size);
  burst_size_ += header.data_size;
}

// Adds one read request, which names segments and carries no data. Returns whether it was the job's
// last.
bool lane_sender::add_request_frame(outgoing& job) {
  auto* head = stage(header_size);
  frame_header header{.type = frame_type::read_request,
                      .grant = job.remote[job.cursor.run()].grant,
                      .transfer = job.transfer};
  header.batch = job.batch;
  constexpr auto no_limit = std::numeric_limits<std::uint32_t>::max();
  while (!finished(job) && header.entries < max_entries &&
         job.remote[job.cursor.run()].grant == header.grant) {
    const auto entry = next_entry(job, no_limit, no_limit);
    encode(entry, stage(entry_size));
    ++header.entries;
    job.cursor.advance(job.runs, std::uint64_t{entry.length} * entry.count);
  }
  if (finished(job)) header.flags = flag_last;
  encode(header, head);
  add_staged(head, header_size + header.entries * entry_size);
  return finished(job);
}

}  // namespace troupe::transport::tcp
