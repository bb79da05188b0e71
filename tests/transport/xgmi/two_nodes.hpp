#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "gpu_double.hpp"
#include "two_ends.hpp"

namespace troupe::transport::xgmi {

inline constexpr transfer_id t1{0x1111};
inline constexpr std::uint64_t mib = std::uint64_t{1} << 20;

/// Two nodes, each with its own GPU site, which a test may break.
struct two_nodes : contract::two_ends {
  explicit two_nodes(std::uint32_t workers = 0, xgmi_options with = {}) : two_ends{workers} {
    with.site = site;
    make(a, incarnation{1}, with);
    make(b, incarnation{2}, with);
    open(a, b.self, link_role::initiator);
    open(b, a.self, link_role::acceptor);
    connect();
  }
  ~two_nodes() {
    driver->hold(false);
    if (a.wire) a.wire->close();
    if (b.wire) b.wire->close();
  }
  static void open(contract::end& e, incarnation peer, link_role role) {
    e.wire =
        e.place
            ->open(backend_kind::xgmi,
                   {.role = role, .peer = peer, .connect_timeout = contract::longer_than_any_wait},
                   e.sink)
            .value();
  }
  std::shared_ptr<const remote_grant> grant(contract::end& owner, region_id region,
                                            std::uint64_t size) {
    return std::make_shared<const remote_grant>(
        owner.wire->grant(region, {{0, size, 0, 1}}, access::read_write, t1).value());
  }

  gpu_double* driver{nullptr};
  std::shared_ptr<gpu_site> site{[this] {
    auto owned = std::make_unique<gpu_double>();
    driver = owned.get();
    return std::make_shared<gpu_site>(std::move(owned));
  }()};
};

}  // namespace troupe::transport::xgmi
