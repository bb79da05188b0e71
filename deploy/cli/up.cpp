#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <poll.h>

#include "troupe/config/resolve.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/announcement.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

/// In one write: the nodes write their log lines to the same place meanwhile.
void complain(const std::string& sentence) {
  std::cerr << "troupe up: " + sentence + "\n";
}

using clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

/// A node ends by itself within ten seconds; whoever is there after this is killed.
constexpr auto stop_patience = 12s;
/// Signals that come so soon after the first are the same one.
constexpr auto second_thought = 1s;
constexpr auto start_patience = 30s;
/// Between the end of a node's pipe and the end of its process.
constexpr auto exit_patience = 3s;
/// When it is said that nodes wait for a supervisor: once all of them have listened for so long, or
/// that one does not come to it; and again.
constexpr auto first_reminder = 1s;
constexpr auto slow_start = 10s;
constexpr auto next_reminder = 30s;

struct up_arguments {
  std::string file;
  std::vector<std::string> only;
  std::string log_level{"info"};
  std::string log_dir;
};

/// The processes that `troupe up` started, from the first to the last moment.
class node_group {
 public:
  /// `supervisor` is the address that the nodes ask, when none of the nodes is the supervisor.
  node_group(const up_arguments& given, std::string supervisor)
      : given_{given}, supervisor_{std::move(supervisor)} {}

  /// Starts the nodes in their order and watches them until a signal comes, which is success, or
  /// one of them ends. All of them have ended when it returns.
  exit_code run(const std::vector<config::resolved_node>& nodes) {
    expected_ = nodes.size();
    const bool good = start_all(nodes) && (signalled_ || watch());
    const bool clean = stop_all();
    return good && clean ? exit_code::ok : exit_code::failed;
  }

 private:
  struct child {
    config::resolved_node node;
    child_process process;
    announcements heard;
    bool listens{false};
    clock::time_point listens_since{};
    bool registered{false};
    bool drained{false};    ///< it leaves since an operator wants it to
    bool left{false};       ///< and has
    bool reported{false};   ///< its end was said already
    std::string failure{};  ///< what it said of itself

    [[nodiscard]] std::string who() const {
      return node.name + " (pid " + std::to_string(process.pid()) + ")";
    }
  };

  // -- starting

  bool start_all(const std::vector<config::resolved_node>& nodes) {
    for (const auto& node : nodes) {
      if (auto started = start(node); !started) {
        complain(node.name + ": " + to_string(started.error()));
        return false;
      }
      // The others need its port, and a port that is taken should be the first thing that is said.
      if (node.role == config::role::supervisor && !wait_for_supervisor()) return false;
      if (signalled_) return true;
    }
    return true;
  }

  result<void> start(const config::resolved_node& node) {
    auto heard = announcements::open();
    if (!heard) return fail(heard.error());
    std::vector<std::string> arguments{
        "node",        given_.file,      "--name",        node.name,
        "--log-level", given_.log_level, "--announce-fd", std::to_string(heard->far_end())};
    if (!given_.log_dir.empty()) {
      arguments.insert(arguments.end(), {"--log-file", given_.log_dir + "/" + node.name + ".log"});
    }
    if (node.role != config::role::supervisor && supervisor_port_ != 0) {
      arguments.insert(arguments.end(), {"--supervisor-port", std::to_string(supervisor_port_)});
    }
    auto process = child_process::start(own_program, std::move(arguments));
    if (!process) return fail(process.error());
    heard->close_far_end();
    children_.push_back(child{node, std::move(*process), std::move(*heard)});
    return {};
  }

  bool wait_for_supervisor() {
    const auto until = clock::now() + start_patience;
    while (!signalled_ && !children_.front().listens) {
      if (clock::now() >= until) {
        complain("the supervisor did not listen within " +
                 std::to_string(std::chrono::seconds{start_patience}.count()) + " s");
        return false;
      }
      if (!step(100ms)) return false;
    }
    return true;
  }

  // -- while they run

  bool watch() {
    const auto since = clock::now();
    while (!signalled_) {
      if (!step(said_up_ ? -1ms : 100ms)) return false;
      if (std::ranges::all_of(children_, &child::left)) return true;
      if (said_up_ || clock::now() < remind_at_) continue;
      if (all_listen_for(first_reminder) || clock::now() >= since + slow_start) say_who_waits();
    }
    return true;
  }

  [[nodiscard]] bool all_listen_for(clock::duration time) const {
    return std::ranges::all_of(children_, [until = clock::now() - time](const child& c) {
      return c.listens && c.listens_since <= until;
    });
  }

