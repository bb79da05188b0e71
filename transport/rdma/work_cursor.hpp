#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "troupe/kvcache/segment.hpp"

namespace troupe::transport::rdma {

/// A run of local memory.
struct local_run {
  std::uint64_t address{0};
  std::uint32_t bytes{0};
};

inline constexpr std::size_t max_runs = 16;

/// One request to the NIC: a run of remote memory, and the local runs that it is gathered from or
/// scattered to, in this order.
struct remote_run {
  std::uint64_t address{0};
  std::uint32_t bytes{0};
  std::uint32_t runs{0};
  std::array<local_run, max_runs> local{};
  std::uint32_t first_segment{0};  ///< of the piece that this request covers in part, ...
  std::uint32_t last_segment{0};   ///< ... and the last one
};

/// Cuts the segments of one piece into requests, in order and without allocating. Neighbours that
/// are contiguous on the remote side share a request while it has room for their local runs;
/// neighbours contiguous on both sides share a run. A segment longer than a request is split. If
/// regions are registered in pieces, a request stays within one piece of the remote region, and a
/// local run within one piece of the local region.
class work_cursor {
 public:
  struct limits {
    std::uint32_t bytes{1};  ///< of a request
    std::uint32_t runs{1};   ///< of local memory in a request, at most `max_runs`
  };

  work_cursor() = default;
  /// The caller owns the segments. `local` and `remote` are the addresses of the regions' first
  /// bytes, `local_piece` and `remote_piece` the sizes of their pieces (0 if the region is one
  /// piece).
  work_cursor(std::span<const segment> segments, std::uint64_t local, std::uint64_t remote,
              std::uint64_t local_piece = 0, std::uint64_t remote_piece = 0) noexcept
      : segments_{segments},
        local_{local},
        remote_{remote},
        local_piece_{local_piece},
        remote_piece_{remote_piece} {
    skip_empty();
  }

  [[nodiscard]] bool at_end() const noexcept { return index_ == segments_.size(); }
  /// Index of the segment that the next request begins with.
  [[nodiscard]] std::uint32_t segment_index() const noexcept {
    return static_cast<std::uint32_t>(index_);
  }
  /// Cuts the next request. Not to be called at the end.
  [[nodiscard]] remote_run next(const limits& within) noexcept;

 private:
  void skip_empty() noexcept;
  void advance(std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t local_address() const noexcept;
  [[nodiscard]] std::uint64_t remote_address() const noexcept;

  std::span<const segment> segments_;
  std::uint64_t local_{0};
  std::uint64_t remote_{0};
  std::uint64_t local_piece_{0};
  std::uint64_t remote_piece_{0};
  std::size_t index_{0};
  std::uint32_t repetition_{0};
  std::uint64_t done_{0};  ///< bytes of the current repetition
};

}  // namespace troupe::transport::rdma
