#include "tcp_ours.hpp"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tcp_work.hpp"

namespace troupe::bench {

using namespace transport;

link_node tcp_node(const control& peer, link_role role, std::uint32_t lanes,
                   std::uint32_t workers) {
  return make_node(peer, {.kind = backend_kind::tcp,
                          .role = role,
                          .lanes = lanes,
                          .workers = workers,
                          .memory = region_size});
}

// -- measuring

double our_throughput(link_node& n, direction dir, std::size_t block) {
  static std::uint64_t next_batch = 0;
  const auto order = scattered(block);
  const auto grant = std::make_shared<const remote_grant>(n.peer_grant);
  std::size_t next = 0;
  const auto start = clock_type::now();
  const auto done = stream(n, batches_in_flight, [&]() -> std::optional<batch> {
    if (clock_type::now() - start >= round_time) return std::nullopt;
    auto work = new_batch(batch_id{++next_batch}, dir);
    std::vector<segment> segments;
    segments.reserve(blocks_per_batch);
    for (std::size_t i = 0; i < blocks_per_batch; ++i, ++next) {
      segments.push_back(
          {order[next % order.size()], order[(next * 7 + 3) % order.size()], block, 0, 0, 1});
    }
    work.pieces.push_back({n.region, grant, std::move(segments)});
    return work;
  });
  return static_cast<double>(done) * static_cast<double>(blocks_per_batch * block) /
         seconds_since(start) / 1e9;
}

double our_latency(link_node& n, int count) {
  return message_latency(n, message_size, count);
}

// -- the other process

void our_child(const control& parent, std::uint32_t lanes) {
  // One node sleeps when it has nothing to do, the other is polled by us.
  const auto busy = tcp_node(parent, link_role::acceptor, lanes, 1);
  auto n = tcp_node(parent, link_role::acceptor, lanes, 0);
  answer_rounds(parent, n, message_size);
}

}  // namespace troupe::bench
