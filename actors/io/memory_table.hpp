#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "troupe/io/address_index.hpp"
#include "troupe/io/agent.hpp"
#include "troupe/io/descriptor.hpp"

namespace troupe::io {

/// One memory of this agent.
struct own_memory {
  described_memory what;
  std::string name;
  std::byte* base{nullptr};
  std::uint64_t age{0};              ///< counts up from the oldest memory
  bool withdrawn{false};             ///< no new use may begin
  std::uint32_t busy{0};             ///< calls that are using or granting it now
  bool left{false};                  ///< it no longer uses its regions
  std::vector<region_id> leaving{};  ///< regions left unused when it left them
};

/// The memories of an agent over the regions of its endpoint. Regions do not overlap, memories may:
/// a memory gets regions for the bytes that have none yet, and each region counts the memories that
/// it serves. Memory numbers are random, so that knowing some of them does not help to guess
/// another. Not thread-safe.
class memory_table {
 public:
  struct gap {
    std::uint64_t address{0}, length{0};
  };
  /// The ranges of these bytes that no region covers.
  [[nodiscard]] std::vector<gap> gaps_in(std::span<const std::byte> bytes) const;
  /// Adds the region that was made for a gap. Nothing uses the region yet.
  void add_region(region_id id, const gap& of);
  /// Adds a memory; regions must cover all of `bytes`. `overloaded`: there are too many regions, or
  /// one is leaving.
  [[nodiscard]] result<memory_id> add(std::span<std::byte> bytes, std::string name,
                                      transport::access rights);
  /// No new use of the memory may begin, and `find_at` does not find it any more.
  void withdraw(memory_id id);
  /// Ends the memory's use of its regions. Returns the regions that nothing else uses, the same
  /// ones on every call; they are not given to any memory from now on.
  [[nodiscard]] std::vector<region_id> let_leave(memory_id id);
  /// Forgets the memory, and the regions that left with it.
  void remove(memory_id id);
  /// Forgets a region that nothing uses.
  void remove_region(region_id id);
  [[nodiscard]] std::vector<region_id> regions() const;

  [[nodiscard]] own_memory* find(memory_id id);
  [[nodiscard]] const own_memory* find(memory_id id) const;
  /// A memory that is not withdrawn and holds all these bytes.
  [[nodiscard]] const own_memory* find_at(std::uint64_t address, std::uint64_t length) const;
  [[nodiscard]] std::size_t size() const noexcept { return memories_.size(); }
  /// Oldest first.
  [[nodiscard]] std::vector<memory_id> all() const;

 private:
  struct owned_region {
    region_id id;
    std::uint64_t length{0};
    std::uint32_t uses{0};
    bool leaving{false};
  };
  [[nodiscard]] std::uint64_t draw_number() const;

  std::map<std::uint64_t, owned_region> regions_;  ///< by address
  std::map<std::uint64_t, own_memory> memories_;
  address_index by_address_;
  std::uint64_t last_age_{0};
};

}  // namespace troupe::io
