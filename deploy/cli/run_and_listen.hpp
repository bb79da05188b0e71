#pragma once

#include <chrono>
#include <future>
#include <utility>

#include "troupe/deploy/cli/stop_signals.hpp"

namespace troupe::deploy::cli {

/// Runs `work`, which may wait for peers, on a thread of its own and listens for signals meanwhile.
/// At the first signal it calls `on_signal`, waits for `work` and returns false; from then on
/// another signal ends the process at once. Returns true if no signal came.
template <class Work, class OnSignal>
[[nodiscard]] bool run_and_listen(stop_signals& signals, Work work, OnSignal on_signal) {
  using std::chrono::milliseconds;
  auto done = std::async(std::launch::async, std::move(work));
  while (done.wait_for(milliseconds{0}) != std::future_status::ready) {
    if (!signals.wait(milliseconds{10})) continue;
    on_signal();
    signals.restore();
    done.get();
    return false;
  }
  done.get();
  return true;
}

}  // namespace troupe::deploy::cli
