#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include <arpa/inet.h>

#include "troupe/transport/rdma/rdma_link.hpp"

// Handles completions and the peer's messages.

namespace troupe::transport::rdma {

namespace {

constexpr int completions_at_once = 32;
/// Polling rounds of one queue before other links have their turn.
constexpr int rounds_at_once = 4;
/// One in this many polls that find nothing runs a round of the engine.
constexpr std::uint32_t polls_per_round = 8;
/// Message buffers posted again in one call: a small part of all, so that the peer rarely runs out
/// of credits.
constexpr std::size_t buffers_released_at_once = message_channel::buffers / 8;
/// How long a dying process may take between losing its memory and its queue pairs.
constexpr std::chrono::milliseconds time_to_die{200};
constexpr std::size_t max_gathered = 65'536;
constexpr std::size_t max_gathered_bytes = std::size_t{64} << 20;

std::optional<transfer_id> transfer_in(std::span<const std::byte> payload) {
  std::uint64_t value = 0;
  if (payload.size() != sizeof value) return std::nullopt;
  std::memcpy(&value, payload.data(), sizeof value);
  return transfer_id{value};
}

}  // namespace

bool rdma_link::poll() {
  if (drain()) return true;
  // A round of the engine polls this link again and reads the clock: too costly each time.
  if (idle_polls_.fetch_add(1, std::memory_order_relaxed) % polls_per_round != 0) return false;
  if (gone_.load(std::memory_order_acquire)) {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::closed) return false;
  }
  return engine_.poll_once();
}

bool rdma_link::on_poll(steady_time /*now*/) {
  return drain();
}

bool rdma_link::on_ready(std::uint64_t key, std::uint32_t /*events*/) {
  const auto self = shared_from_this();
  if (!reading_.exchange(true, std::memory_order_acquire)) {
    if (key < completions_.size()) completions_[key]->take_event();
    reading_.store(false, std::memory_order_release);
  }
  return drain();
}

bool rdma_link::before_sleep() {
  if (gone_.load(std::memory_order_acquire)) return true;
  if (reading_.exchange(true, std::memory_order_acquire)) return false;
  for (const auto& queue : completions_) queue->arm();
  reading_.store(false, std::memory_order_release);
  if (drain()) return false;
  // A thread polling concurrently may have taken completions without an event, and leaves the
  // answers to this thread.
  return !reading_.load(std::memory_order_acquire) && !answers_due_.load(std::memory_order_acquire);
}

/// Returns whether it made progress.
bool rdma_link::drain() {
  if (gone_.load(std::memory_order_acquire)) return false;
  // Early messages wait until this end can answer.
  if (joining_.load(std::memory_order_acquire)) return false;
  if (reading_.exchange(true, std::memory_order_acq_rel)) return false;
  if (joining_.load(std::memory_order_acquire)) {  // joining began in the meantime
    reading_.store(false, std::memory_order_release);
    return false;
  }
  bool worked = false;
  for (const auto& queue : completions_) worked = take_completions(*queue) || worked;
  if (worked) {
    end_turn();
  } else if (answers_due_.load(std::memory_order_relaxed)) {
    answer_what_is_owed();
  }
  auto why = std::exchange(failed_, std::nullopt);
  reading_.store(false, std::memory_order_release);
  if (worked) sink_.deliver();
  if (why) break_link(std::move(*why));
  return worked;
}

bool rdma_link::take_completions(completion_queue& from) {
  // Filled by the device, and usually left empty; do not clear it.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  std::array<ibv_wc, completions_at_once> done;
  bool any = false;
  for (int round = 0; round < rounds_at_once; ++round) {
    const int count = ::ibv_poll_cq(from.get(), completions_at_once, done.data());
    if (count < 0) failed_ = troupe::error{errc::link_broken, "the NIC's completion queue failed"};
    if (count <= 0) break;
    any = true;
    for (int i = 0; i < count; ++i) take(done[static_cast<std::size_t>(i)]);
    if (count < completions_at_once) break;
  }
  return any;
}

/// Ends a turn of completions: posts what there is room for now.
void rdma_link::end_turn() {
  std::unique_lock lock{mutex_};
  if (!messages_ || state_ == link_phase::opened) return;
  if (read_.size() >= buffers_released_at_once) {
    auto again = messages_->release(read_);
    if (!again && !failed_) failed_ = again.error();
    read_.clear();
  }
  if (std::exchange(hello_failed_, false) && state_ == link_phase::connecting) {
    read_.clear();  // `begin_again` posts all buffers
    if (auto ok = begin_again(lock); !ok && !failed_) failed_ = ok.error();
    return;
  }
  if (state_ == link_phase::up) {
    if (auto ok = pump(); !ok && !failed_) failed_ = ok.error();
    // Answers may also be due because credits had run out, or because only a refusal was sent
    // since.
    if (messages_->unanswered(landed_) != 0) answers_due_.store(true, std::memory_order_release);
  } else {
    static_cast<void>(flush());
  }
}

