#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/membership/drains.hpp"
#include "troupe/config/units.hpp"
#include "troupe/deploy/cli/cluster_address.hpp"
#include "troupe/deploy/cli/cluster_look.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

using std::chrono::milliseconds;
using clock = std::chrono::steady_clock;

constexpr milliseconds look_interval{200};
/// Time from the order to leave to the end of the process: a node checks twice a second and stops
/// within ten.
constexpr std::chrono::seconds leave_patience{15};
/// A supervisor that does not answer for this long is gone.
constexpr std::chrono::seconds silence_patience{5};

struct drain_arguments {
  std::string where;
  std::string name;
  std::string deadline_text{"30s"};
  milliseconds deadline{30'000};
  bool no_wait{false};
  bool cancel{false};
};

void complain_of_drain(const std::string& sentence) {
  std::cerr << "troupe drain: " + printable(sentence) + "\n";
}

/// Watches one drain from its order to the end of its nodes.
class drain_watch {
 public:
  drain_watch(actors::cluster_client& cluster, std::uint64_t supervisor, std::string name,
              milliseconds deadline)
      : cluster_{cluster}, supervisor_{supervisor}, name_{std::move(name)}, deadline_{deadline} {}

  exit_code wait() {
    const auto until = clock::now() + deadline_ + leave_patience;
    auto heard = clock::now();
    while (true) {
      const auto members = cluster_.members();
      if (members) {
        heard = clock::now();
        if (const auto end = look_at(*members)) return *end;
      } else if (clock::now() >= heard + silence_patience) {
        complain_of_drain("the supervisor is gone (" + to_string(members.error()) + "). " +
                          goes_on());
        return exit_code::failed;
      }
      if (clock::now() >= until) return say_who_stays();
      std::this_thread::sleep_for(look_interval);
    }
  }

 private:
  struct rank {
    std::string name;
    std::uint64_t incarnation{0};
    std::string said;
    bool gone{false};
  };

  /// Prints what is new. Empty until the drain is over.
  std::optional<exit_code> look_at(const actors::membership& members) {
    if (members.supervisor_incarnation != supervisor_) {
      complain_of_drain("the supervisor was restarted and has forgotten the drain. " + goes_on());
      return exit_code::failed;
    }
    if (ranks_.empty()) find_ranks(members);
    for (rank& one : ranks_)
      if (!one.gone) look_at(one, members);
    if (cancelled_) {
      complain_of_drain("the drain of " + printable(name_) + " was cancelled: it keeps serving");
      return exit_code::failed;
    }
    const bool over = std::ranges::all_of(ranks_, &rank::gone);
    if (!over) return std::nullopt;
    return in_order_ ? exit_code::ok : exit_code::incomplete;
  }

  /// Finds every rank of the replica, since all drain. A rank that is already down is not waited
  /// for.
  void find_ranks(const actors::membership& members) {
    const auto named = std::ranges::find(members.members, name_,
                                         [](const actors::member& m) { return m.node.name; });
    if (named == members.members.end()) return;
    for (const auto& m : members.members) {
      const bool same = m.node.stage == named->node.stage && m.node.replica == named->node.replica;
      const bool down = m.state == static_cast<std::uint8_t>(actors::node_state::down);
      if (same && (!down || m.node.name == name_))
        ranks_.push_back({m.node.name, m.node.incarnation, {}, false});
    }
  }

  void look_at(rank& one, const actors::membership& members) {
    const auto m = std::ranges::find(members.members, one.name,
                                     [](const actors::member& x) { return x.node.name; });
    const auto name = printable(one.name);
    if (m == members.members.end() || m->node.incarnation != one.incarnation) {
      one.gone = true;
      if (one.said == actors::drained_reason) {
        std::cout << name << " has left, and was started again" << std::endl;
      } else {
        in_order_ = false;
        complain_of_drain(name + " ended before it was drained, and was started again");
      }
    } else if (m->state == static_cast<std::uint8_t>(actors::node_state::down)) {
      one.gone = true;
      if (m->reason == actors::drained_reason) {
        std::cout << name << " was drained and has left" << std::endl;
      } else {
        in_order_ = false;
        complain_of_drain(name + " is gone, with work unfinished: " + printable(m->reason));
      }
    } else if (m->state != static_cast<std::uint8_t>(actors::node_state::leaving)) {
      cancelled_ = true;
    } else if (m->reason != one.said) {
      one.said = m->reason;
      std::cout << name << ": " << printable(one.said) << std::endl;
    }
  }

