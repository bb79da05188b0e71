#pragma once

/// One node of a scenario: an engine with a cache whose every byte is known. In this process (`local_node`) or in
/// one of its own, which follows orders line by line (processes.hpp).

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/config/deployment.hpp"

#include "scenario.hpp"
#include "tally.hpp"
#include "verdict.hpp"

namespace troupe::engine_fuzz {

/// The words of an outcome: "done" or the name of an error code.
using outcomes = std::map<std::pair<std::uint32_t, part>, std::string>;

class fuzz_node {
 public:
  fuzz_node() = default;
  virtual ~fuzz_node() = default;
  fuzz_node(const fuzz_node&) = delete;
  fuzz_node& operator=(const fuzz_node&) = delete;

  /// Returns whether the node is registered.
  [[nodiscard]] virtual bool start(int supervisor_port) = 0;
  virtual void begin_round(std::uint32_t index) = 0;
  virtual void carry_out(std::uint32_t act_index) = 0;
  /// Gives up a send that nobody asks for any more.
  virtual void give_up(std::uint32_t request) = 0;
  /// Tells the node that the stopped process goes on.
  virtual void hear_of_wake() = 0;
  /// Takes the events that have come.
  virtual void pump() = 0;
  /// Whether no operation is open.
  [[nodiscard]] virtual bool idle() = 0;
  /// Whether every operation has its outcome; some may not be unpinned.
  [[nodiscard]] virtual bool settled() = 0;
  /// The number of events so far.
  [[nodiscard]] virtual std::uint64_t progress() = 0;
  /// Compares every byte, with no operation open.
  virtual void audit() = 0;
  [[nodiscard]] virtual int port() = 0;
  /// The open operations, for a person to read.
  [[nodiscard]] virtual std::string open_operations() = 0;
  /// Stops the node in good order.
  virtual void stop() = 0;

  // Only for a node in a process of its own.
  virtual void die() {}
  virtual void stand() {}
  virtual void wake() {}

  [[nodiscard]] const outcomes& ended() const { return ended_; }
  [[nodiscard]] const std::vector<std::string>& findings() const { return findings_; }
  [[nodiscard]] const tally& counts() const { return counts_; }

 protected:
  outcomes ended_;
  std::vector<std::string> findings_;
  tally counts_;
};

/// The most ranks that a replica of an open stage has.
inline constexpr std::uint32_t most_nodes_of_open_stage = 64;

/// The deployment that a scenario describes.
[[nodiscard]] std::string deployment_text(const scenario& s, int supervisor_port);
[[nodiscard]] result<config::deployment> deployment_of(const scenario& s, int supervisor_port);

[[nodiscard]] std::unique_ptr<fuzz_node> make_local_node(const scenario& s, std::uint32_t node);

}  // namespace troupe::engine_fuzz
