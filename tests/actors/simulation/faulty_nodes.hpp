#pragma once

/// Nodes whose processes, hosts, wires and backends fail by chance under virtual time, and what a
/// simulation of them needs in any case. What the nodes do is up to the simulation.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "link_end.hpp"
#include "shrink.hpp"

namespace troupe::actors::link_simulation {

using simulation::decode;
using simulation::prefill;
using simulation::side;

/// A node through all its lives. Each is on a host of its own.
struct seat {
  std::string name;
  side role{decode};
};

/// One fault of a run: its time, and the dice that say what it is.
struct drawn_fault {
  moment when;
  dice chance;
  std::uint32_t draws{0};  ///< how many numbers it drew
  bool happens{true};      ///< if false, it is left out
};

struct fault_options {
  std::uint64_t seed{1};
  std::chrono::seconds faults_for{40};  ///< no fault begins after this virtual time
  double faults_per_second{1.5};
  bool traced{false};  ///< print every step

  // -- for a reduced run (shrink.hpp)

  /// Faults of a former run, used instead of drawing new ones.
  std::optional<std::vector<drawn_fault>> drawn_faults;
  std::set<std::uint64_t> unasked;  ///< transfers or requests that are never made, by number
};

struct fault_report {
  std::string violation;    ///< the first invariant that did not hold; empty if all held
  std::uint64_t digest{0};  ///< of all events, in order
  std::uint64_t events{0};
  std::map<std::string, std::uint64_t> faults;
  std::vector<drawn_fault> drawn_faults;
  std::uint64_t asked{0};  ///< transfers or requests, without those that come after the last fault
};

/// The invariant that the violation is about, without the names and numbers of this run.
[[nodiscard]] std::string kind_of(const std::string& violation);

/// A simulation of such nodes, which make `asked` of each other.
template <class Options, class Report>
[[nodiscard]] troupe::testing::shrinkable<Options, Report> of_nodes(Report (*run)(const Options&),
                                                                    const std::string& asked) {
  return {run, kind_of, [asked](Options& of, const Report& first) {
            of.drawn_faults = first.drawn_faults;
            return std::vector<troupe::testing::dispensable<Options>>{
                {"faults", of.drawn_faults->size(),
                 [](Options& from, std::size_t i) {
                   return std::exchange((*from.drawn_faults)[i].happens, false);
                 }},
                {"seconds with faults", static_cast<std::size_t>(of.faults_for.count()),
                 [](Options& from, std::size_t i) {
                   const std::chrono::seconds all{i};
                   return std::exchange(from.faults_for, std::min(from.faults_for, all)) > all;
                 }},
                {asked, first.asked,
                 [](Options& from, std::size_t i) { return from.unasked.insert(i).second; }}};
          }};
}

class faulty_nodes : public end_world {
 public:
  ~faulty_nodes() override;
  faulty_nodes(const faulty_nodes&) = delete;
  faulty_nodes& operator=(const faulty_nodes&) = delete;

  // -- end_world

  wire_world& wires() override { return wires_; }
  void mail(const node_ptr& from, const node_ptr& to, std::function<void()> what) override;

 protected:
  /// The nodes are known by their number in `seats`. Two of them are numbered as `side` is.
  explicit faulty_nodes(const fault_options& of,
                        std::vector<seat> seats = {{"decode", decode}, {"prefill", prefill}});

  // -- what a simulation adds

  [[nodiscard]] virtual node_ptr new_node() { return std::make_shared<node>(); }
  virtual void furnish(std::size_t /*which*/, node_settings& /*settings*/) {}
  /// A new life of the node has its context.
  virtual void started(std::size_t which) = 0;
  virtual void died(std::size_t /*which*/, const node_ptr& /*who*/) {}
  /// The node stops in good order. Its process ends a while later.
  virtual void stops(std::size_t which);
  /// Bytes of the transfer have moved from the one process to the other.
  virtual void landed(const process& from, const process& to, transfer_id transfer) = 0;
  /// These bytes of the process were read or written for a transfer.
  virtual void touched(const process& /*of*/, transfer_id /*transfer*/, const touch& /*what*/) {}
  /// A batch came after a fence.
  virtual void refused() = 0;

  // -- processes

  void start(std::size_t which);
  void in(const std::shared_ptr<process>& where, const std::function<void()>& what);
  [[nodiscard]] const node_ptr& at(std::size_t which) const noexcept { return lives_[which]; }
  [[nodiscard]] bool leaves(std::size_t which) const { return leaving_.contains(which); }
  [[nodiscard]] const std::vector<seat>& seats() const noexcept { return seats_; }
  [[nodiscard]] std::size_t number_of(const std::string& name) const;
  [[nodiscard]] std::size_t number_of(const process& of) const { return number_of(of.name); }
  /// Whether it is the latest life of its node.
  [[nodiscard]] bool is_latest(const node_ptr& which) const {
    return lives_[number_of(*which)] == which;
  }
  void leave(std::size_t which);
  void freeze(std::size_t which, microseconds time);
  void end_links(std::size_t which);

  // -- faults, links

  void next_fault();
  /// Whether the next transfer or request is made.
  [[nodiscard]] bool asks() { return !given_.unasked.contains(told_.asked++); }
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
  void wake(const node_ptr& who);
  void die(std::size_t which);
  void fault();
  void repeat(const drawn_fault& what);
  void cut_off(std::size_t which);
  /// The same for both directions.
  [[nodiscard]] moment& apart_until(std::size_t one, std::size_t another) {
    return apart_until_[std::minmax(one, another)];
  }

  const fault_options given_;
  const std::vector<seat> seats_;
  fault_report told_;
  moment end_of_faults_{};

 protected:
  wire_world wires_;

 private:
  wire::registry all_wires_;
  std::vector<node_ptr> lives_;
  std::set<std::size_t> leaving_;
  std::map<std::pair<std::size_t, std::size_t>, moment> apart_until_;  ///< by the two hosts
  std::map<std::pair<std::size_t, std::size_t>, moment> last_mail_;  ///< from the one to the other
  std::uint64_t links_{0};
  std::vector<node_ptr> nodes_;  ///< every life
};

}  // namespace troupe::actors::link_simulation
