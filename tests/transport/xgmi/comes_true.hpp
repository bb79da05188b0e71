#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace troupe::transport::xgmi {

/// Of what other threads, or processes, bring about.
inline bool comes_true(const std::function<bool()>& what) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{20};
  while (!what() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
  return what();
}

}  // namespace troupe::transport::xgmi
