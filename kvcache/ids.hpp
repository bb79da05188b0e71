#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace troupe {

/// A typed number: ids of different kinds neither convert nor compare.
template <class Tag, class Rep>
struct strong_id {
  using rep = Rep;
  Rep value{};
  friend constexpr auto operator<=>(const strong_id&, const strong_id&) = default;
};

/// A node's life: random, drawn at its start, part of every identity that crosses the network. 0 is
/// never drawn.
using incarnation = strong_id<struct incarnation_tag, std::uint64_t>;
/// Identifies the transfer of one request between one prefill rank and one decode rank. Drawn by
/// the decode side, random enough that two decode nodes never draw the same; search the logs of
/// both nodes for it.
using transfer_id = strong_id<struct transfer_tag, std::uint64_t>;
/// A page of a layer's cache, counted from 0 in its pool, with the same index in every layer.
using block_id = strong_id<struct block_tag, std::uint32_t>;
/// A registered range of memory of one node, never reused within an incarnation.
using region_id = strong_id<struct region_tag, std::uint32_t>;

}  // namespace troupe

template <class Tag, class Rep>
struct std::hash<troupe::strong_id<Tag, Rep>> {
  std::size_t operator()(const troupe::strong_id<Tag, Rep>& id) const noexcept {
    return std::hash<Rep>{}(id.value);
  }
};
