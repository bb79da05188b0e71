#pragma once

/// Simulated users: requests at a steady rate, each placed, computed at a prefill node, taken by a
/// decode node, and placed again when that fails, until it is done or its time is over.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "troupe/actors/cluster_client.hpp"

namespace troupe::testing {

struct load_options {
  std::uint32_t workers{24};  ///< most requests at once
  /// A worker's pause between two requests, from half to one and a half of this. It bounds the
  /// rate.
  std::chrono::milliseconds pause{200};
  std::uint32_t max_tokens{1024};
  std::chrono::milliseconds deadline{6000};  ///< of a request
  std::chrono::milliseconds transfer{2500};  ///< of one attempt
  std::uint64_t seed{1};
};

struct load_counts {
  std::uint64_t begun{0}, done{0};
  std::uint64_t given_up{0};                     ///< by their users, in the middle
  std::uint64_t attempts{0};                     ///< placements, including the first ones
  std::map<std::string, std::uint64_t> failed;   ///< requests, by errc
  std::map<std::string, std::uint64_t> retried;  ///< attempts that failed, by errc
  std::map<std::string, std::string> examples;   ///< one sentence each
  std::chrono::milliseconds longest{0};
};

class load {
 public:
  using clock = std::chrono::steady_clock;

  /// Starts at once. The client must outlive this object.
  load(actors::cluster_client& client, load_options options);
  ~load();
  load(const load&) = delete;
  load& operator=(const load&) = delete;
  /// Starts no more requests and waits for those in progress.
  void stop();

  /// Requests done per second in [from, to).
  [[nodiscard]] double rate(clock::time_point from, clock::time_point to) const;
  [[nodiscard]] load_counts counts() const;
  /// Observations that a frontend must never make.
  [[nodiscard]] std::vector<std::string> violations() const;

 private:
  struct request;
  void work(std::uint32_t worker);
  void serve(const std::string& id, std::uint64_t dice);
  [[nodiscard]] result<void> attempt(const request& r, const actors::placement& where);
  [[nodiscard]] result<void> place_and_attempt(request& r);
  void note_done(std::chrono::milliseconds took);
  void note_failed(const error& why, std::chrono::milliseconds took);
  void note_retry(const error& why);
  void look_at(const request& r, const error& why);
  void violated(const std::string& what);

  actors::cluster_client& client_;
  const load_options options_;
  std::atomic<bool> over_{false};
  mutable std::mutex mutex_;
  std::vector<clock::time_point> done_;  ///< in order of completion
  load_counts counts_;
  std::vector<std::string> violations_;
  std::vector<std::thread> workers_;
};

}  // namespace troupe::testing
