#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/cli/bench_options.hpp"
#include "troupe/deploy/cli/latency_histogram.hpp"

namespace troupe::deploy::cli {

/// The measurements, so far or in the end, without the warm-up transfers.
struct bench_outcome {
  std::uint64_t transfers{0};
  std::uint64_t bytes{0};
  /// The time in which transfers moved: from the end of the warm-up to the last outcome; with
  /// `verify` without the time between rounds.
  std::chrono::nanoseconds elapsed{0};
  std::chrono::nanoseconds lasted{0};  ///< with the time between rounds
  /// From the call of `receive` until the engine has the event of its success.
  latency_histogram latency;
  std::uint64_t verified{0};  ///< transfers whose every byte was compared
  bool interrupted{false};
};

/// `interrupted` is polled often and ends the run early. `checkpoint` gets the progress, ten times
/// a second; its error ends the run.
struct bench_watch {
  std::function<bool()> interrupted;
  std::function<result<void>(const bench_outcome&)> checkpoint;
};

/// The decode side of the load, which measures it. Uses `node` from the calling thread. The first
/// failed transfer ends the run: a failing load has no speed.
[[nodiscard]] result<bench_outcome> run_bench_receiver(engine& node, const std::string& source,
                                                       const bench_options& options,
                                                       const bench_watch& watch);

}  // namespace troupe::deploy::cli