  /// Their logs say why, but may be elsewhere or off.
  void say_who_waits() {
    std::string names;
    std::size_t waiting = 0;
    for (const auto& c : children_)
      if (c.listens && !c.registered) {
        names += (names.empty() ? "" : ", ") + c.node.name;
        ++waiting;
      }
    if (waiting == 0) return;
    remind_at_ = clock::now() + next_reminder;
    complain(names + (waiting == 1 ? " waits" : " wait") + " for the supervisor at " + supervisor_ +
             (waiting == 1 ? " and keeps asking" : " and keep asking") + "; Ctrl-C stops " +
             (waiting == 1 ? "it" : "them"));
  }

  /// Waits for a signal or for news of a node. False: a node ended.
  bool step(std::chrono::milliseconds timeout) {
    std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
    for (const auto& c : children_) fds.push_back({c.left ? -1 : c.heard.fd(), POLLIN, 0});
    if (::poll(fds.data(), fds.size(), static_cast<int>(timeout.count())) <= 0) return true;
    if (fds.front().revents != 0 && signals_.wait(0ms)) {
      signalled_ = true;
      return true;
    }
    bool all_run = true;
    for (auto& c : children_) all_run &= c.left || hear(c);
    if (all_run) say_when_up();
    return all_run;
  }

  bool hear(child& c) {
    while (const auto what = c.heard.take()) {
      switch (what->what) {
        case announcement::kind::listening: on_listening(c, *what); break;
        case announcement::kind::registered: c.registered = true; break;
        case announcement::kind::failed: c.failure = what->text; break;
        case announcement::kind::drained: c.drained = true; break;
      }
    }
    if (!c.heard.over()) return true;
    (void)c.process.wait(exit_patience);
    const auto how = c.process.ended().value_or("a closed pipe, and does not end");
    if (c.drained && how == "exit code 0") {
      c.left = c.reported = true;
      std::cout << c.who() << " was drained and has left" << std::endl;
      return true;
    }
    complain(c.who() + " ended with " + how +
             (c.failure.empty() ? std::string{} : ": " + c.failure) + "; stopping the other nodes");
    c.reported = true;
    return false;
  }

  void on_listening(child& c, const announcement& what) {
    c.listens = true;
    c.listens_since = clock::now();
    if (c.node.role == config::role::supervisor) {
      supervisor_port_ = what.port;
      supervisor_ = what.text + ":" + std::to_string(what.port);
      c.registered = true;
    }
    std::cout << c.who() << " listens at " << what.text << ":" << what.port << std::endl;
  }

  void say_when_up() {
    if (said_up_ || children_.size() < expected_) return;
    if (!std::ranges::all_of(children_, &child::registered)) return;
    said_up_ = true;
    std::cout << children_.size() << (children_.size() == 1 ? " node is" : " nodes are")
              << " up; Ctrl-C stops " << (children_.size() == 1 ? "it" : "them") << std::endl;
  }

  // -- stopping

  /// Last stage first, the supervisor at the end, so that each can say goodbye to who is left.
  /// False: a node did not end in good order.
  bool stop_all() {
    bool clean = true;
    stopping_since_ = clock::now();
    auto end = children_.size();
    while (end > 0) {
      auto begin = end - 1;
      while (begin > 0 &&
             children_[begin - 1].node.stage_index == children_[end - 1].node.stage_index)
        --begin;
      clean &= stop_stage(begin, end);
      end = begin;
    }
    if (!children_.empty())
      std::cout << (clean ? "all nodes stopped" : "all nodes are gone, not all in good order")
                << std::endl;
    return clean;
  }

  bool stop_stage(std::size_t begin, std::size_t end) {
    for (auto i = begin; i < end; ++i) children_[i].process.terminate();
    const auto until = clock::now() + stop_patience;
    bool clean = true;
    for (auto i = begin; i < end; ++i) {
      auto& c = children_[i];
      // A second signal means: now. Not one right behind the first, though: timeout(1) and others
      // signal the process and then its group.
      while (!c.process.wait(20ms) && clock::now() < until && !hurried_)
        hurried_ = signals_.wait(0ms) && clock::now() - stopping_since_ > second_thought;
      clean &= ended_well(c);
    }
    return clean;
  }

  /// Says how a node ended that should have ended well; kills it if it has not ended at all.
  static bool ended_well(child& c) {
    const auto how = c.process.ended();
    if (!how) {
      c.process.stop(0ms);
      complain(c.who() + " did not stop and was killed");
      return false;
    }
    // Signal 15: it was told to stop before it had come so far as to expect it.
    if (c.reported || *how == "exit code 0" || *how == "signal 15") return true;
    complain(c.who() + " ended with " + *how + " when told to stop");
    return false;
  }

