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

/// The work of one batch in flight on one GPU.
struct flight {
  device_lanes* on{nullptr};
  /// The mark on each lane; 0 if the lane was not used.
  std::array<std::uint64_t, device_lanes::lane_count> marks{};
  std::vector<pinned_memory> tables;  ///< returned once the marks are reached

  [[nodiscard]] bool ended() const noexcept;
  /// After the end: why the copied bytes cannot be trusted, if so. Returned once.
  [[nodiscard]] std::optional<troupe::error> take_failure();
  /// Whether a lane that it used has failed.
  [[nodiscard]] bool lost() const noexcept;
  void give_back_tables();
};

/// Writes the items of a batch into tables and launches them. If the GPU is idle it launches them
/// in parts, so that the first part is copied while the rest is written. Items of one kind share a
/// table; a table is written once, in order, and the GPU reads it in place.
class batch_launch {
 public:
  struct plan {
    std::uint32_t copy_blocks{64};
    std::uint64_t engine_bytes{UINT64_MAX};
    bool bulk{false};
    std::uint64_t total{0};     ///< bytes of the batch
    std::uint64_t segments{0};  ///< of the batch
    std::uint64_t chunk{0};     ///< of `cutting`; 0 for `chunk_for(total)`
  };

  batch_launch(device_lanes& on, const plan& how);
  batch_launch(const batch_launch&) = delete;
  batch_launch& operator=(const batch_launch&) = delete;

  void add(direction dir, const std::byte* local, const std::byte* remote,
           std::span<const segment> segments);
  /// Launches the rest. Parts launched before a failure are in flight and are part of the result.
  [[nodiscard]] flight end();
  [[nodiscard]] const std::optional<troupe::error>& failure() const noexcept { return failure_; }

  // -- the sink of `cut_segments`
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
  /// The items of one kind; those from `launched` to `used` are written but not launched.
  template <class Item>
  struct part_of {
    Item* items{nullptr};
    std::uint32_t used{0};
    std::uint32_t until{0};  ///< `make_room` is due before the item with this index
    std::uint32_t launched{0};
    std::uint32_t capacity{0};  ///< of the table
    pinned_memory table{};      ///< empty while the items are in `first_`
  };

  [[nodiscard]] std::size_t add_plain(direction dir, std::uint64_t local, std::uint64_t remote,
                                      std::span<const segment> segments);
  [[nodiscard]] bool make_room(copy_way way, part_of<run_item>& part);
  template <class Item>
  [[nodiscard]] bool take_table(part_of<Item>& part);
  template <class Item>
  void launch(copy_way way, part_of<Item>& part);
  template <class Call>
  void give(Call call);
  template <class Item>
  void set_until(part_of<Item>& part) const;

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
  /// Holds the items while they are few enough to travel in the launch. Written before it is read.
  std::array<std::array<run_item, max_inline_items>, run_ways> first_;
  std::optional<troupe::error> failure_;
};

}  // namespace troupe::transport::xgmi