  exit_code say_who_stays() {
    std::string names;
    for (const rank& one : ranks_)
      if (!one.gone) names += (names.empty() ? "" : ", ") + printable(one.name);
    complain_of_drain(names +
                      ": told to leave but still running; a process that does not ask "
                      "`engine::draining` has to be stopped by hand");
    return exit_code::failed;
  }

  [[nodiscard]] std::string goes_on() const {
    return name_ +
           " goes on draining and leaves when it has nothing left to do; drain it again to give "
           "it a deadline, once the supervisor is back";
  }

  actors::cluster_client& cluster_;
  std::uint64_t supervisor_;  ///< its incarnation
  std::string name_;
  milliseconds deadline_;
  std::vector<rank> ranks_;
  bool in_order_{true};
  bool cancelled_{false};
};

/// Connects to the cluster and checks that it is the one that the file describes.
result<std::pair<std::unique_ptr<actors::cluster_client>, std::uint64_t>> reach(
    const cluster_address& at) {
  auto cluster = actors::cluster_client::connect(at.client({}));
  if (!cluster) return fail(at.explained(cluster.error()));
  const auto members = members_of(**cluster, at);
  if (!members) return fail(members.error());
  return std::pair{std::move(*cluster), members->supervisor_incarnation};
}

/// "a", or "a, b", followed by the matching verb.
std::string names_and(const std::string& names, const char* one, const char* several) {
  const auto shown = printable(names);
  return shown + " " + (shown.find(',') != std::string::npos ? several : one);
}

exit_code cancel(actors::cluster_client& cluster, const std::string& name) {
  const auto serving = cluster.drain({name, 0, 1});
  if (!serving) {
    complain_of_drain(to_string(serving.error()));
    return exit_code::failed;
  }
  std::cout << names_and(serving->sentence, "takes", "take") << " new requests again" << std::endl;
  return exit_code::ok;
}

exit_code run_drain(const drain_arguments& given) {
  const auto at = cluster_at("drain", given.where);
  if (!at) return exit_code::usage;
  log_errors_only("drain");
  const auto cluster = reach(*at);
  if (!cluster) {
    complain_of_drain(to_string(cluster.error()));
    return exit_code::failed;
  }
  if (given.cancel) return cancel(*cluster->first, given.name);
  const auto ms = static_cast<std::uint32_t>(given.deadline.count());
  const auto drained = cluster->first->drain({given.name, ms});
  if (!drained) {
    complain_of_drain(to_string(drained.error()));
    return exit_code::failed;
  }
  const bool several = drained->sentence.find(',') != std::string::npos;
  std::cout << names_and(drained->sentence, "takes", "take") << " no new requests and "
            << (several ? "leave when their" : "leaves when its") << " work has ended, after "
            << config::format_duration(given.deadline) << " at the latest" << std::endl;
  if (given.no_wait) return exit_code::ok;
  return drain_watch{*cluster->first, cluster->second, given.name, given.deadline}.wait();
}

}  // namespace

void add_drain(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "drain",
      "Take a node out of service: no new request is placed on it, its present work goes on, and\n"
      "when that work has ended, or at the deadline, the node leaves. A replica of several ranks\n"
      "drains as a whole, whichever rank is named. The command waits until the node has left and\n"
      "says what it waits for; Ctrl-C stops the waiting, not the drain. `troupe node` processes\n"
      "end by themselves; an engine of yours asks `engine::draining`. --cancel takes a drain back\n"
      "as long as the node was not told to leave; a node that has left has to be started again.");
  const auto given = std::make_shared<drain_arguments>();
  verb->add_option("TARGET", given->where, "The deployment file, or HOST:PORT of the supervisor")
      ->required();
  verb->add_option("NAME", given->name, "Which node, as `troupe status` lists them")->required();
  auto* deadline =
      verb->add_option(
              "--deadline", given->deadline_text,
              "Leave then, even with work unfinished: a duration like 30s or 5min, at most 24h")
          ->check([given](const std::string& text) {
            const auto time = config::parse_duration(text);
            if (!time || *time > actors::max_drain_deadline)
              return "takes a duration of at most 24h, like 30s or 5min, found `" + text + "`";
            given->deadline = *time;
            return std::string{};
          })
          ->capture_default_str();
  auto* no_wait = verb->add_flag("--no-wait", given->no_wait, "End as soon as the drain has begun");
  verb->add_flag("--cancel", given->cancel,
                 "Let the node and all ranks of its replica take new requests again")
      ->excludes(deadline)
      ->excludes(no_wait);
  verb->callback([given, &code] { code = run_drain(*given); });
}

}  // namespace troupe::deploy::cli
