#pragma once

/// Looks at a cluster under load while faults come and go, and says what of its promises it broke.

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

/// How soon users are served again.
class recovery_watch {
 public:
  using clock = load::clock;
  explicit recovery_watch(const load& users) : users_{users} {}

  /// While nothing is wrong, several times a second: notes what is usual.
  void look_at_calm();
  /// Waits until for a whole second each last second served at least half of what is usual. How long it
  /// took to the beginning of that; nothing when it did not come.
  [[nodiscard]] std::optional<std::chrono::milliseconds> wait_for_recovery() const;
  /// The least that any second since then served, requests per second.
  [[nodiscard]] double least_since(clock::time_point when) const;
  /// Median of the seconds without faults, requests per second.
  [[nodiscard]] double usual() const;

 private:
  const load& users_;
  std::vector<double> calm_;
  clock::time_point looked_{};
};

/// Waits until every node is up, idle and whole: its pool has all blocks free, no
/// operation or transfer is open, and no link leads to a life that is over. What of that is still not
/// so then; nothing where all is well.
[[nodiscard]] std::vector<std::string> what_is_not_at_rest(cluster_processes& cluster,
                                                           actors::cluster_client& client);

struct chaos_report {
  std::map<std::string, int> faults;                          ///< by kind
  std::map<std::string, std::chrono::milliseconds> recovery;  ///< the worst after each kind
  std::map<std::string, std::chrono::milliseconds> back;  ///< the longest until all nodes were up
  std::map<std::string, double> least;  ///< requests per second while each kind lasted
  load_counts requests;
  double usual{0};
  std::vector<std::string> violations;
};
/// As a table for people.
[[nodiscard]] std::string to_string(const chaos_report& report);

}  // namespace troupe::testing
