#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// The load of `troupe bench`: `concurrency` transfers of `tokens` tokens at a time, repeatedly,
/// from a prefill engine to a decode engine.
struct bench_options {
  std::uint32_t layers{28};
  std::uint32_t kv_heads{4};
  std::uint32_t head_dim{128};
  std::string dtype{"bf16"};
  std::uint32_t block_tokens{16};
  std::uint32_t tokens{1024};  ///< of a request
  std::uint32_t blocks{0};     ///< instead of tokens; 0: not given
  std::uint32_t concurrency{4};
  std::string mode{"write"};
  std::string backend{"auto"};
  std::uint32_t lanes{4};
  std::chrono::milliseconds duration{5000};
  std::uint64_t requests{0};  ///< instead of a duration; 0: not given
  bool polling{false};
  bool in_process{false};
  bool contiguous{false};  ///< blocks of a request are adjacent; else random
  /// Write and compare patterns, in rounds of `concurrency` transfers. Nothing is written or
  /// compared while the bytes of a round move, so that only the moving is timed.
  bool verify{false};
  std::string json_file;
};

/// Transfers before the first that counts: they make the links and touch the pages.
[[nodiscard]] std::uint64_t warm_up_of(const bench_options& options) noexcept;
[[nodiscard]] std::uint32_t blocks_per_request(const bench_options& options) noexcept;
/// A supervisor, one prefill and one decode node on this machine, with pools that hold
/// `concurrency` requests. `invalid_config` naming the option that does not fit.
[[nodiscard]] result<config::deployment> bench_deployment(const bench_options& options);
/// The options as arguments, for a process that takes one side of the same load.
[[nodiscard]] std::vector<std::string> arguments_of(const bench_options& options);
/// The id under which both sides know transfer number `index`.
[[nodiscard]] std::string bench_request(std::uint64_t index);
/// With `verify`: the key of the value that the prefill side keeps at its own node when the caches
/// of all transfers of round number `round` hold their pattern.
[[nodiscard]] std::string bench_round(std::uint64_t round);

}  // namespace troupe::deploy::cli
