#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "troupe/io/agent.hpp"
#include "troupe/io/descriptor.hpp"

/// Turns lists of places into the segments that a link moves. Pure: callers pass in what is known
/// of memories.
namespace troupe::io {

/// Bytes in one region: one side of a `segment`.
struct region_run {
  std::uint64_t memory{0};  ///< number of the memory
  region_id region;
  std::uint64_t offset{0}, length{0}, stride{0};
  std::uint32_t count{1};
};

/// The places of a list, entry by entry. An entry that crosses a border between regions has several runs.
struct placed_list {
  std::vector<region_run> runs;
  std::vector<std::uint32_t> ends{};  ///< where the runs of each entry end

  [[nodiscard]] std::size_t entries() const noexcept { return ends.size(); }
  [[nodiscard]] std::span<const region_run> runs_of(std::uint32_t index) const noexcept {
    const auto begin = index == 0 ? 0U : ends[index - 1];
    return std::span{runs}.subspan(begin, ends[index] - begin);
  }
};

inline constexpr std::size_t max_runs = std::size_t{1} << 20;

/// Appends the entry; its address is in the process of `where`'s owner. `out_of_range`: the entry
/// is not wholly inside that memory, is empty, overlaps its own repetitions, or wraps.
/// `overloaded`: too many runs.
[[nodiscard]] result<void> add_entry(placed_list& to, const described_memory& where,
                                     const entry& what);

/// What one transfer moves, in the order of its entries.
struct planned_batch {
  /// Segments between one local region and one part of a remote memory.
  struct group {
    region_id local;
    std::uint64_t remote_memory{0};
    region_id remote;
    std::vector<segment> segments;
    struct entry_range {
      std::uint32_t first{0}, last{0};
    };
    std::vector<entry_range> entries{};  ///< the entries that each segment serves
  };
  std::vector<group> groups{};
  std::vector<std::uint64_t> local_memories{}, remote_memories{};  ///< each once
  std::uint64_t bytes{0};
  std::uint32_t entries{0};

  /// The entries of these segments, which are counted over all groups in order.
  [[nodiscard]] std::vector<std::uint32_t> entries_of(
      std::span<const std::uint32_t> segments) const;
  [[nodiscard]] std::vector<std::uint32_t> all_entries() const;
};

/// Checks that the remote side of the group lies in this memory, as its owner knows it.
/// `out_of_range`.
[[nodiscard]] result<void> check_within(const planned_batch::group& what,
                                        const described_memory& where);

/// Pairs entry `local_index[i]` with entry `remote_index[i]`; without indices, entries of equal
/// number. `out_of_range`: an invalid index, or a pair of different sizes; the message names the
/// pair.
[[nodiscard]] result<planned_batch> pair_up(const placed_list& local,
                                            std::span<const std::uint32_t> local_index,
                                            const placed_list& remote,
                                            std::span<const std::uint32_t> remote_index,
                                            merge_entries merge);

}  // namespace troupe::io
