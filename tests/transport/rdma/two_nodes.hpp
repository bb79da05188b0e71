#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "pair.hpp"

// Two nodes in the machine of tests/verbs, a on rxe0a and b on rxe0b, with a link, usually of two
// lanes.
namespace troupe::transport::rdma {

struct two_nodes {
  two_nodes() = default;
  two_nodes(const two_nodes&) = delete;
  two_nodes& operator=(const two_nodes&) = delete;
  ~two_nodes() {
    for (auto* e : {&a, &b}) {
      if (e->wire) e->wire->close();
    }
  }

  /// The options for the node of `side`, 'a' or 'b'.
  static endpoint_options options_of(char side) {
    endpoint_options options;
    options.self = incarnation{static_cast<std::uint64_t>(side)};
    options.rdma.device = contract::rdma_devices(side, 1);
    contract::suit_emulation(options.rdma);
    return options;
  }
  static void create(contract::end& e, endpoint_options options) {
    e.self = options.self;
    e.place = endpoint::create(std::move(options)).value();
  }
  /// Call once both are created; returns when the link is up.
  void join(std::uint32_t lanes = 2) {
    open(a, b.self, link_role::initiator, lanes);
    open(b, a.self, link_role::acceptor, lanes);
    contract::join(a, b);
    ASSERT_TRUE(until([&] { return a.sink->ups == 1 && b.sink->ups == 1; }));
  }
  /// Waits while the nodes' threads do the work.
  bool until(const std::function<bool()>& done) {
    for (const auto last = testing::end_of_wait(); !done(); drive()) {
      if (contract::clock::now() > last) return false;
    }
    return true;
  }
  void drive_for(std::chrono::milliseconds time) {
    for (const auto last = contract::clock::now() + time; contract::clock::now() < last;) drive();
  }

  contract::end a, b;
  bool polls_a{
      false};  ///< it has no thread of its own: its end of the link works within `until` only

 private:
  void drive() const {
    if (polls_a && a.place->poll()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
  static void open(contract::end& e, incarnation peer, link_role role, std::uint32_t lanes) {
    const link_options options{.role = role,
                               .peer = peer,
                               .lanes = lanes,
                               .connect_timeout = contract::longer_than_any_wait};
    e.wire = e.place->open(backend_kind::rdma, options, e.sink).value();
  }
};

}  // namespace troupe::transport::rdma
