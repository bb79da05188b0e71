#pragma once

#include <atomic>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/cli/bench_options.hpp"

namespace troupe::deploy::cli {

/// The prefill side of the load: keeps `concurrency` requests on offer, numbered consecutively,
/// until all are sent or `stop` is set. Uses `node` from the calling thread. Returns the first
/// failure.
[[nodiscard]] result<void> run_bench_sender(engine& node, const bench_options& options,
                                            const std::atomic<bool>& stop);

}  // namespace troupe::deploy::cli
