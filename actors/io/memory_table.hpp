#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
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
  bool withdrawn{false};             ///< nobody begins to use it any more
  std::uint32_t busy{0};             ///< calls that are using it, or granting it, just now
  bool left{false};                  ///< it uses its regions no more
  std::vector<region_id> leaving{};  ///< regions that nothing uses since it left them
};

/// The memories of an agent over the regions of its endpoint. Regions do not overlap, memories may:
/// a memory gets regions for the bytes that have none yet, and each region counts those that it
/// serves. Numbers of memories are drawn, so that whoever knows some of them cannot guess another.
/// Not thread-safe.
class memory_table {
 public:
  struct gap {
    std::uint64_t address{0}, length{0};
  };
  /// The stretches of these bytes that no region has.
  [[nodiscard]] std::vector<gap> gaps_in(std::span<const std::byte> bytes) const;
  /// Takes in the region that was made for a gap, which nothing uses yet.
  void add_region(region_id id, const gap& of);
  /// All of `bytes` is in regions. `overloaded`: in too many, or in one that is leaving.
  [[nodiscard]] result<memory_id> add(std::span<std::byte> bytes, std::string name,
                                      transport::access rights);
  /// The memory uses its regions no more. Returns those that nothing else uses, the same ones each time:
  /// no memory gets them from now on.
  [[nodiscard]] std::vector<region_id> let_leave(memory_id id);
  /// Forgets the memory, and the regions that left with it.
  void remove(memory_id id);
  /// Forgets a region that nothing uses.
  void remove_region(region_id id);
  [[nodiscard]] std::vector<region_id> regions() const;

  [[nodiscard]] own_memory* find(memory_id id);
  [[nodiscard]] const own_memory* find(memory_id id) const;
  /// One that is not withdrawn and holds all these bytes.
  [[nodiscard]] const own_memory* find_at(std::uint64_t address, std::uint64_t length) const;
  [[nodiscard]] std::size_t size() const noexcept { return memories_.size(); }
  /// The oldest first.
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
