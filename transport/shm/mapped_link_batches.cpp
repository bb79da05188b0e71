#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "troupe/transport/shm/mapped_link.hpp"

// The books of the initiator's batches: admission, completion, notification.

namespace troupe::transport::shm {

result<void> mapped_link::need_up() {
  std::unique_lock lock{mutex_};
  if (state_ == link_phase::connecting) {
    lock.unlock();
    drain_control();  // the peer may be up already, with its messages in the socket
    lock.lock();
  }
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  return {};
}

unexpected mapped_link::refused(troupe::error why) const {
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  return fail(std::move(why));
}

/// Under the lock: admits the batch, or returns why not.
result<void> mapped_link::admit(transfer_id transfer, std::size_t frame_bytes) {
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  if (frame_bytes != 0) {
    if (auto ok = check_frame_room(frame_bytes); !ok) return ok;
  }
  return ledger_.admit(transfer);
}

/// Under the lock: admits the batch, which is then in flight until `finish`.
result<void> mapped_link::take_in(const std::shared_ptr<mapped_job>& job) {
  auto admitted = admit(job->work.transfer, job->work.frame.size());
  if (!admitted) return admitted;
  reserved_bytes_ += job->work.frame.size();
  active_.push_back(job);
  return admitted;
}

/// Under the lock: removes the batch and queues its completion (and its frame).
void mapped_link::finish(const std::shared_ptr<mapped_job>& job) {
  const auto at = std::ranges::find(active_, job);
  *at = std::move(active_.back());
  active_.pop_back();
  on_finished(*job);
  reserved_bytes_ -= job->work.frame.size();
  if (!job->failure) {
    if (state_ == link_phase::broken) {
      job->failure = why_broken_;
    } else if (state_ == link_phase::closed) {
      job->failure = troupe::error{errc::aborted, "the link was closed"};
    } else if (job->cancelled.load(std::memory_order_acquire)) {
      job->failure = troupe::error{errc::aborted, "the transfer was fenced here"};
    }
  }
  completion done{.id = job->work.id,
                  .transfer = job->work.transfer,
                  .failure = {},
                  .bytes = job->moved,
                  .bad_segments = {}};
  job->release_memory();
  if (job->failure) {
    done.bad_segments = job->unfinished();
    done.failure = std::move(job->failure);
  }
  conclude(job->work.dir, job->work.frame, done);
  sink_.put(std::move(done));
  if (!pending_fences_.empty()) collect_quiescent();
  if (broken_event_due_ && running_ == 0) {
    broken_event_due_ = false;
    sink_.put(broken_event{*why_broken_});
  }
}

/// Under the lock: reports a batch that has ended to the peer and to the books.
void mapped_link::conclude(direction dir, std::span<const std::byte> frame,
                           const completion& done) {
  // The frame first: the peer waits for it.
  if (!done.failure && !frame.empty()) put_frame(frame);
  ledger_.ended(!done.failure);
  if (outgoing_ == nullptr) return;
  const auto add = [](std::atomic<std::uint64_t>& to, std::uint64_t what) {
    // Only this end writes the counters, under its lock.
    to.store(to.load(std::memory_order_relaxed) + what, std::memory_order_relaxed);
  };
  auto& counters = outgoing_->counters;
  add(dir == direction::write ? counters.bytes_written : counters.bytes_read, done.bytes);
  if (done.failure && done.failure->code == errc::grant_revoked) add(counters.refused, 1);
}

}  // namespace troupe::transport::shm
