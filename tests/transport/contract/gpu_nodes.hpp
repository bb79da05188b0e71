#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "two_ends.hpp"

namespace troupe::transport::contract {

/// Two nodes joined by one backend. Each has its own GPU doubles, so a test can break the GPUs of
/// one side.
struct gpu_nodes : two_ends {
  gpu_nodes(backend_kind over, std::uint32_t lane_count, std::uint32_t workers)
      : two_ends{workers}, kind{over}, lanes{lane_count} {
    make(a, incarnation{1}, {.site = site_a});
    make(b, incarnation{2}, {.site = site_b});
    join();
  }
  gpu_nodes(const gpu_nodes&) = delete;
  gpu_nodes& operator=(const gpu_nodes&) = delete;
  ~gpu_nodes() {
    gpus_a->hold(false);
    gpus_b->hold(false);
    if (a.wire) a.wire->close();
    if (b.wire) b.wire->close();
  }
  /// Opens another link between the two.
  void join() {
    open(a, b.self, link_role::initiator);
    open(b, a.self, link_role::acceptor);
    connect();
  }
  void open(end& e, incarnation peer, link_role role) const {
    e.sink = std::make_shared<recorder>();
    link_options with{.role = role, .peer = peer, .lanes = lanes};
    with.connect_timeout = longer_than_any_wait;
    e.wire = e.place->open(kind, with, e.sink).value();
  }
  /// Waits until the transfer is fenced.
  [[nodiscard]] bool fenced(end& e, transfer_id transfer = t1) const {
    return e.wire->fence(transfer) == fence_state::quiescent ||
           until([&] { return e.sink->is_quiescent(transfer); });
  }
  static std::span<std::byte> gpu_memory(end& e, std::uint64_t size) {
    e.region = e.place->allocate_on_gpu(0, size, "gpu").value();
    return e.memory = e.place->bytes(e.region).value();
  }
  static std::span<std::byte> host_memory(end& e, std::uint64_t size) {
    e.region = e.place->allocate(size, "host").value();
    return e.memory = e.place->bytes(e.region).value();
  }
  /// Which ends have their region on a GPU.
  struct on_gpus {
    bool of_a;
    bool of_b;
  };
  static constexpr std::array<on_gpus, 3> every_way{{{true, true}, {true, false}, {false, true}}};
  void allocate(on_gpus where, std::uint64_t size) {
    where.of_a ? gpu_memory(a, size) : host_memory(a, size);
    where.of_b ? gpu_memory(b, size) : host_memory(b, size);
  }
  static std::shared_ptr<const remote_grant> grant(end& owner, transfer_id transfer = t1) {
    return std::make_shared<const remote_grant>(
        owner.wire
            ->grant(owner.region, {{0, owner.memory.size(), 0, 1}}, access::read_write, transfer)
            .value());
  }

  backend_kind kind;
  std::uint32_t lanes;
  xgmi::gpu_double* gpus_a{nullptr};
  xgmi::gpu_double* gpus_b{nullptr};
  std::shared_ptr<xgmi::gpu_site> site_a{make_site(gpus_a)};
  std::shared_ptr<xgmi::gpu_site> site_b{make_site(gpus_b)};

 private:
  static std::shared_ptr<xgmi::gpu_site> make_site(xgmi::gpu_double*& gpus) {
    auto owned = std::make_unique<xgmi::gpu_double>();
    gpus = owned.get();
    return std::make_shared<xgmi::gpu_site>(std::move(owned));
  }
};

}  // namespace troupe::transport::contract
