#pragma once

/// One end of a link between two processes of a benchmark, over any backend.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "troupe/transport/endpoint.hpp"

#include "processes.hpp"

namespace troupe::bench {

struct node_sink final : transport::link_sink {
  void on_up() override { up = true; }
  void on_completion(transport::completion done) override;
  void on_frame(std::span<const std::byte> frame) override;
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override;

  bool is_child{false};
  std::atomic<bool> up{false};
  std::uint64_t frames{0};
  std::function<void()> when_completed;
  std::function<void(std::span<const std::byte>)> when_frame;
};

struct link_node {
  incarnation self;
  std::unique_ptr<transport::endpoint> place;
  std::shared_ptr<node_sink> said{std::make_shared<node_sink>()};
  std::shared_ptr<transport::link> wire;
  region_id region;
  std::span<std::byte> memory;
  transport::remote_grant peer_grant;  ///< to all of the peer's region
};

struct node_plan {
  transport::backend_kind kind{transport::backend_kind::tcp};
  transport::link_role role{transport::link_role::initiator};
  std::uint32_t lanes{1};
  std::uint32_t workers{1};  ///< 0: the node makes progress only while it is polled
  std::uint64_t memory{0};   ///< bytes of its region
  transport::rdma_options rdma{};
};

/// Both processes make the same nodes in the same order, the measuring one as initiator.
[[nodiscard]] link_node make_node(const control& peer, const node_plan& plan);

/// A new batch of a benchmark.
[[nodiscard]] transport::batch new_batch(transport::batch_id id, transport::direction dir);

/// Posts the batches that `next` makes, `at_once` in flight, until it makes no more and all have
/// completed; returns their number. The thread that takes a completion posts the next batch.
[[nodiscard]] std::uint64_t stream(link_node& n, std::size_t at_once,
                                   const std::function<std::optional<transport::batch>()>& next);

/// Latency of a message, which is a write of `bytes` with a frame of 8: half of the time from
/// `post` here until the peer's message is in `on_frame` here, microseconds, median of `count`.
/// Polls. The peer is in `answer_rounds`.
[[nodiscard]] double message_latency(link_node& n, std::uint64_t bytes, int count);

/// The other process: answers every message with one as large, polling from one word of the parent
/// until the next.
[[noreturn]] void answer_rounds(const control& parent, link_node& n, std::uint64_t bytes);

}  // namespace troupe::bench
