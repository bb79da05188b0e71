#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/types.hpp"
#include "troupe/transport/xgmi/copy_item.hpp"

/// Cuts the segments of a batch into items for the kernels and the copy engine.
namespace troupe::transport::xgmi {

struct cutting {
  std::uint64_t chunk{8192};  ///< longest item; at most `most_chunk`
  std::uint64_t engine_bytes{UINT64_MAX};
  bool bulk{false};  ///< `copy_way::bulk` may be used
};

inline constexpr std::uint64_t most_chunk = 32'768;
static_assert(most_chunk <= most_item_bytes);

/// The bytes that one warp copies at a time, for a batch of `total` bytes: few if there is little
/// to share out, more if the table would get long. From about 16 MiB on, pieces of 16 KiB are read
/// 3% faster than pieces of 8 KiB and take a third of the host's time; in smaller batches warps
/// would end at different times.
[[nodiscard]] constexpr std::uint64_t chunk_for(std::uint64_t total) noexcept {
  constexpr std::uint64_t unit = 512;
  constexpr std::uint64_t warps = 256;
  constexpr std::uint64_t much = std::uint64_t{16} << 20;
  const auto even = (total / warps + unit - 1) / unit * unit;
  const auto least = std::clamp<std::uint64_t>(
      even, 1024, total >= much ? std::uint64_t{16'384} : std::uint64_t{8192});
  constexpr std::uint64_t most_items = 1 << 20;
  return std::clamp((total / most_items + unit - 1) / unit * unit, least, most_chunk);
}

[[nodiscard]] constexpr copy_way way_of(std::uint64_t from, std::uint64_t to, std::uint64_t bytes,
                                        bool bulk) noexcept {
  if (bulk && ((from | to | bytes) & 15) == 0) return copy_way::bulk;
  return ((from ^ to) & 15) == 0 ? copy_way::vector : copy_way::unlike;
}

/// Cuts one run. The sink has `run(way, from, to, bytes)`, `engine(from, to, bytes)` and
/// `rows(rows_item)`.
template <class Sink>
void cut_run(const cutting& how, std::uint64_t from, std::uint64_t to, std::uint64_t bytes,
             Sink& sink) {
  if (bytes <= how.chunk) {
    if (bytes != 0) sink.run(way_of(from, to, bytes, how.bulk), from, to, bytes);
    return;
  }
  if (bytes >= how.engine_bytes) {
    sink.engine(from, to, bytes);
    return;
  }
  while (bytes != 0) {
    const auto part = std::min(bytes, how.chunk);
    sink.run(way_of(from, to, part, how.bulk), from, to, part);
    from += part;
    to += part;
    bytes -= part;
  }
}

template <class Sink>
void cut_rows(const cutting& how, const segment& s, std::uint64_t from, std::uint64_t to,
              std::uint64_t from_stride, std::uint64_t to_stride, Sink& sink) {
  if (s.length == 0) return;
  if (from_stride == s.length && to_stride == s.length) {
    cut_run(how, from, to, s.length * s.count, sink);
    return;
  }
  const auto at_once = how.chunk / s.length;
  if (at_once < 2) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      cut_run(how, from + i * from_stride, to + i * to_stride, s.length, sink);
    }
    return;
  }
  for (std::uint64_t row = 0; row < s.count;) {
    const auto rows = std::min<std::uint64_t>(at_once, s.count - row);
    sink.rows(rows_item{from + row * from_stride, to + row * to_stride, from_stride, to_stride,
                        static_cast<std::uint32_t>(s.length), static_cast<std::uint32_t>(rows)});
    row += rows;
  }
}

/// Cuts all segments between two regions that begin at `local` and `remote`. The segments must have
/// been checked.
template <class Sink>
void cut_segments(const cutting& how, direction dir, std::uint64_t local, std::uint64_t remote,
                  std::span<const segment> segments, Sink& sink) {
  const bool writes = dir == direction::write;
  for (const auto& s : segments) {
    const auto here = local + s.local_offset;
    const auto there = remote + s.remote_offset;
    const auto from = writes ? here : there;
    const auto to = writes ? there : here;
    if (s.count == 1) [[likely]] {
      cut_run(how, from, to, s.length, sink);
    } else {
      cut_rows(how, s, from, to, writes ? s.local_stride : s.remote_stride,
               writes ? s.remote_stride : s.local_stride, sink);
    }
  }
}

}  // namespace troupe::transport::xgmi