/// Under the lock.
result<void> rdma_link::flush() {
  // Below these limits no answer is sent: any other message carries the counts as well.
  if (messages_->untold(taken_) >= depth_ / 2 + 1 ||
      messages_->unanswered(landed_) >= max_small_unanswered / 4) {
    return answer();
  }
  return messages_->flush(counts());
}

/// Under the lock: sends the counts to the peer, in a message of their own if no other waits.
result<void> rdma_link::answer() {
  if (!messages_->any_waits()) messages_->put(message_kind::credit, {});
  return messages_->flush(counts());
}

/// Tells the peer that its small batches landed, if no message sent since has. The receiver of a
/// frame often answers it, in the callback or right after, and that message carries the counts for
/// free.
void rdma_link::answer_what_is_owed() {
  const std::lock_guard lock{mutex_};
  answers_due_.store(false, std::memory_order_relaxed);
  if (state_ != link_phase::up || messages_->unanswered(landed_) == 0) return;
  if (auto ok = answer(); !ok && !failed_) failed_ = ok.error();
}

void rdma_link::take(const ibv_wc& done) {
  if (done.status != IBV_WC_SUCCESS) {
    take_failure(done);
    return;
  }
  switch (kind_of(done.wr_id)) {
    case work_kind::data: take_data(lane_of(done.wr_id), number_of(done.wr_id)); return;
    case work_kind::notice_receive: take_notice(lane_of(done.wr_id), ntohl(done.imm_data)); return;
    case work_kind::message_send: {
      const std::lock_guard lock{mutex_};
      if (!messages_) return;
      messages_->sent_until(number_of(done.wr_id));
      if (verdict_due_ && !messages_->probing() && !failed_) failed_ = refused_;
      if (goodbye_due_ && messages_->idle()) goodbye_due_ = false;
      return;
    }
    case work_kind::message_receive:
      take_message(static_cast<std::uint32_t>(number_of(done.wr_id)), done.byte_len);
      return;
  }
}

void rdma_link::take_failure(const ibv_wc& done) {
  const std::lock_guard lock{mutex_};
  goodbye_due_ = false;
  if (state_ == link_phase::broken || state_ == link_phase::closed) return;
  if (state_ == link_phase::connecting) {
    // The acceptor may not be ready yet; retry until the deadline.
    if (done.status != IBV_WC_WR_FLUSH_ERR) hello_failed_ = true;
    return;
  }
  // A flushed request only follows the one that failed.
  if ((failed_ || refused_) && done.status == IBV_WC_WR_FLUSH_ERR) return;
  if (done.status == IBV_WC_REM_ACCESS_ERR && !failed_) {
    if (refused_) return;
    refused_ = meaning_of(done.status, fabric_.options);
    look_after_peer_at(std::chrono::steady_clock::now() + time_to_die);
    return;
  }
  if (done.status == IBV_WC_MW_BIND_ERR) fabric_.windows->store(false, std::memory_order_relaxed);
  auto why = meaning_of(done.status, fabric_.options);
  if (!failed_ || failed_->code == errc::link_broken) failed_ = std::move(why);
}

void rdma_link::take_data(std::size_t lane, std::uint64_t number) {
  const std::lock_guard lock{mutex_};
  if (lane >= lanes_.size()) return;
  auto& from = lanes_[lane];
  while (!from.posted.empty() && from.posted.front().number <= number) {
    const auto request = from.posted.front();
    from.posted.pop_front();
    if (request.window != nullptr) {
      windows_answered(*request.window);
      continue;
    }
    if (request.settles) {
      reads_settled(*request.settles);
      continue;
    }
    auto& batch = *request.of;
    from.bytes -= request.bytes;
    from.moved += request.bytes;
    bytes_on_the_way_ -= request.bytes;
    batch.done += request.bytes;
    --batch.outstanding;
    if (batch.ended()) finish_drained(batch);
  }
}

void rdma_link::take_notice(std::size_t lane, std::uint32_t sequence) {
  {
    const std::lock_guard lock{mutex_};
    if (lane >= lanes_.size()) return;
    auto again = lanes_[lane].pair->expect_notice(
        work_id(work_kind::notice_receive, static_cast<std::uint8_t>(lane), 0));
    if (!again && !failed_) failed_ = again.error();
  }
  ++gathered_[sequence].immediates;
  if (auto ok = gather(sequence); !ok && !failed_) failed_ = ok.error();
}

