#include "troupe/transport/shm/grant_slots.hpp"

#include <algorithm>
#include <string>

namespace troupe::transport::shm {

slot_owner::slot_owner(std::span<grant_slot> shared, thread_order order)
    : shared_{shared}, order_{order} {}

result<std::uint32_t> slot_owner::give(std::uint64_t id, transfer_id transfer, region_use memory) {
  std::uint32_t slot = 0;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else if (records_.size() < shared_.size()) {
    slot = static_cast<std::uint32_t>(records_.size());
    records_.emplace_back();
  } else {
    return fail(errc::overloaded,
                "all " + std::to_string(shared_.size()) +
                    " grant slots of this link are taken; fence transfers that have ended");
  }
  records_[slot] = {transfer, std::move(memory)};
  by_transfer_[transfer].push_back(slot);
  ++given_;
  shared_[slot].id.store(id, std::memory_order_seq_cst);
  return slot;
}

bool slot_owner::revoke(transfer_id transfer) {
  const auto at = by_transfer_.find(transfer);
  if (at != by_transfer_.end()) {
    const auto slots = std::move(at->second);
    by_transfer_.erase(at);
    for (const auto slot : slots) revoke_slot(slot);
  }
  return !draining(transfer);
}

void slot_owner::revoke_all() {
  for (const auto& [transfer, slots] : by_transfer_) {
    for (const auto slot : slots) revoke_slot(slot);
  }
  by_transfer_.clear();
}

void slot_owner::revoke_slot(std::uint32_t slot) {
  shared_[slot].id.store(0, std::memory_order_seq_cst);
  if (peer_dead_ || shared_[slot].busy.load(std::memory_order_seq_cst) == 0) {
    release(slot);
  } else {
    draining_.push_back(slot);
  }
}

bool slot_owner::sweep() {
  const auto left =
      std::stable_partition(draining_.begin(), draining_.end(), [&](std::uint32_t slot) {
        return !peer_dead_ && shared_[slot].busy.load(std::memory_order_seq_cst) != 0;
      });
  const bool freed = left != draining_.end();
  for (auto at = left; at != draining_.end(); ++at) release(*at);
  draining_.erase(left, draining_.end());
  return freed;
}

void slot_owner::peer_is_dead() {
  peer_dead_ = true;
  sweep();
}

void slot_owner::add_users_of(region_id region, std::set<transfer_id>& to) const {
  for (const auto& [transfer, slots] : by_transfer_) {
    const auto over = [&](std::uint32_t slot) { return records_[slot].memory->id() == region; };
    if (std::ranges::any_of(slots, over)) to.insert(transfer);
  }
}

bool slot_owner::draining(transfer_id transfer) const {
  return std::ranges::any_of(
      draining_, [&](std::uint32_t slot) { return records_[slot].transfer == transfer; });
}

void slot_owner::release(std::uint32_t slot) {
  order_.after_load();  // of `busy`
  records_[slot].memory.release();
  free_.push_back(slot);
  --given_;
}

}  // namespace troupe::transport::shm
