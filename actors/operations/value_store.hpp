#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/store.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::actors {

/// The keyed values of one node, in memory that peers can read, and that peers' values can be read
/// into. Thread-safe: the engine's threads look into it, actors fill it. It must be held by a
/// shared_ptr, since it lives until the last view of a value is gone.
class value_store : public std::enable_shared_from_this<value_store> {
 public:
  using clock = std::chrono::steady_clock;

  /// Takes `size` bytes of the endpoint's memory. Errors of `endpoint::allocate`.
  [[nodiscard]] static result<std::shared_ptr<value_store>> create(transport::endpoint& endpoint,
                                                                   std::uint64_t size);
  /// Same, but allocates when the first value comes: most nodes that are no stores never see one.
  /// Calls that need room fail as `endpoint::allocate` does, and try again the next time. Once the
  /// endpoint is gone, nothing can be put.
  [[nodiscard]] static std::shared_ptr<value_store> on_demand(transport::endpoint& endpoint,
                                                              std::uint64_t size);

  /// Room for a value that is being written. Freed again if it is destroyed without `commit`.
  class reservation {
   public:
    reservation(std::shared_ptr<value_store> store, kvcache::put_slot slot,
                std::chrono::milliseconds ttl);
    ~reservation();
    reservation(reservation&&) noexcept = default;
    reservation& operator=(reservation&&) = delete;
    reservation(const reservation&) = delete;
    reservation& operator=(const reservation&) = delete;
    /// Offset and length in `region()`, bytes.
    [[nodiscard]] extent where() const noexcept { return {slot_.offset, slot_.size, 0, 1}; }
    [[nodiscard]] std::span<std::byte> bytes() const;
    /// Makes the value visible under its key. `already_exists` if another put was faster.
    [[nodiscard]] result<void> commit();
    /// Same, and keeps the value in place while the returned pin lives, even if it is removed.
    [[nodiscard]] result<std::shared_ptr<const void>> commit_pinned(std::string_view key);

   private:
    std::shared_ptr<value_store> store_;  ///< null: moved from, or committed
    kvcache::put_slot slot_;
    std::chrono::milliseconds ttl_;
  };

  /// A value that stays in place while this object lives.
  struct pinned {
    extent where;
    std::span<const std::byte> bytes;
    std::chrono::milliseconds ttl{0};  ///< 0: no end
    std::shared_ptr<const void> pin;
  };
  struct information {
    std::uint64_t size{0};
    std::chrono::milliseconds ttl{0};
  };

  /// `already_exists`, `pool_exhausted`, `out_of_range` (key or size).
  [[nodiscard]] result<reservation> reserve(std::string_view key, std::uint64_t size,
                                            std::chrono::milliseconds ttl);
  /// Room for the reader's copy of a peer's value, under no key.
  [[nodiscard]] result<reservation> scratch(std::uint64_t size);
  [[nodiscard]] result<void> put(std::string_view key, std::span<const std::byte> value,
                                 std::chrono::milliseconds ttl);
  [[nodiscard]] result<pinned> get(std::string_view key);
  [[nodiscard]] result<information> query(std::string_view key);
  [[nodiscard]] result<void> remove(std::string_view key);

  void expire(clock::time_point now);
  [[nodiscard]] bool anything_expires() const;
  void describe(pool_report& report) const;
  /// Not a region of the endpoint until memory has been allocated.
  [[nodiscard]] region_id region() const;

 private:
  struct view_pin;

  value_store(transport::endpoint& endpoint, std::uint64_t size);
  [[nodiscard]] result<void> allocate();
  void abort(kvcache::put_id put);
  void release(kvcache::view_id view);

  transport::endpoint& endpoint_;
  const std::uint64_t size_;
  mutable std::mutex mutex_;
  region_id region_;
  std::span<std::byte> memory_;  ///< holders of a reservation read it without the mutex
  kvcache::keyed_store store_;
  std::uint64_t next_scratch_{1};
};

}  // namespace troupe::actors
