#pragma once

#include <cstdint>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {

/// Ranks [begin, end) of a replica.
struct rank_span {
  std::uint32_t begin{0};
  std::uint32_t end{0};

  [[nodiscard]] constexpr std::uint32_t count() const noexcept { return end - begin; }
  friend bool operator==(const rank_span&, const rank_span&) = default;
};

/// A source rank and a destination rank of two replicas, which may differ in size.
struct rank_pair {
  std::uint32_t source_ranks{1};
  std::uint32_t source{0};
  std::uint32_t destination_ranks{1};
  std::uint32_t destination{0};
};

/// The ranks that hold `head` of `heads` (see `head_range`): one unless there are more ranks than
/// heads.
[[nodiscard]] rank_span holders_of(std::uint32_t heads, std::uint32_t ranks,
                                   std::uint32_t head) noexcept;

/// The heads that the source sends to the destination, by the rule in plan.hpp: both hold them, and
/// the source is the designated one among the source ranks that hold them. Data that every rank
/// holds whole (an MLA latent, a replicated state) counts as one head.
[[nodiscard]] head_span heads_to_send(std::uint32_t heads, const rank_pair& ranks) noexcept;

/// Whether the two ranks have bytes in common of a tensor cut into equal slices, one per rank.
[[nodiscard]] bool slices_meet(const rank_pair& ranks) noexcept;

}  // namespace troupe::kvcache
