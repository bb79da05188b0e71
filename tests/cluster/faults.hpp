#pragma once

/// The faults of a chaos run, drawn from a seed, and the code that injects them.

#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cluster_processes.hpp"
#include "network.hpp"

namespace troupe::testing {

enum class fault_kind : std::uint8_t {
  kill,             ///< kills a node, which is started again
  freeze,           ///< freezes a node, which continues later
  cut_pair,         ///< cuts a prefill and a decode node off from each other
  cut_supervisor,   ///< cuts the supervisor off from half of the nodes
  unplug,           ///< cuts a node off from all others
  drain,            ///< drains a node, which is started again once it has left
  kill_supervisor,  ///< kills the supervisor, which is started again
};
[[nodiscard]] std::string to_string(fault_kind kind);

struct planned_fault {
  fault_kind kind{fault_kind::kill};
  std::vector<std::string> victims;
  std::chrono::milliseconds after{0};  ///< from the beginning of its episode
  std::chrono::milliseconds lasts{0};
};
[[nodiscard]] std::string to_string(const planned_fault& fault);

/// Faults that may overlap. At any time at least one prefill and one decode node are untouched.
struct episode {
  std::chrono::milliseconds pause{0};  ///< before it, since the recovery from the former one
  std::vector<planned_fault> faults;
};

/// Equal seeds and shapes give equal episodes.
class fault_schedule {
 public:
  fault_schedule(std::uint64_t seed, const cluster_shape& shape, bool with_cuts);
  [[nodiscard]] episode next();

 private:
  [[nodiscard]] planned_fault draw();
  [[nodiscard]] bool leaves_enough(const episode& e) const;
  [[nodiscard]] std::uint64_t below(std::uint64_t bound) { return dice_() % bound; }
  [[nodiscard]] std::string any_node();

  std::mt19937_64 dice_;
  cluster_shape shape_;
  std::vector<fault_kind> kinds_;
};

/// Injects faults. Use it on the thread that started the processes.
class fault_hand {
 public:
  /// `net` is null if nothing can be cut.
  fault_hand(cluster_processes& cluster, const network* net, actors::cluster_client& client)
      : cluster_{cluster}, net_{net}, client_{client} {}
  void begin(const planned_fault& fault);
  /// Ends a fault once its time is over.
  void end(const planned_fault& fault);
  /// Expectations that were not met.
  [[nodiscard]] const std::vector<std::string>& violations() const { return violations_; }

 private:
  void drain(const std::string& name);

  cluster_processes& cluster_;
  const network* net_;
  actors::cluster_client& client_;
  std::vector<std::string> violations_;
};

}  // namespace troupe::testing
