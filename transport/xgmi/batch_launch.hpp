#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/xgmi/copy_lanes.hpp"
#include "troupe/transport/xgmi/cut_segments.hpp"

namespace troupe::transport::xgmi {

/// What a batch has under way on one GPU.
struct flight {
  device_lanes* on{nullptr};
  /// Of each lane that was used; 0: it was not.
  std::array<std::uint64_t, device_lanes::lane_count> marks{};
  std::vector<pinned_memory> tables;  ///< given back when the marks are reached

  [[nodiscard]] bool ended() const noexcept;
  /// Once it has ended: why what it brought cannot be believed. Told once.
  [[nodiscard]] std::optional<troupe::error> take_failure();
  /// A lane that it used is of no use any more.
  [[nodiscard]] bool lost() const noexcept;
  void give_back_tables();
};

/// Writes the items of a batch into tables and launches them; where the GPU has nothing else to do,
/// in parts, so that the first is copied while the rest is written. Items of one kind go into one
/// table; a table is written once, in order, and read by the GPU where it is.
class batch_launch {
 public:
  struct plan {
    std::uint32_t copy_blocks{64};
    std::uint64_t engine_bytes{UINT64_MAX};
    bool bulk{false};
    std::uint64_t total{0};     ///< bytes of the batch
    std::uint64_t segments{0};  ///< of it
    std::uint64_t chunk{0};     ///< of `cutting`; 0: what `chunk_for` says
  };

  batch_launch(device_lanes& on, const plan& how);
  batch_launch(const batch_launch&) = delete;
  batch_launch& operator=(const batch_launch&) = delete;

  void add(direction dir, const std::byte* local, const std::byte* remote,
           std::span<const segment> segments);
  /// Launches the rest. What was launched is under way also when this says that something failed.
  [[nodiscard]] flight end();
  [[nodiscard]] const std::optional<troupe::error>& failure() const noexcept { return failure_; }

  // -- what `cut_segments` calls
  void run(copy_way way, std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
    auto& part = runs_[static_cast<std::size_t>(way)];
    if (part.used == part.until) [[unlikely]] {
      if (!make_room(way, part)) return;
    }
    part.items[part.used++] = make_run_item(from, to, bytes);
  }
  void rows(const rows_item& item);
  void engine(std::uint64_t from, std::uint64_t to, std::uint64_t bytes);

 private:
  /// The items of one kind: `launched` to `used` are written and wait.
  template <class Item>
  struct part_of {
    Item* items{nullptr};
    std::uint32_t used{0};
    std::uint32_t until{0};  ///< where something must be done before the next one
    std::uint32_t launched{0};
    std::uint32_t capacity{0};  ///< of the table
    pinned_memory table{};      ///< none yet: the items are in `first_`
  };

  [[nodiscard]] std::size_t add_plain(direction dir, std::uint64_t local, std::uint64_t remote,
                                      std::span<const segment> segments);
  [[nodiscard]] bool make_room(copy_way way, part_of<run_item>& part);
  template <class Item>
  [[nodiscard]] bool take_table(part_of<Item>& part);
  template <class Item>
  void launch(copy_way way, part_of<Item>& part);
  void go(const copy_launch& what);
  [[nodiscard]] std::size_t lane_for_next() noexcept;
  void set_until(std::uint32_t& until, std::uint32_t launched, std::uint32_t capacity) const;

  static constexpr std::size_t run_ways = 3;

  device_lanes& on_;
  cutting how_;
  std::uint32_t share_of_gpu_;
  std::uint32_t blocks_;
  std::uint64_t items_expected_;
  std::uint32_t most_part_items_;
  std::uint32_t part_items_;  ///< of the next part
  std::size_t lane_;
  flight made_;
  std::array<part_of<run_item>, run_ways> runs_{};
  part_of<rows_item> rows_{};
  /// Where items are until there are too many to travel in the launch. Filled before it is read.
  std::array<std::array<run_item, max_inline_items>, run_ways> first_;
  std::optional<troupe::error> failure_;
};

}  // namespace troupe::transport::xgmi
