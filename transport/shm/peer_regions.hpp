#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/shm/wire.hpp"

namespace troupe::transport::shm {

/// One region of the peer, mapped here. Unmapped with its last user, so a running copy keeps it.
class mapped_region {
 public:
  mapped_region(std::byte* base, std::uint64_t size) noexcept : base_{base}, size_{size} {}
  mapped_region(const mapped_region&) = delete;
  mapped_region& operator=(const mapped_region&) = delete;
  ~mapped_region();

  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// Enters the next part of the region into the page tables, so that copies do not fault there.
  /// The memory itself was reserved by its owner. Returns whether to call again.
  bool populate_part() noexcept;

 private:
  std::byte* base_;
  std::uint64_t size_;
  std::uint64_t populated_{0};
};

/// The regions of one link's peer that are mapped here. Thread-safe.
class peer_regions {
 public:
  static constexpr std::size_t max_regions = 4096;

  /// Maps a region that the peer shared. `unauthorized` (no file, or a short or unsealed one),
  /// `overloaded`.
  [[nodiscard]] result<void> add(const region_shared_message& shared, owned_fd fd);
  void remove(region_id region);
  void clear();
  [[nodiscard]] bool has_fresh() const;
  /// Populates one part of one new region. Returns whether there is more to do. One caller at a
  /// time.
  bool populate_part();
  /// Null if not mapped.
  [[nodiscard]] std::shared_ptr<const mapped_region> find(region_id region) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<region_id, std::shared_ptr<mapped_region>> regions_;
  std::vector<std::shared_ptr<mapped_region>> fresh_;
};

}  // namespace troupe::transport::shm
