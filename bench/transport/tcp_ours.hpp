#pragma once

/// Our side of the tcp rows: two processes with links of the transport between them.

#include <cstddef>
#include <cstdint>

#include "link_node.hpp"

namespace troupe::bench {

/// Both processes make the same nodes in the same order, the measuring one as initiator. Without
/// `workers` the node makes progress only while it is polled.
[[nodiscard]] link_node tcp_node(const control& peer, transport::link_role role,
                                 std::uint32_t lanes, std::uint32_t workers);

/// GB/s of scattered blocks. Event-driven like the rival: the progress thread posts the next batch
/// when one completes, and sleeps when there is nothing to do.
[[nodiscard]] double our_throughput(link_node& n, transport::direction dir, std::size_t block);

/// Half of a round trip of 4 KiB writes with a frame, microseconds, p50. The node is polled.
[[nodiscard]] double our_latency(link_node& n, int count);

/// The other process: one node that sleeps when it has nothing to do, one that answers writes and
/// is polled between two bytes from the parent.
[[noreturn]] void our_child(const control& parent, std::uint32_t lanes);

}  // namespace troupe::bench
