#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe::engine_fuzz {

/// Seeds `first`, `first + 1`, ... `last`.
struct seed_range {
  std::uint64_t first{1}, last{1};
};

struct arguments {
  std::vector<seed_range> seeds;
  std::chrono::seconds budget{0};  ///< 0: no limit
  std::vector<std::string> backends;
  std::uint64_t most_bytes{64U << 20U};  ///< of all caches of a seed
  bool tells{false};                     ///< prints each story before it happens
  bool draws_only{false};
};

inline constexpr const char* usage =
    "usage: engine_fuzz [--backend auto|shm|tcp|rdma|xgmi] --seed N | --seeds A..B,C,... | "
    "--minutes M [--from N]\n"
    "                   ... --draw     prints the stories only\n";

/// Fails with `invalid_config` and a sentence; `backend_unavailable` for a backend that this
/// machine does not have.
[[nodiscard]] result<arguments> read_arguments(const std::vector<std::string>& words);

}  // namespace troupe::engine_fuzz
