#pragma once

/// Transfers between caches in GPU memory, for tests of the actors. Every process of the test uses
/// GPU doubles: their memory is host memory, so tests may look into it.

#include <vector>

#include "gpu_double.hpp"
#include "ways.hpp"

namespace troupe::testing {

/// Call before any node is started, in a process without threads.
inline std::vector<way> gpu_ways() {
  if (have_verbs()) return {};
  transport::xgmi::gpu_site::set_maker(transport::xgmi::double_site);
  return {{"xgmi", "write", true}, {"xgmi", "read", true}, {"shm", "write", true},
          {"shm", "read", true},   {"tcp", "write", true}, {"tcp", "read", true}};
}

/// The same between nodes that take themselves for different hosts, so NICs access the memory of
/// the GPUs. In the machine of tests/verbs.
inline std::vector<way> nic_ways() {
  if (!have_verbs()) return {};
  transport::xgmi::gpu_site::set_maker(transport::xgmi::double_site);
  return {{"rdma", "write"}, {"rdma", "read"}};
}

}  // namespace troupe::testing
