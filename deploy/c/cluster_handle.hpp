#pragma once

#include <memory>
#include <utility>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/request_carrier.hpp"
#include "troupe/deploy/c/handles.hpp"
#include "troupe/deploy/c/process_life.hpp"

namespace troupe::c {

struct cluster_core {
  process_life life;
  std::unique_ptr<actors::cluster_client> client;
  /// One carrier for all requests: its destructor waits for calls that were given up, while the end
  /// of a request does not.
  std::unique_ptr<actors::request_carrier> carrier;

  cluster_core() = default;
  ~cluster_core() {
    if (life.is_this_process()) return;
    // Their destructors would wait for threads that only the parent has.
    (void)carrier.release();
    (void)client.release();
  }
  cluster_core(const cluster_core&) = delete;
  cluster_core& operator=(const cluster_core&) = delete;
};

}  // namespace troupe::c

struct troupe_cluster {
  std::shared_ptr<troupe::c::cluster_core> core;
};

namespace troupe::c {

/// A checked call to an engine.
[[nodiscard]] result<actors::call_request> call_of(const char* method, const void* payload,
                                                   std::size_t payload_size);

/// Runs the body of a call on a cluster that belongs to this process.
template <class Body>
troupe_status on_cluster(const troupe_cluster* cluster, Body&& body) noexcept {
  return guarded([&]() -> result<void> {
    if (auto here = present(cluster, "cluster"); !here) return here;
    const auto core = cluster->core;
    if (auto ours = core->life.check("the cluster"); !ours) return ours;
    return std::forward<Body>(body)(*core);
  });
}

}  // namespace troupe::c
