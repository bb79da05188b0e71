#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "troupe/transport/rdma/rdma_link.hpp"

// How a transfer becomes quiescent.

namespace troupe::transport::rdma {

namespace {

std::array<std::byte, sizeof(std::uint64_t)> payload_of(transfer_id transfer) {
  std::array<std::byte, sizeof(std::uint64_t)> payload{};
  std::memcpy(payload.data(), &transfer.value, sizeof transfer.value);
  return payload;
}

/// Whether the batch belongs to the transfer, or uses a grant that does (a standing grant).
bool concerns(const batch& work, transfer_id transfer) {
  return work.transfer == transfer || std::ranges::any_of(work.pieces, [&](const piece& one) {
           return one.remote->transfer == transfer;
         });
}

}  // namespace

fence_state rdma_link::fence(transfer_id transfer) {
  const auto self = shared_from_this();
  bool pending = false;
  {
    const std::lock_guard lock{mutex_};
    ledger_.fence(transfer);
    cancel(transfer, {errc::aborted, "the transfer was fenced here"});
    std::vector<std::unique_ptr<open_grant>> grants;
    if (const auto given = granted_.find(transfer); given != granted_.end()) {
      grants = std::move(given->second);
      granted_.erase(given);
    }
    for (const auto& grant : grants) grant->fenced = true;
    const bool ask = state_ == link_phase::up && !grants.empty();
    const auto known = fences_.find(transfer);
    pending = ask || under_way(transfer) || known != fences_.end();
    if (pending) {
      auto& now = fences_[transfer];
      if (known == fences_.end() || ask) {
        now.until = std::chrono::steady_clock::now() + fabric_.options.fence_patience;
      }
      if (ask) {
        now.peer_must_confirm = true;
        std::ranges::move(grants, std::back_inserter(now.grants));
        messages_->put(message_kind::revoke, payload_of(transfer));
        static_cast<void>(flush());  // a NIC that refuses also reports it in a completion
      }
      if (!fence_check_) fence_check_ = engine_.call_at(now.until, shared_from_this(), fence_timer);
    }
  }
  sink_.deliver();
  return pending ? fence_state::pending : fence_state::quiescent;
}

/// Under the lock: stops the transfer's batches that are not completely posted, and those whose
/// bytes are posted but whose notice the peer has no room for: it may never make room.
void rdma_link::cancel(transfer_id transfer, const troupe::error& why) {
  std::vector<batch_in_flight*> stopped;
  for (const auto& batch : active_) {
    const bool untold = batch->notices_left != 0 && !batch->notified;
    if (!concerns(batch->work, transfer) || (batch->cut && !untold)) continue;
    stopped.push_back(batch.get());
  }
  std::set<transfer_id> others;  // transfers that may wait for the end of such a batch
  for (auto* batch : stopped) {
    std::erase(queued_, batch);
    std::erase_if(unkeyed_, [&](const unkeyed& waits) { return waits.batch == batch; });
    batch->give_up(why);
    if (!batch->ended()) continue;
    others.insert(batch->work.transfer);
    for (const auto& one : batch->work.pieces) others.insert(one.remote->transfer);
    finish(*batch);
  }
  cancel_small(transfer, why);
  others.erase(transfer);  // handled by the caller
  for (const auto other : others) after_drained(other);
}

/// Under the lock: whether the transfer has requests at the NIC or immediates still to be posted,
/// or small batches that the peer has not answered.
bool rdma_link::under_way(transfer_id transfer) const {
  return small_under_way(transfer) || std::ranges::any_of(active_, [&](const auto& batch) {
           return concerns(batch->work, transfer) &&
                  (batch->outstanding != 0 || batch->notices_left != 0);
         });
}

/// Under the lock: delivers the batch's outcome, and completes what waited for its transfers.
void rdma_link::finish_drained(batch_in_flight& batch) {
  if (fences_.empty() && to_confirm_.empty()) {
    finish(batch);
    return;
  }
  std::set<transfer_id> transfers{batch.work.transfer};
  for (const auto& one : batch.work.pieces) transfers.insert(one.remote->transfer);
  finish(batch);
  for (const auto transfer : transfers) after_drained(transfer);
}

/// Under the lock, after a batch of the transfer has ended: confirms a revocation or completes a
/// fence if nothing of the transfer is in flight.
void rdma_link::after_drained(transfer_id transfer) {
  if (fences_.empty() && to_confirm_.empty()) return;
  const auto fence = fences_.find(transfer);
  const auto revoked = to_confirm_.find(transfer);
  const bool confirm = revoked != to_confirm_.end();
  if ((fence == fences_.end() && !confirm) || under_way(transfer)) return;
  if (confirm) {
    if (revoked->second.read_over != 0) {
      reads_unsettled_ = true;
    } else if (revoked->second.settling == 0) {
      to_confirm_.erase(revoked);
      messages_->put(message_kind::revoked, payload_of(transfer));
    }
  }
  if (fence != fences_.end() && !fence->second.peer_must_confirm && fence->second.grants.empty()) {
    fences_.erase(fence);
    sink_.put(quiescent_event{transfer});
  }
}

/// Under the lock.
void rdma_link::peer_revoked(transfer_id transfer) {
  revoked_.add(transfer);
  std::uint64_t read_over = 0;
  if (const auto of = peer_grants_of_.find(transfer); of != peer_grants_of_.end()) {
    read_over = of->second.read_over;
    for (const auto grant : of->second.grants) {
      const auto at = peer_grants_.find(grant);
      if (at == peer_grants_.end()) continue;
      peer_keys_ -= at->second->keys.size();
      peer_grants_.erase(at);
    }
    peer_grants_of_.erase(of);
  }
  if (state_ != link_phase::up) return;
  to_confirm_[transfer].read_over |= read_over;  // `cancel` may add to it
  cancel(transfer, {errc::grant_revoked, "the peer has revoked its grants for this transfer"});
  after_drained(transfer);
}

/// Under the lock: records that an ended batch of the transfer has read over these lanes.
void rdma_link::note_reads(transfer_id transfer, std::uint64_t lanes) {
  if (const auto revoked = to_confirm_.find(transfer); revoked != to_confirm_.end()) {
    revoked->second.read_over |= lanes;
  } else if (const auto known = peer_grants_of_.find(transfer); known != peer_grants_of_.end()) {
    known->second.read_over |= lanes;
  }
}

/// Under the lock: posts empty writes behind the reads of revoked transfers, as far as there is
/// room.
result<void> rdma_link::settle_reads() {
  if (!std::exchange(reads_unsettled_, false)) return {};
  for (auto& [transfer, revoked] : to_confirm_) {
    if (revoked.read_over == 0 || under_way(transfer)) continue;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      auto& lane = lanes_[i];
      const auto bit = std::uint64_t{1} << i;
      if ((revoked.read_over & bit) == 0) continue;
      if (lane.posted.size() >= lane.pair->depth()) {
        reads_unsettled_ = true;
        continue;
      }
      ibv_send_wr work{};
      work.wr_id = work_id(work_kind::data, static_cast<std::uint8_t>(i), ++lane.last_number);
      work.opcode = IBV_WR_RDMA_WRITE;
      work.send_flags = IBV_SEND_SIGNALED;
      ibv_send_wr* bad = nullptr;
      if (const int why = ::ibv_post_send(lane.pair->get(), &work, &bad); why != 0) {
        return refused_by_nic(why);
      }
      lane.posted.push_back({.number = lane.last_number, .settles = transfer});
      revoked.read_over &= ~bit;
      ++revoked.settling;
    }
  }
  return {};
}

