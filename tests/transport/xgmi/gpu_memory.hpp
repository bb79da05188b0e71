#pragma once

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string_view>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

#include "gpu_double.hpp"

namespace troupe::transport::xgmi {

/// With TROUPE_TEST_GPU=1 the xgmi tests use the GPUs of this machine, else doubles.
inline bool on_real_gpus() {
  const char* told = std::getenv("TROUPE_TEST_GPU");
  return told != nullptr && std::string_view{told} == "1";
}

inline std::shared_ptr<gpu_site> site_under_test() {
  if (!on_real_gpus()) return double_site();
  auto site = gpu_site::of_process();
  if (const auto state = site->runtime->state(); !state.usable) {
    std::cerr << "TROUPE_TEST_GPU is 1, and there is nothing to test on: " << state.reason << '\n';
    std::exit(1);
  }
  return site;
}

/// Runs of some MiB use the copy engine, and kernels take a small share.
inline xgmi_options options_under_test() {
  xgmi_options options;
  options.engine_bytes = std::uint64_t{6} << 20;
  options.copy_blocks = 8;
  options.site = site_under_test();
  return options;
}

}  // namespace troupe::transport::xgmi
