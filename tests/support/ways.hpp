#pragma once

/// The ways in which a transfer may go: backend and mode. A parameter of tests.

#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cluster_fixture.hpp"
#include "memory_reach.hpp"

namespace troupe::testing {

struct way {
  std::string backend;
  std::string mode;
  bool on_gpus{false};  ///< both caches are in GPU memory
};

inline std::string name_of(const ::testing::TestParamInfo<way>& info) {
  return info.param.backend + "_" + info.param.mode + (info.param.on_gpus ? "_gpus" : "");
}

inline actors::transfer_mode mode_of(const way& w) {
  return transfer_mode_of(w.mode).value();
}

inline cluster_options options_of(const way& w) {
  cluster_options options;
  options.backend = w.backend;
  options.mode = w.mode;
  if (w.on_gpus) {
    options.prefill_device = "gpu:0";
    options.decode_device = "gpu:1";
  }
  return options;
}

/// Why the backend cannot move memory that the engine allocated on this machine. Empty if it can.
inline std::optional<std::string> why_engine_memory_does_not_move(const std::string& backend) {
  if (backend != "shm") return std::nullopt;
  return why_memory_is_out_of_reach();
}

/// Every backend of this machine. The virtual machine with RDMA devices tests only rdma, which no
/// other machine can.
inline std::vector<std::string> every_backend() {
  if (have_verbs()) return {"rdma"};
  return {"tcp", "shm"};
}

inline std::vector<way> every_way() {
  std::vector<way> all;
  for (const auto& backend : every_backend()) {
    for (const auto* mode : {"write", "read"}) all.push_back({backend, mode});
  }
  return all;
}

}  // namespace troupe::testing
