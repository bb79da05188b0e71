#include "rdma_ours.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

namespace troupe::bench {

using namespace transport;

namespace {

/// The same few MiB repeatedly, as in perftest: in emulation the processor moves the bytes.
constexpr std::uint64_t region_bytes = std::uint64_t{8} << 20;
constexpr std::uint64_t most_bytes_in_flight = std::uint64_t{4} << 20;
constexpr std::size_t message_bytes = 8;

node_plan plan_for(link_role role, const std::string& device, std::uint32_t lanes,
                   std::uint32_t workers) {
  node_plan plan{.kind = backend_kind::rdma,
                 .role = role,
                 .lanes = lanes,
                 .workers = workers,
                 .memory = workers == 0 ? std::uint64_t{1} << 20 : region_bytes};
  plan.rdma.device = device;
  return plan;
}

/// The segments of batch `number`: runs of neighbours, with a gap as long as a run before the next,
/// over all of the region and then from its start again.
std::vector<segment> segments_of(const rdma_work& work, std::uint64_t number) {
  const auto run = (work.neighbours == 0 ? rdma_blocks_per_batch : work.neighbours) * work.block;
  const auto distance = work.neighbours == 0 ? run : 2 * run;
  const auto runs = std::max<std::uint64_t>(region_bytes / distance, 1);
  std::vector<segment> made;
  made.reserve(rdma_blocks_per_batch);
  for (std::uint64_t i = 0; i < rdma_blocks_per_batch; ++i) {
    const auto at = (number * rdma_blocks_per_batch + i) * work.block;
    const auto offset = at / run % runs * distance + at % run;
    made.push_back({offset, offset, work.block, 0, 0, 1});
  }
  return made;
}

}  // namespace

link_node rdma_node(const control& peer, const rdma_places& places, std::uint32_t workers) {
  return make_node(peer, plan_for(link_role::initiator, places.near, places.lanes, workers));
}

double rdma_throughput(link_node& n, const rdma_work& work) {
  static std::uint64_t next_batch = 0;
  const auto batch_bytes = rdma_blocks_per_batch * work.block;
  const auto batches = std::max<std::uint64_t>(work.bytes / batch_bytes, 1);
  const auto at_once = std::clamp<std::uint64_t>(most_bytes_in_flight / batch_bytes, 2, 4);
  const auto grant = std::make_shared<const remote_grant>(n.peer_grant);
  std::uint64_t made = 0;
  const auto start = clock_type::now();
  static_cast<void>(stream(n, std::min(at_once, batches), [&]() -> std::optional<batch> {
    if (made == batches) return std::nullopt;
    auto fresh = new_batch(batch_id{++next_batch}, work.dir);
    fresh.pieces.push_back({n.region, grant, segments_of(work, made)});
    ++made;
    return fresh;
  }));
  return static_cast<double>(batches * batch_bytes) / seconds_since(start) / 1e6;
}

double rdma_latency(link_node& n, int count) {
  return message_latency(n, message_bytes, count);
}

void rdma_child(const control& parent, const rdma_places& places) {
  const auto busy = make_node(parent, plan_for(link_role::acceptor, places.far, places.lanes, 1));
  auto n = make_node(parent, plan_for(link_role::acceptor, places.far, places.lanes, 0));
  answer_rounds(parent, n, message_bytes);
}

}  // namespace troupe::bench
