#pragma once

/// Watches a cluster under load while faults come and go, and reports the promises that it broke.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cluster_processes.hpp"
#include "faults.hpp"
#include "load.hpp"

namespace troupe::testing {

/// Measures how soon users are served again.
class recovery_watch {
 public:
  using clock = load::clock;
  explicit recovery_watch(const load& users) : users_{users} {}

  /// Call several times a second while there is no fault: records the usual rate.
  void look_at_calm();
  /// Waits for a whole second in which every trailing one-second window serves at least half of the
  /// usual rate. Returns the time until that second began, or nothing if it did not come.
  [[nodiscard]] std::optional<std::chrono::milliseconds> wait_for_recovery() const;
  /// The lowest one-second rate since then, in requests per second.
  [[nodiscard]] double least_since(clock::time_point when) const;
  /// Median rate of the seconds without faults, in requests per second.
  [[nodiscard]] double usual() const;

 private:
  const load& users_;
  std::vector<double> calm_;
  clock::time_point looked_{};
};

/// Waits until every node is up, idle and whole: all blocks of its pool are free, no operation or
/// transfer is open, and no link leads to a former life. Returns what still violates that after the
/// wait. Empty if all is well.
[[nodiscard]] std::vector<std::string> what_is_not_at_rest(cluster_processes& cluster,
                                                           actors::cluster_client& client);

struct chaos_report {
  std::map<std::string, int> faults;                          ///< by kind
  std::map<std::string, std::chrono::milliseconds> recovery;  ///< longest after each kind
  std::map<std::string, std::chrono::milliseconds> back;      ///< longest until all nodes were up
  std::map<std::string, double> least;  ///< requests per second during each kind
  load_counts requests;
  double usual{0};
  std::vector<std::string> violations;
};
/// As a table for humans.
[[nodiscard]] std::string to_string(const chaos_report& report);

}  // namespace troupe::testing
