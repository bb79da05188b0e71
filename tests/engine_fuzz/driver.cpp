#include "driver.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <list>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "broken_wire.hpp"
#include "processes.hpp"
#include "waiting.hpp"

namespace troupe::engine_fuzz {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

namespace {

class driver {
 public:
  explicit driver(const scenario& s) : s_{s} {}

  run_report run() {
    // Fork children first: a process with threads must not fork.
    for (std::uint32_t node = 0; node < s_.nodes(); ++node) {
      nodes_.push_back(s_.where == processes::several ? make_remote_node(s_, node)
                                                      : make_local_node(s_, node));
    }
    supervisor_ = start_supervisor(s_);
    const bool supervised = supervisor_->port() != 0;
    const bool up = supervised && std::ranges::all_of(nodes_, [&](auto& node) {
                      return node->start(supervisor_->port());
                    });
    if (!up) found(supervised ? "the cluster does not start" : "the supervisor does not start");
    for (std::uint32_t i = 0; up && i < s_.rounds.size() && !hangs_; ++i) play(i);
    for (auto& node : nodes_) {
      // A node that hangs is not waited for a second time.
      if (!hangs_) node->stop();
      report_.counts += node->counts();
      for (const auto& one : node->findings()) found(one);
    }
    return std::move(report_);
  }
  [[nodiscard]] bool hangs() const { return hangs_; }

 private:
  void found(std::string what) { report_.findings.push_back(std::move(what)); }

  void play(std::uint32_t index) {
    round_ = &s_.rounds[index];
    given_up_.clear();
    missed_.clear();
    for (auto& node : nodes_) node->begin_round(index);
    came_ = steady_clock::now();
    if (!act_all() || !drain()) return;
    // Late bytes have come by then, or come while the next round checks.
    for (std::uint32_t node = 0; node < nodes_.size(); ++node)
      if (!gone_.contains(node)) nodes_[node]->audit();
  }

  // -- the story

