#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/shm/control_memory.hpp"
#include "troupe/transport/shm/thread_order.hpp"

namespace troupe::transport::shm {

/// The owner's side of the slots of one link: which grant has which slot, and in which slots the
/// peer still is. Not thread-safe.
///
/// | slot     | on                  | becomes                                       |
/// | -------- | ------------------- | --------------------------------------------- |
/// | free     | give                | given                                         |
/// | given    | revoke, not busy    | free                                          |
/// | given    | revoke, busy        | draining: the region stays in use             |
/// | draining | sweep, not busy     | free                                          |
/// | draining | peer_is_dead        | free                                          |
class slot_owner {
 public:
  explicit slot_owner(std::span<grant_slot> shared, thread_order order = {0, 0});

  /// Takes a slot for grant `id` and keeps `memory` in use until the slot is free again.
  /// `overloaded`.
  [[nodiscard]] result<std::uint32_t> give(std::uint64_t id, transfer_id transfer,
                                           region_use memory);
  /// Revokes every slot of the transfer. Returns whether none of them is draining.
  bool revoke(transfer_id transfer);
  void revoke_all();
  /// Frees the draining slots that the peer has left. Returns whether any was freed.
  bool sweep();
  /// The peer can be in no slot any more: frees all draining slots, now and from now on.
  void peer_is_dead();

  /// The transfers that slots over the region were given for.
  void add_users_of(region_id region, std::set<transfer_id>& to) const;
  [[nodiscard]] bool draining(transfer_id transfer) const;
  [[nodiscard]] bool any_draining() const noexcept { return !draining_.empty(); }
  [[nodiscard]] std::size_t given() const noexcept { return given_; }

 private:
  struct record {
    transfer_id transfer;
    region_use memory;
  };

  void revoke_slot(std::uint32_t slot);
  void release(std::uint32_t slot);

  std::span<grant_slot> shared_;
  thread_order order_;
  std::vector<record> records_;      ///< as many as slots were ever in use
  std::vector<std::uint32_t> free_;  ///< most recently used first: keeps the touched part small
  std::vector<std::uint32_t> draining_;
  std::unordered_map<transfer_id, std::vector<std::uint32_t>> by_transfer_;
  std::size_t given_{0};
  bool peer_dead_{false};
};

/// The initiator's presence in a slot while it copies one chunk. Converts to false when the grant
/// is gone.
class slot_visit {
 public:
  slot_visit(grant_slot& slot, std::uint64_t id) noexcept : slot_{&slot}, id_{id} {
    slot.busy.fetch_add(1, std::memory_order_seq_cst);
    entered_ = slot.id.load(std::memory_order_seq_cst) == id;
    if (!entered_) leave();
  }
  slot_visit(const slot_visit&) = delete;
  slot_visit& operator=(const slot_visit&) = delete;
  ~slot_visit() {
    if (entered_) leave();
  }
  explicit operator bool() const noexcept { return entered_; }

  /// Ends the visit. Returns whether the grant was revoked meanwhile: the owner may wait for us and
  /// must be rung.
  bool leave() noexcept {
    entered_ = false;
    slot_->busy.fetch_sub(1, std::memory_order_seq_cst);
    return slot_->id.load(std::memory_order_seq_cst) != id_;
  }

 private:
  grant_slot* slot_;
  std::uint64_t id_;
  bool entered_;
};

}  // namespace troupe::transport::shm