  const up_arguments& given_;
  std::string supervisor_;            ///< its address
  std::uint16_t supervisor_port_{0};  ///< of our own one; 0: the deployment's
  stop_signals signals_;
  std::vector<child> children_;
  bool signalled_{false};
  bool hurried_{false};
  clock::time_point stopping_since_;
  bool said_up_{false};
  clock::time_point remind_at_{};
  std::size_t expected_{0};  ///< children, when all are started
};

// -- which nodes

/// What is to be started here, in order; or the sentence that says what is wrong with the choice.
result<std::vector<config::resolved_node>> choose(const config::deployment& deployment,
                                                  const std::vector<std::string>& only) {
  std::vector<config::resolved_node> chosen;
  std::string known;
  std::vector<bool> used(only.size());
  for (const auto& node : config::resolve(deployment)) {
    known += (known.empty() ? "" : ", ") + node.name;
    bool named = false;
    for (std::size_t i = 0; i < only.size(); ++i)
      if (only[i] == node.name || only[i] == node.stage) used[i] = named = true;
    if (!only.empty() && !named) continue;
    const bool external = node.engine == config::engine_kind::external;
    if (node.local && !external) {
      chosen.push_back(node);
    } else if (external) {
      std::cout << node.name << " has `engine: external`: start it yourself" << std::endl;
    } else {
      std::cout << node.name << " belongs to host " << node.host << ": start it there" << std::endl;
    }
  }
  for (std::size_t i = 0; i < only.size(); ++i)
    if (!used[i])
      return fail(errc::not_found,
                  "--only " + only[i] + " is no node and no stage; there are " + known);
  if (chosen.empty())
    return fail(errc::not_found,
                "no node of this deployment is to be started here; the addresses of this machine "
                "do not match any of its hosts, or every engine is external");
  return chosen;
}

/// Makes the folder for the logs. Before anything is started.
result<void> make_log_dir(const std::string& path) {
  if (path.empty()) return {};
  std::error_code why;
  std::filesystem::create_directories(path, why);
  if (!why && std::filesystem::is_directory(path, why)) return {};
  return fail(errc::invalid_config, "--log-dir " + path + " is no folder and cannot be made" +
                                        (why ? ": " + why.message() : std::string{}) +
                                        "; name another one");
}

exit_code run_up(const up_arguments& given) {
  const auto deployment = load_or_complain(given.file);
  if (!deployment) return exit_code::usage;
  const auto nodes = choose(*deployment, given.only);
  if (!nodes) {
    complain(to_string(nodes.error()));
    return exit_code::usage;
  }
  const bool own_supervisor = nodes->front().role == config::role::supervisor;
  if (!own_supervisor && deployment->supervisor.port == 0) {
    complain("supervisor.port is 0 in " + given.file +
             ", so the nodes cannot find a supervisor that another `up` started; give it a port "
             "there");
    return exit_code::usage;
  }
  if (auto made = make_log_dir(given.log_dir); !made) {
    complain(to_string(made.error()));
    return exit_code::usage;
  }
  const auto& at = deployment->supervisor;
  return node_group{given, at.host + ":" + std::to_string(at.port)}.run(*nodes);
}

}  // namespace

void add_up(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "up",
      "Start every node of a deployment that belongs to this host, each in a process of its own,\n"
      "and stop them all in good order on Ctrl-C. No node is started again: when one ends, that "
      "is\n"
      "said, the others are stopped, and the command fails; only one that `troupe drain` let go "
      "is\n"
      "no failure, and the others go on. Without a supervisor (it runs "
      "elsewhere\n"
      "and --only left it out) the nodes wait for it, which is said, until it is there or Ctrl-C.");
  const auto given = std::make_shared<up_arguments>();
  verb->add_option("FILE", given->file, "The deployment file (YAML)")->required();
  // One value each: a list would swallow a FILE that comes after it.
  verb->add_option("--only", given->only, "Only this node or stage; may be given several times")
      ->allow_extra_args(false);
  verb->add_option("--log-level", given->log_level, "What the nodes log")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
  verb->add_option(
      "--log-dir", given->log_dir,
      "A folder for one NAME.log per node, made where it is missing (standard error of\n"
      "this command)");
  verb->callback([given, &code] { code = run_up(*given); });
}

}  // namespace troupe::deploy::cli