/// Within `reading_`: delivers the frame of a batch once all of it has arrived.
result<void> rdma_link::gather(std::uint32_t sequence) {
  if (gathered_.size() > max_gathered || gathered_bytes_ > max_gathered_bytes) {
    return against_protocol("it left too many batches incomplete");
  }
  const auto at = gathered_.find(sequence);
  auto& batch = at->second;
  if (!batch.parts || batch.immediates < *batch.parts) return {};
  auto frame = std::move(batch.frame);
  gathered_bytes_ -= frame.size();
  gathered_.erase(at);
  {
    const std::lock_guard lock{mutex_};
    ++taken_;
  }
  ledger_.frame_received();
  sink_.frame(frame);
  return {};
}

void rdma_link::take_message(std::uint32_t buffer, std::uint32_t bytes) {
  result<arrival> message = arrival{};
  result<std::span<const std::byte>> small = std::span<const std::byte>{};
  std::optional<completion> first;
  {
    const std::lock_guard lock{mutex_};
    if (!messages_) return;
    message = take_header(buffer, bytes, first);
    if (message && message->header.kind == static_cast<std::uint8_t>(message_kind::small)) {
      small = take_small(message->payload);
    }
  }
  // Deliver a batch's outcome before a frame with which the peer answers the batch.
  if (first) {
    sink_.end(std::move(*first));
  } else {
    sink_.deliver();
  }
  auto ok = message ? act_on(*message) : result<void>{fail(message.error())};
  if (!small) ok = fail(small.error());
  if (small && !small->empty()) {
    ledger_.frame_received();
    sink_.frame(*small);
  }
  if (!ok && !failed_) failed_ = ok.error();
  if (ok) read_.push_back(buffer);
}

/// Under the lock: handles the header fields that every message carries.
result<arrival> rdma_link::take_header(std::uint32_t buffer, std::uint32_t bytes,
                                       std::optional<completion>& first) {
  auto message = messages_->received(buffer, bytes);
  if (!message) return message;
  const auto& header = message->header;
  if (!messages_->take_credits(header.credits, peer_->message_buffers)) {
    return against_protocol("it gave back more credits than it was sent messages");
  }
  if (header.taken - notices_taken_ > notices_sent_ - notices_taken_) {
    return against_protocol("it took more notices than there were");
  }
  notices_taken_ = header.taken;
  if (auto ok = take_answers(*message, first); !ok) return fail(std::move(ok).error());
  return message;
}

/// Within `reading_`, without the lock.
result<void> rdma_link::act_on(const arrival& message) {
  const auto kind = static_cast<message_kind>(message.header.kind);
  if (kind == message_kind::frame || kind == message_kind::notice || kind == message_kind::keys) {
    if (!up_.load(std::memory_order_acquire)) return {};
    if (assembling_.size() + message.payload.size() > link::max_frame) {
      return against_protocol("a frame of more than " + std::to_string(link::max_frame) + " bytes");
    }
    const bool more = (message.header.flags & flag_more) != 0;
    if (more || !assembling_.empty()) {
      assembling_.insert(assembling_.end(), message.payload.begin(), message.payload.end());
      if (more) return {};
    }
    std::vector<std::byte> whole = std::exchange(assembling_, {});
    const std::span<const std::byte> frame = whole.empty() ? message.payload : std::span{whole};
    if (kind == message_kind::frame) {
      ledger_.frame_received();
      sink_.frame(frame);
      return {};
    }
    if (kind == message_kind::keys) return on_keys(frame);
    auto& batch = gathered_[message.header.sequence];
    if (batch.parts) return against_protocol("two notices of one batch");
    batch.parts = message.header.parts;
    batch.frame.assign(frame.begin(), frame.end());
    gathered_bytes_ += frame.size();
    return gather(message.header.sequence);
  }
  switch (kind) {
    case message_kind::hello: return on_hello(message.payload);
    case message_kind::credit:
    case message_kind::refused:
    case message_kind::small: return {};  // handled under the lock
    case message_kind::bye:
      if (!failed_) failed_ = troupe::error{errc::link_broken, "the peer closed the link"};
      return {};
    case message_kind::revoke:
    case message_kind::revoked: {
      const auto transfer = transfer_in(message.payload);
      if (!transfer) return against_protocol("a revocation that names no transfer");
      const std::lock_guard lock{mutex_};
      if (kind == message_kind::revoke) {
        peer_revoked(*transfer);
      } else {
        peer_confirmed(*transfer);
      }
      return {};
    }
    default: break;
  }
  return against_protocol("a message of kind " + std::to_string(message.header.kind));
}

result<void> rdma_link::on_hello(std::span<const std::byte> shown) {
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::connecting) return {};
  if (shown.size() != secret_.size() || !std::equal(shown.begin(), shown.end(), secret_.begin())) {
    return fail(errc::unauthorized, "the rdma peer showed a wrong token");
  }
  become_up();
  if (options_.role == link_role::acceptor) messages_->put(message_kind::hello, peer_->secret);
  return {};
}

}  // namespace troupe::transport::rdma
