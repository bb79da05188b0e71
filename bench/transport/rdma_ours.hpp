#pragma once

/// Our side of the rdma rows: two processes with links of the transport between them.

#include <cstdint>
#include <string>

#include "link_node.hpp"

namespace troupe::bench {

/// The device of each process, and the number of queue pairs of a link.
struct rdma_places {
  std::string near;  ///< device of the measuring process
  std::string far;
  std::uint32_t lanes{1};
};

/// The load of one bandwidth row.
struct rdma_work {
  transport::direction dir{transport::direction::write};
  std::uint64_t block{0};       ///< bytes of a segment
  std::uint64_t neighbours{1};  ///< blocks that follow each other on both sides, then comes a gap;
                                ///< 0: all of a batch
  std::uint64_t bytes{0};       ///< of a round, in batches of 64 blocks
};
inline constexpr std::uint64_t rdma_blocks_per_batch = 64;

/// The measuring end, with a progress thread or without.
[[nodiscard]] link_node rdma_node(const control& peer, const rdma_places& places,
                                  std::uint32_t workers);

/// MB/s (1e6 bytes) from the first post to the last completion. A progress thread posts the next
/// batch when one completes.
[[nodiscard]] double rdma_throughput(link_node& n, const rdma_work& work);

/// From posting a write of 8 bytes with a frame of 8 bytes until the target has the frame: half of a
/// round trip, microseconds, p50. The node is polled.
[[nodiscard]] double rdma_latency(link_node& n, int count);

/// The other process: the far ends of one node with a progress thread and of one that is polled
/// between two bytes from the parent and answers writes.
[[noreturn]] void rdma_child(const control& parent, const rdma_places& places);

}  // namespace troupe::bench
