#include "troupe/transport/link_ledger.hpp"

#include <string>

namespace troupe::transport {

result<void> link_ledger::admit(transfer_id transfer) {
  if (fenced_.contains(transfer)) {
    return fail(errc::grant_revoked,
                "transfer " + std::to_string(transfer.value) + " was fenced on this link");
  }
  if (in_flight() >= max_batches_) {
    return fail(errc::overloaded,
                std::to_string(in_flight()) + " batches are in flight on this link, the maximum");
  }
  ++posted_;
  return {};
}

void link_ledger::ended(bool good) noexcept {
  ++(good ? completed_ : failed_);
}

void link_ledger::fence(transfer_id transfer) {
  fenced_.add(transfer);
}

link_stats link_ledger::stats() const noexcept {
  link_stats now;
  now.batches_posted = posted_;
  now.batches_completed = completed_;
  now.batches_failed = failed_;
  now.frames_out = frames_out_.load(std::memory_order_relaxed);
  now.frames_in = frames_in_.load(std::memory_order_relaxed);
  now.in_flight = in_flight();
  return now;
}

}  // namespace troupe::transport
