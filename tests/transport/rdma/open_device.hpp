#pragma once

#include <memory>
#include <string>

#include "troupe/transport/rdma/device.hpp"

namespace troupe::transport::rdma {

/// A device of the machine of tests/verbs, such as "rxe0a".
inline std::shared_ptr<device> open_device(const std::string& name) {
  rdma_options options;
  options.device = name;
  return device::open(choose_places(options, look_at_devices()).value().at(0)).value();
}

}  // namespace troupe::transport::rdma
