#include "troupe/transport/tcp/sender.hpp"

#include <algorithm>
#include <cerrno>

#include <sys/socket.h>

#include "troupe/transport/wire_access.hpp"

namespace troupe::transport::tcp {

namespace {

// Sent in place of memory that was withdrawn in the middle of a frame. Never written, so all of it
// is the kernel's zero page.
alignas(4096) std::byte zeros[max_data];

}  // namespace

lane_sender::lane_sender(int fd, std::size_t max_segments, std::function<void(bool)> want_writable)
    : fd_{fd},
      max_segments_{max_segments},
      want_writable_{std::move(want_writable)},
      staging_(staging_size) {
  iov_.reserve(max_iov);
}

// -- queues

std::size_t lane_sender::push_control(std::span<const std::byte> first,
                                      std::span<const std::byte> second) {
  const std::lock_guard lock{mutex_};
  control_.insert(control_.end(), first.begin(), first.end());
  control_.insert(control_.end(), second.begin(), second.end());
  pushed_.store(true, std::memory_order_release);
  const auto added = first.size() + second.size();
  return control_bytes_.fetch_add(added, std::memory_order_relaxed) + added;
}

void lane_sender::push_write(std::shared_ptr<outgoing> job) {
  if (job->stage) staged_jobs_.fetch_add(1, std::memory_order_relaxed);
  queued_bytes_.fetch_add(job->bytes, std::memory_order_relaxed);
  const std::lock_guard lock{mutex_};
  writes_.push_back(std::move(job));
  pushed_.store(true, std::memory_order_release);
}

void lane_sender::push_read_request(std::shared_ptr<outgoing> job) {
  const std::lock_guard lock{mutex_};
  requests_.push_back(std::move(job));
  pushed_.store(true, std::memory_order_release);
}

std::size_t lane_sender::push_reply(std::shared_ptr<outgoing> job) {
  if (job->stage) staged_jobs_.fetch_add(1, std::memory_order_relaxed);
  queued_bytes_.fetch_add(job->bytes, std::memory_order_relaxed);
  const std::lock_guard lock{mutex_};
  replies_.push_back(std::move(job));
  pushed_.store(true, std::memory_order_release);
  return replies_.size();
}

void lane_sender::read_request_answered() {
  const std::lock_guard lock{mutex_};
  if (open_reads_ > 0) --open_reads_;
}

void lane_sender::give_up_replies(std::uint64_t batch) {
  const std::lock_guard lock{mutex_};
  for (const auto& job : replies_) {
    if (job->batch == batch) job->given_up.store(true, std::memory_order_relaxed);
  }
}

// -- flushing

lane_sender::outcome lane_sender::flush() {
  if (flushers_.fetch_add(1, std::memory_order_acq_rel) != 0) return outcome::elsewhere;
  auto budget = flush_budget;  // for all rounds: other threads may push as fast as this one sends
  while (true) {
    auto seen = flushers_.load(std::memory_order_acquire);
    const auto ended = drain(budget);
    // Threads that pushed in the meantime have counted themselves and left the sending to this one.
    if (flushers_.compare_exchange_strong(seen, 0, std::memory_order_acq_rel)) return ended;
  }
}

// Takes what it sends from the budget. When that is used up, the socket's next EPOLLOUT goes on.
lane_sender::outcome lane_sender::drain(std::size_t& budget) {
  if (errno_.load(std::memory_order_relaxed) != 0) {
    if (waits_for_gpus()) forget_jobs();
    return outcome::failed;
  }
  while (true) {
    if (next_iov_ == iov_.size()) {
      reset_burst();
      if (!build()) {
        set_blocked(false);
        return outcome::idle;
      }
    }
    if (budget == 0) {
      set_blocked(true);
      return outcome::blocked;
    }
    const auto bytes = send_once();
    if (bytes >= 0) {
      sent(static_cast<std::size_t>(bytes));
      budget -= std::min(budget, static_cast<std::size_t>(bytes));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      set_blocked(true);
      return outcome::blocked;
    } else if (errno != EINTR) {
      errno_.store(errno, std::memory_order_release);
      return outcome::failed;
    }
  }
}

void lane_sender::stop() {
  int none = 0;
  errno_.compare_exchange_strong(none, ECANCELED, std::memory_order_acq_rel);
  static_cast<void>(flush());
}

// Nothing more is sent; releases the chunks for other links.
void lane_sender::forget_jobs() {
  kept_copies_.clear();
  spans_.clear();
  current_write_.reset();
  const std::lock_guard lock{mutex_};
  writes_.clear();
  replies_.clear();
  staged_jobs_.store(0, std::memory_order_relaxed);
}

void lane_sender::set_blocked(bool blocked) {
  if (blocked_.load(std::memory_order_relaxed) == blocked) return;
  blocked_.store(blocked, std::memory_order_relaxed);
  want_writable_(blocked);
}

long lane_sender::send_once() {
  pin_spans();
  msghdr message{};
  message.msg_iov = iov_.data() + next_iov_;
  message.msg_iovlen = std::min(iov_.size() - next_iov_, max_iov);
  const wire_access access;
  const auto bytes = ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  unpin_spans();
  return bytes;
}

// Pins the memory of everything still to be sent. Withdrawn memory is replaced by zeros, and the
// frame's trailer says so.
void lane_sender::pin_spans() {
  for (auto& span : spans_) {
    if (span.last_iov <= next_iov_ || span.withdrawn) continue;
    if (!span.job->withdrawn() && span.job->guard->pin()) {
      pinned_.push_back(span.job->guard);
      continue;
    }
    span.withdrawn = true;
    for (auto i = std::max(span.first_iov, next_iov_); i < span.last_iov; ++i) {
      iov_[i].iov_base = zeros;
    }
    encode_trailer(static_cast<std::uint32_t>(
                       span.job->type == frame_type::write ? errc::aborted : errc::grant_revoked),
                   span.trailer);
  }
}

void lane_sender::unpin_spans() {
  // The errno of the system call survives this: an atomic decrement does not change it.
  for (auto* guard : pinned_) guard->unpin();
  pinned_.clear();
}

void lane_sender::sent(std::size_t bytes) {
  while (bytes > 0 && next_iov_ < iov_.size()) {
    auto& piece = iov_[next_iov_];
    const auto step = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + step;
    piece.iov_len -= step;
    bytes -= step;
    if (piece.iov_len == 0) ++next_iov_;
  }
  while (next_iov_ < iov_.size() && iov_[next_iov_].iov_len == 0) ++next_iov_;
}

void lane_sender::reset_burst() {
  control_bytes_.fetch_sub(burst_control_.size(), std::memory_order_relaxed);
  burst_control_.clear();
  if (burst_control_.capacity() > (std::size_t{64} << 10)) burst_control_.shrink_to_fit();
  if (burst_size_ > 0) {
    queued_bytes_.fetch_sub(burst_size_, std::memory_order_relaxed);
    payload_sent_.fetch_add(burst_size_, std::memory_order_relaxed);
  }
  staged_ = 0;
  iov_.clear();
  next_iov_ = 0;
  segments_ = 0;
  burst_size_ = 0;
  spans_.clear();
  kept_.clear();
  kept_copies_.clear();
}

}  // namespace troupe::transport::tcp
