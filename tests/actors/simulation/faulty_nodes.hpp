#pragma once

/// Two nodes whose processes, hosts, wires and backends fail by chance under virtual time, and what
/// a simulation of them needs in any case. What the nodes do is up to the simulation.

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "link_end.hpp"

namespace troupe::actors::link_simulation {

using simulation::decode;
using simulation::other;
using simulation::prefill;
using simulation::side;

struct fault_options {
  std::uint64_t seed{1};
  std::chrono::seconds faults_for{40};  ///< no fault begins after this virtual time
  double faults_per_second{1.5};
  bool traced{false};  ///< print every step
};

struct fault_report {
  std::string violation;    ///< the first invariant that did not hold; empty if all held
  std::uint64_t digest{0};  ///< of all events, in order
  std::uint64_t events{0};
  std::map<std::string, std::uint64_t> faults;
};

class faulty_nodes : public end_world {
 public:
  ~faulty_nodes() override;
  faulty_nodes(const faulty_nodes&) = delete;
  faulty_nodes& operator=(const faulty_nodes&) = delete;

  // -- end_world

  wire_world& wires() override { return wires_; }
  void mail(const node_ptr& from, const node_ptr& to, std::function<void()> what) override;

 protected:
  explicit faulty_nodes(const fault_options& of);

  // -- what a simulation adds

  [[nodiscard]] virtual node_ptr new_node() { return std::make_shared<node>(); }
  virtual void furnish(side /*which*/, node_settings& /*settings*/) {}
  /// A new life of the node has its context.
  virtual void started(side which) = 0;
  virtual void died(side /*which*/, const node_ptr& /*who*/) {}
  /// The node stops in good order. Its process ends a while later.
  virtual void stops(side which);
  /// Bytes of the transfer have moved from the one process to the other.
  virtual void landed(const process& from, const process& to, transfer_id transfer) = 0;
  /// These bytes of the process were read or written for a transfer.
  virtual void touched(const process& /*of*/, transfer_id /*transfer*/, const touch& /*what*/) {}
  /// A batch came after a fence.
  virtual void refused() = 0;

  // -- processes

  void start(side which);
  void in(const std::shared_ptr<process>& where, const std::function<void()>& what);
  [[nodiscard]] const node_ptr& at(side which) const noexcept { return lives_[which]; }
  [[nodiscard]] bool leaves(side which) const noexcept { return leaving_[which]; }
  [[nodiscard]] static side side_of(const node& at) {
    return at.name == "decode" ? decode : prefill;
  }
  /// Whether it is the latest life of its node.
  [[nodiscard]] bool is_latest(const node_ptr& which) const {
    return lives_[side_of(*which)] == which;
  }
  void leave(side which);
  void end_links(side which);

  // -- faults, links

  void next_fault();
  [[nodiscard]] std::vector<std::shared_ptr<wire>> wires_up() const;
  /// `asked`: the runner's question that a dialled link answers.
  end_ptr make_end(const node_ptr& at, const node_ptr& peer, transport::link_role role,
                   std::uint64_t asked);
  void dial(const node_ptr& at, const node_ptr& peer, std::uint64_t asked);
  [[nodiscard]] std::uint64_t links() const noexcept { return links_; }

  // -- the run

  /// Runs until then, or until an invariant does not hold. `salt` tells apart runs whose events
  /// have the same times.
  void run_until(moment end, const std::function<std::uint64_t()>& salt);
  void violate(const std::string& what);
  void require(bool holds, const std::string& what) {
    if (!holds) violate(what);
  }
  void note(const std::string& what);
  [[nodiscard]] const fault_report& outcome() const noexcept { return told_; }
  [[nodiscard]] const fault_options& given() const noexcept { return given_; }
  [[nodiscard]] moment end_of_faults() const noexcept { return end_of_faults_; }

  timeline time_;
  dice chance_;

 private:
  void freeze(side which, microseconds time);
  void wake(const node_ptr& who);
  void die(side which);
  void fault();

  const fault_options given_;
  fault_report told_;
  moment apart_until_{}, end_of_faults_{};

 protected:
  wire_world wires_;

 private:
  wire::registry all_wires_;
  std::array<node_ptr, 2> lives_;
  std::array<bool, 2> leaving_{};
  std::array<moment, 2> last_mail_{};
  std::uint64_t links_{0};
  std::vector<node_ptr> nodes_;  ///< every life
};

}  // namespace troupe::actors::link_simulation