  bool act_all() {
    std::list<std::uint32_t> left;
    for (std::uint32_t i = 0; i < round_->acts.size(); ++i) left.push_back(i);
    while (!left.empty()) {
      pump();
      std::set<std::pair<std::uint32_t, std::uint32_t>> waits;
      bool did = false;
      for (auto it = left.begin(); it != left.end();) {
        const auto& one = round_->acts[*it];
        const auto story = std::pair{one.node, one.request};
        if (waits.contains(story) || !is_due(one)) {
          waits.insert(story);
          ++it;
          continue;
        }
        carry_out(*it);
        it = left.erase(it);
        did = true;
        if (++acts_ % 8 == 0) pump();
      }
      give_up_what_nobody_asks_for();
      if (!did && stalled("what the next steps wait for")) {
        for (const auto i : left) {
          if (!is_due(round_->acts[i]))
            report_.findings.back() += "\n" + describe(s_, round_->acts[i]);
        }
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] bool is_due(const act& one) const {
    if (one.what == act_kind::wait_for_outcome)
      return is_away(one.a) || missed_.contains({one.a, one.request}) ||
             has_ended(one.a, one.request, part::receive);
    if (one.what == act_kind::wait_for_sends) {
      for (const auto p : s_.sources_of(round_->requests[one.request]))
        if (!is_away(p) && !has_ended(p, one.request, part::send)) return false;
    }
    // All others end first, without the stopped process.
    if (one.what == act_kind::wake) return all([](fuzz_node& n) { return n.settled(); });
    return true;
  }

  [[nodiscard]] static bool goes_on_with_a_receive(act_kind what) {
    return what == act_kind::receive_again || what == act_kind::receive_late ||
           what == act_kind::abort_receive;
  }

  [[nodiscard]] bool is_away(std::uint32_t node) const {
    return gone_.contains(node) || standing_.contains(node);
  }
  [[nodiscard]] bool has_ended(std::uint32_t node, std::uint32_t request, part what) const {
    return nodes_[node]->ended().contains({request, what});
  }

  /// Whether no second receive is live or still to come at that node.
  [[nodiscard]] bool has_no_second(std::uint32_t node, std::uint32_t request) const {
    const auto& ended = nodes_[node]->ended();
    const auto first = ended.find({request, part::receive});
    return first != ended.end() &&
           (first->second == "done" || ended.contains({request, part::receive_again}));
  }

  void carry_out(std::uint32_t index) {
    const auto& one = round_->acts[index];
    if (traces_) std::cerr << describe(s_, one) << std::endl;
    switch (one.what) {
      case act_kind::pause: std::this_thread::sleep_for(std::chrono::microseconds{one.a}); return;
      case act_kind::break_links: break_links(); return;
      case act_kind::wake:
        nodes_[one.node]->wake();
        standing_.erase(one.node);
        given_up_.clear();  // the woken node has not heard of it
        for (std::uint32_t node = 0; node < nodes_.size(); ++node)
          if (!is_away(node)) nodes_[node]->hear_of_wake();
        return;
      case act_kind::die:
        nodes_[one.node]->die();
        gone_.insert(one.node);
        return;
      case act_kind::stand:
        nodes_[one.node]->stand();
        standing_.insert(one.node);
        return;
      default: break;
    }
    if (is_away(one.node)) {
      if (one.what == act_kind::receive) missed_.emplace(one.node, one.request);
    } else if (!goes_on_with_a_receive(one.what) || !missed_.contains({one.node, one.request})) {
      nodes_[one.node]->carry_out(index);
    }
  }

  void break_links() {
    std::set<int> spared{supervisor_->port()};
    for (auto& node : nodes_) spared.insert(node->port());
    (void)testing::cut_connections(spared);
  }

  // -- the end of a round

  bool drain() {
    for (;;) {
      pump();
      give_up_what_nobody_asks_for();
      if (all([](fuzz_node& n) { return n.idle(); })) return true;
      if (stalled("the outcome or the unpinning of")) return false;
      std::this_thread::sleep_for(200us);
    }
  }

  template <class Predicate>
  [[nodiscard]] bool all(Predicate holds) const {
    for (std::uint32_t node = 0; node < nodes_.size(); ++node)
      if (!is_away(node) && !holds(*nodes_[node])) return false;
    return true;
  }

  /// Gives up sends that may fail and whose receives have all ended a while ago: nobody will ask
  /// for them.
  void give_up_what_nobody_asks_for() {
    for (std::uint32_t r = 0; r < round_->requests.size(); ++r) {
      const bool over = std::ranges::all_of(round_->acts, [&](const act& one) {
        if (one.request != r || is_away(one.node)) return true;
        if (one.what == act_kind::receive_again) return has_no_second(one.node, r);
        return one.what != act_kind::receive || has_ended(one.node, r, part::receive);
      });
      if (!over || is_given_back(r)) continue;
      const auto [since, is_new] = given_up_.try_emplace(r, steady_clock::now());
      if (is_new || !since->second || steady_clock::now() - *since->second < 300ms) continue;
      since->second.reset();
      for (const auto p : s_.sources_of(round_->requests[r])) {
        if (!is_away(p) && verdict_on(s_, *round_, r, p, part::send).admits(errc::aborted))
          nodes_[p]->give_up(r);
      }
    }
  }

  /// Whether the sends of the request must end by a release that is live or has succeeded.
  [[nodiscard]] bool is_given_back(std::uint32_t request) const {
    const auto& r = round_->requests[request];
    if (r.what != mishap::released) return false;
    const auto node = s_.takers_of(r).front();
    const auto& ended = nodes_[node]->ended();
    const auto how = ended.find({request, part::release});
    return !is_away(node) && (how == ended.end() || how->second == "done");
  }

  void pump() {
    std::uint64_t progress = 0;
    for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
      if (is_away(node)) continue;
      nodes_[node]->pump();
      progress += nodes_[node]->progress();
    }
    if (progress != progress_) came_ = steady_clock::now();
    progress_ = progress;
  }

  bool stalled(const char* what) {
    if (steady_clock::now() - came_ < testing::wait_limit) {
      std::this_thread::sleep_for(100us);
      return false;
    }
    std::string open;
    for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
      if (is_away(node)) continue;
      if (const auto its = nodes_[node]->open_operations(); !nodes_[node]->idle())
        open += "\n    " + s_.name_of(node) + ":" + its;
    }
    found(std::string{"does not end: "} + what + open);
    hangs_ = true;
    return true;
  }

  const scenario& s_;
  run_report report_;
  std::vector<std::unique_ptr<fuzz_node>> nodes_;
  std::unique_ptr<fuzz_supervisor> supervisor_;
  const round* round_{nullptr};
  std::set<std::uint32_t> gone_, standing_;
  /// Node and request of receives that should have begun while their process was stopped, and so do
  /// not exist.
  std::set<std::pair<std::uint32_t, std::uint32_t>> missed_;
  /// Requests all of whose receives have ended, with the time since; empty once they were given up.
  std::map<std::uint32_t, std::optional<steady_clock::time_point>> given_up_;
  steady_clock::time_point came_;
  std::uint64_t progress_{0};
  std::uint64_t acts_{0};
  bool hangs_{false};
  const bool traces_{std::getenv("ENGINE_FUZZ_TRACE") != nullptr};
};

}  // namespace

run_report run(const scenario& s) {
  auto one = std::make_unique<driver>(s);
  auto report = one->run();
  // A node that hangs is not waited for: the process ends with it.
  if (one->hangs()) (void)one.release();
  return report;
}

}  // namespace troupe::engine_fuzz
