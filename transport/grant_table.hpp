#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "troupe/kvcache/byte_set.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport {

/// A permission to touch memory that can be withdrawn for good. A thread that touches the memory
/// holds a `pin` meanwhile, for one non-blocking system call or one copy at most, and never while
/// it calls back into user code. `revoke` can therefore wait for the pins, and when it returns
/// nobody touches the memory again.
class revocable {
 public:
  /// Returns whether the memory may be touched; if so, it is pinned until `unpin`.
  [[nodiscard]] bool pin() noexcept {
    // Sequentially consistent on both sides: either this sees the flag, or `revoke` sees the pin.
    pins_.fetch_add(1, std::memory_order_seq_cst);
    if (!revoked_.load(std::memory_order_seq_cst)) return true;
    unpin();
    return false;
  }
  void unpin() noexcept { pins_.fetch_sub(1, std::memory_order_release); }
  [[nodiscard]] bool revoked() const noexcept { return revoked_.load(std::memory_order_acquire); }
  /// Withdraws the permission and waits until no pin is held. Returns whether this call withdrew
  /// it.
  bool revoke() noexcept;
  /// Permits again. For the owner, when nobody else holds a reference.
  void renew() noexcept { revoked_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> revoked_{false};
  std::atomic<std::uint32_t> pins_{0};
};

/// Unpins at the end of the scope. Converts to false when the permission was withdrawn.
class scoped_pin {
 public:
  explicit scoped_pin(revocable& what) noexcept : what_{what.pin() ? &what : nullptr} {}
  scoped_pin(const scoped_pin&) = delete;
  scoped_pin& operator=(const scoped_pin&) = delete;
  ~scoped_pin() {
    if (what_ != nullptr) what_->unpin();
  }
  explicit operator bool() const noexcept { return what_ != nullptr; }

 private:
  revocable* what_;
};

/// One grant that was given. `region`, `permitted`, `rights` never change; only `guard` does.
struct given_grant {
  std::uint64_t id{0};
  transfer_id transfer;
  bool standing{false};  ///< batches of any transfer may use it
  access rights{access::read};
  byte_set permitted;
  region_use memory;  ///< keeps the region registered; released when revoked
  std::byte* base{
      nullptr};  ///< first byte of the region; to be touched under a pin of `guard` only
  std::uint64_t region_size{0};
  region_id region;
  std::optional<std::uint32_t> gpu;  ///< whose memory it is; empty for host memory
  revocable guard;

  /// Whether a batch of transfer `of` may use it.
  [[nodiscard]] bool serves(transfer_id of) const noexcept { return standing || transfer == of; }
  /// Fills in the grant that was drawn over `used`, and keeps the region in use.
  void keep(const remote_grant& drawn, region_use used);
  /// The target's checks before an operation of the peer touches memory: `unauthorized` (wrong
  /// rights, or a grant of another transfer) ...
  [[nodiscard]] result<void> check_use(access wanted, transfer_id for_transfer) const;
  /// ... and `out_of_range`.
  [[nodiscard]] result<void> check_place(const extent& range) const;
};

/// A grant over parts of `memory` with a fresh id, not entered in any table; its `key` is empty.
/// `out_of_range`: a part outside the region, no part (an empty one counts), or too many parts.
[[nodiscard]] result<remote_grant> draw_grant(const region& memory, const byte_set& permitted,
                                              access rights, const grant_scope& scope,
                                              incarnation self);

/// The grants that one link's end has given to its peer. Thread-safe. Bounded by `max_grants`.
class grant_table {
 public:
  explicit grant_table(incarnation self, std::size_t max_grants = 65'536)
      : self_{self}, max_grants_{max_grants} {}

  /// The errors of `draw_grant`, and `overloaded`. The answer's `key` is empty: the backend fills
  /// it.
  [[nodiscard]] result<remote_grant> give(region_use memory, const byte_set& permitted,
                                          access rights, const grant_scope& scope);
  /// Null if the grant was never given or was revoked. A grant that is just being revoked may still
  /// be found, but cannot be pinned.
  [[nodiscard]] std::shared_ptr<given_grant> find(std::uint64_t id) const;
  /// Revokes every grant of the transfer and returns how many there were. When it returns, none of
  /// them is pinned or can be pinned again.
  std::size_t revoke(transfer_id transfer);
  /// Revokes all; for a link that ends.
  std::size_t revoke_all();
  [[nodiscard]] std::size_t size() const;
  /// The transfers that grants over the region were given for.
  void add_users_of(region_id region, std::set<transfer_id>& to) const;

 private:
  std::size_t end(const std::vector<std::shared_ptr<given_grant>>& ended);

  const incarnation self_;
  const std::size_t max_grants_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<given_grant>> grants_;
  std::unordered_multimap<transfer_id, std::uint64_t> by_transfer_;
};

}  // namespace troupe::transport