/// Under the lock: the reads of the transfer on one lane are over.
void rdma_link::reads_settled(transfer_id transfer) {
  const auto revoked = to_confirm_.find(transfer);
  if (revoked == to_confirm_.end()) return;
  --revoked->second.settling;
  after_drained(transfer);
}

/// Under the lock. A confirmation that nobody waits for gives the fence no more time: a peer that
/// repeats it would keep the fence pending for ever.
void rdma_link::peer_confirmed(transfer_id transfer) {
  const auto fence = fences_.find(transfer);
  if (fence == fences_.end() || !fence->second.peer_must_confirm) return;
  fence->second.peer_must_confirm = false;
  fence->second.until = std::chrono::steady_clock::now() + fabric_.options.fence_patience;
  close_grants(fence->second);
  after_drained(transfer);
}

/// Under the lock: closes the fence's grants, once the peer has confirmed or is no longer waited
/// for.
void rdma_link::close_grants(fence_in_progress& fence) {
  for (const auto& grant : fence.grants) open_.erase(grant->given.id);
  std::erase_if(fence.grants, [&](const auto& grant) {
    if (!grant->windows.empty()) return false;
    --grants_;
    return true;
  });
  for (const auto& grant : fence.grants) close_grant(*grant);
}

/// Under the lock: completes all fences. The lanes' queue pairs must be gone.
void rdma_link::answer_all_fences() {
  for (const auto& [transfer, fence] : fences_) sink_.put(quiescent_event{transfer});
  fences_.clear();
  open_.clear();
  granted_.clear();
  grants_ = 0;
  to_confirm_.clear();
  reads_unsettled_ = false;
}

/// Handles fences whose patience has run out: closes their grants, or breaks the link.
void rdma_link::check_fences(steady_time now) {
  std::optional<troupe::error> why;
  {
    const std::lock_guard lock{mutex_};
    fence_check_.reset();
    if (fences_.empty()) return;
    auto next = steady_time::max();
    for (auto& [transfer, fence] : fences_) {
      // A peer that is not polling answers no small batches. Their local memory is no longer in
      // use.
      if (fence.until <= now) {
        abandon_small(transfer, {errc::aborted,
                                 "the transfer was fenced here, and the peer has not "
                                 "said whether it landed"});
      }
      const bool drained = !fence.peer_must_confirm && fence.grants.empty() && !under_way(transfer);
      if (fence.until <= now && reach_ == reach::windows && fence.peer_must_confirm) {
        // The NIC ends the peer's access. (Either all grants of a link have windows, or none has.)
        fence.peer_must_confirm = false;
        fence.until = now + fabric_.options.fence_patience;
        close_grants(fence);
      }
      if (fence.until <= now && !drained) {
        why = troupe::error{
            errc::link_broken,
            "the rdma link's queue pairs were destroyed, since transfer " +
                std::to_string(transfer.value) +
                (fence.peer_must_confirm ? " was fenced and the peer did not confirm within "
                 : fence.grants.empty()  ? " was fenced and did not drain within "
                                         : " was fenced and its windows were not shut within ") +
                std::to_string(fabric_.options.fence_patience.count()) + " ms"};
      }
      next = std::min(next, fence.until);
    }
    std::vector<transfer_id> looked_at;
    for (const auto& [transfer, fence] : fences_) looked_at.push_back(transfer);
    for (const auto transfer : looked_at) after_drained(transfer);
    if (!why) {
      auto ok = post_window_requests();
      if (ok) ok = settle_reads();
      if (ok) ok = flush();
      if (!ok) why = ok.error();
    }
    if (!why) fence_check_ = engine_.call_at(next, shared_from_this(), fence_timer);
  }
  sink_.deliver();
  if (why) break_link(std::move(*why));
}

}  // namespace troupe::transport::rdma
