#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "troupe/actors/discovery/supervisor_notice.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/leased_name.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/room_to_start.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/config/open_name.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/config/units.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/announcement.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"
#include "troupe/deploy/cli/detached.hpp"
#include "troupe/deploy/cli/idle_time.hpp"
#include "troupe/deploy/cli/process_name.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/orphan_wake.hpp"
#include "troupe/deploy/reference_engine/reference_engine.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::deploy::cli {

namespace {

using std::chrono::milliseconds;
using clock = std::chrono::steady_clock;

/// A clean end takes a second or two. After this time the node hangs, and the alarm ends it.
constexpr unsigned stop_patience_s = 10;
/// How often a running node checks whether its cluster still wants it.
constexpr milliseconds standing_interval{500};

struct node_arguments {
  std::string file;
  std::string name;
  std::string stage;  ///< instead of a name
  std::string wait_limit_text;
  milliseconds wait_limit{-1};  ///< for the supervisor; negative: none
  actors::log_options log;
  std::uint16_t supervisor_port{0};  ///< 0: the deployment's
  int announce_fd{-1};
  bool detach{false};
};

/// Ends a process that hangs. Calls only functions that are safe in a signal handler.
void give_up(int /*signal*/) {
  constexpr std::string_view line = "troupe node: the node did not stop in time and is ended now\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(to_int(exit_code::failed));
}

enum class why_ends : std::uint8_t { signalled, by_itself, not_found_any_more };

/// From now on the process cannot hang: the alarm ends it, and if a signal was already heard,
/// another one does so at once.
void expect_the_end(stop_signals& signals, why_ends why) {
  if (why == why_ends::signalled) signals.restore();
  std::signal(SIGALRM, give_up);
  ::alarm(stop_patience_s);
}

// -- the running node

/// The node to start, and how long it may wait until the cluster registers it.
struct node_start {
  config::resolved_node node;
  std::unique_ptr<actors::leased_name> claim;  ///< until it is registered; null: it was named
  /// For a supervisor with `supervisor.begin`: kept until its process ends. Null if it is not found
  /// in this way.
  std::unique_ptr<actors::supervisor_notice> notice;
  milliseconds wait_limit{-1};  ///< negative: none
  clock::time_point began{clock::now()};

  [[nodiscard]] bool is_late() const {
    return wait_limit.count() >= 0 && clock::now() - began >= wait_limit;
  }
  /// `waited` is the error of `wait_registered`.
  [[nodiscard]] error late(const error& waited) const {
    const auto reason = waited.message.find(": ");  // skips how long that wait was
    return {errc::deadline,
            node.name + " was not registered within the " + config::format_duration(wait_limit) +
                " of --wait-limit: " +
                (reason == std::string::npos ? waited.message : waited.message.substr(reason + 2))};
  }
};

/// Runs until a signal comes, the supervisor crashes (`internal`), is no longer needed, or can no
/// longer be found.
result<why_ends> supervise(const node_start& start, const std::atomic<bool>& crashed,
                           idle_time& idle, stop_signals& signals) {
  while (!signals.wait(standing_interval)) {
    if (crashed) {
      return fail(errc::internal,
                  "the supervisor crashed (see the log); nodes continue without it until it is "
                  "started again");
    }
    if (!start.notice) continue;
    if (start.notice->is_lost()) return why_ends::not_found_any_more;
    if (!idle.is_over(clock::now())) continue;
    if (start.notice->withdraw([&idle] { return idle.is_still(); })) return why_ends::by_itself;
  }
  return why_ends::signalled;
}

result<void> run_supervisor(const config::deployment& deployment, const node_start& start,
                            const announcer& tell, stop_signals& signals) {
  auto options = actors::host_options_of(deployment);
  if (!options) return fail(options.error());
  if (auto room = actors::check_room(actors::room_of_a_node); !room) return room;
  actors::actor_host host{std::move(*options)};
  auto supervises = actors::supervisor_options_from(deployment);
  auto store = actors::open_membership_store(deployment);
  if (!store) return fail(store.error());
  supervises.store = std::move(*store);
  idle_time idle{deployment.supervisor.idle, deployment.supervisor.heartbeat_timeout};
  supervises.nodes_there = idle.nodes();
  supervises.claims_asked = idle.claims();
  const auto incarnation = actors::draw_incarnation();
  supervises.members.supervisor_incarnation = incarnation;
  const auto supervisor = actors::spawn_supervisor(host.system(), std::move(supervises));
  const auto& at = deployment.supervisor;
  const auto port = host.publish(supervisor, at.host, at.port);
  if (!port) return fail(port.error());
  if (start.notice) {
    if (auto told = start.notice->publish(at.host, *port, incarnation); !told) return told;
    idle.begin(clock::now());
  }
  actors::logger("supervisor")
      ->info("supervisor of cluster '{}' listens at {}:{}", deployment.cluster, at.host, *port);
  tell.say({announcement::kind::listening, at.host, *port});
  const auto over = std::make_shared<std::atomic<bool>>(false);
  actors::on_crash(caf::actor_cast<caf::strong_actor_ptr>(supervisor), [over] { *over = true; });
  actors::on_network_crash(host.system(), [over] { *over = true; });
  const auto ended = supervise(start, *over, idle, signals);
  expect_the_end(signals, ended ? *ended : why_ends::by_itself);
  if (!ended) return fail(ended.error());
  if (*ended == why_ends::by_itself) {
    actors::logger("supervisor")
        ->info("no node was there for {} (supervisor.idle): the supervisor of cluster '{}' ends",
               config::format_duration(deployment.supervisor.idle), deployment.cluster);
  } else if (*ended == why_ends::not_found_any_more) {
    actors::logger("supervisor")
        ->warn(
            "the notice of this supervisor was removed or replaced, so that no process finds it "
            "any more: the supervisor of cluster '{}' ends, and its nodes go to the next one",
            deployment.cluster);
  }
  if (!host.shutdown()) return fail(errc::internal, "some actors did not end in time");
  return {};
}

/// Serves a started node until a signal comes, it is drained, or it can no longer serve: another
/// process has taken its place (`stale_incarnation`), or it has crashed inside (`internal`).
result<void> serve(engine& node, node_start& start, const announcer& tell, stop_signals& signals) {
  const auto self = node.report().node;
  tell.say({announcement::kind::listening, self.host, self.port});
  bool told = false;
  bool signalled = false;
  bool drained = false;
  result<void> ended;
  while (!signalled && !drained && ended) {
    // Until it is registered, alternates between waiting for registration and for the end; the node
    // logs why it is not registered.
    const auto standing = node.wait_registered(milliseconds{told ? 0 : 100});
    if (standing && !told) {
      tell.say({announcement::kind::registered, {}, 0});
      told = true;
      start.claim.reset();
    }
    if (!standing && standing.error().code != errc::deadline) {  // `deadline`: not yet
      ended = fail(standing.error());
    } else if (!told && start.is_late()) {
      ended = fail(start.late(standing.error()));
    } else if (node.draining() == drain_standing::drained) {
      drained = true;
      actors::logger("node")->info("{} was drained and leaves", self.name);
      tell.say({announcement::kind::drained, {}, 0});
    } else {
      signalled = signals.wait(told ? standing_interval : milliseconds{0});
    }
  }
  expect_the_end(signals, signalled ? why_ends::signalled : why_ends::by_itself);
  return ended;
}

result<void> run_reference(const config::deployment& deployment, node_start& start,
                           const announcer& tell, stop_signals& signals) {
  reference::reference_options options;
  options.claim = start.claim.get();
  auto engine = reference::reference_engine::start(deployment, start.node.name, options);
  if (!engine) return fail(engine.error());
  auto served = serve((*engine)->node(), start, tell, signals);
  (*engine)->stop();
  return served;
}

result<void> run_store(const config::deployment& deployment, node_start& start,
                       const announcer& tell, stop_signals& signals) {
  auto node = start.claim ? actors::start_with_name(deployment, *start.claim)
                          : engine::start(deployment, start.node.name);
  if (!node) return fail(node.error());
  auto served = serve(**node, start, tell, signals);
  (*node)->stop();
  return served;
}

result<void> run_role(const config::deployment& deployment, node_start& start,
                      const announcer& tell, stop_signals& signals) {
  switch (start.node.role) {
    case config::role::supervisor: return run_supervisor(deployment, start, tell, signals);
    case config::role::store: return run_store(deployment, start, tell, signals);
    case config::role::prefill:
    case config::role::decode: return run_reference(deployment, start, tell, signals);
    case config::role::both: break;  // the user's own process, refused earlier
  }
  return fail(errc::internal, "node of an unknown role");
}

// -- before it runs

/// Why no node of an open stage can be started here.
error complaint_of_open_stage(const std::string& stage) {
  return {errc::invalid_config,
          "stage " + stage +
              " is open: its nodes are processes of yours, which join it by what they announce; "
              "see engine_options::join in troupe/actors/engine.hpp"};
}

/// The node, if it can run here; else the sentence that says why not.
result<config::resolved_node> find_runnable(const config::deployment& deployment,
                                            const std::string& name) {
  const auto nodes = config::resolve(deployment);
  const auto* found = config::find_node(nodes, name);
  if (found == nullptr) {
    const auto place = config::open_place_of(name);
    const auto* stage = place ? config::find_stage(deployment, place->stage) : nullptr;
    if (stage != nullptr && stage->open) return fail(complaint_of_open_stage(stage->name));
    std::string names;
    for (const auto& node : nodes) names += (names.empty() ? "" : ", ") + node.name;
    return fail(errc::not_found, "the deployment has no node " + name + "; it has " + names);
  }
  if (!found->local)
    return fail(errc::invalid_config, name + " belongs to host " + found->host +
                                          ", which is not this machine; start it there");
  if (found->engine == config::engine_kind::external)
    return fail(errc::invalid_config,
                name +
                    " has `engine: external`: it is a process of yours that links "
                    "troupe::actors and calls troupe::engine::start(deployment, \"" +
                    name + "\"); see troupe/actors/engine.hpp and deploy/reference_engine");
  return *found;
}

/// Why no process can be a node of that stage, known before the supervisor is asked which; empty if
/// one can.
std::optional<error> complaint_of_stage(const config::deployment& deployment,
                                        const std::string& name) {
  const auto* stage = config::find_stage(deployment, name);
  if (stage != nullptr && stage->open) return complaint_of_open_stage(name);
  if (stage == nullptr || stage->engine != config::engine_kind::external) return std::nullopt;
  return error{errc::invalid_config,
               "stage " + name +
                   " has `engine: external`: its nodes are processes of yours, which find out "
                   "which of them they are by troupe::actors::leased_name; see "
                   "troupe/actors/leased_name.hpp"};
}

exit_code refuse(const error& why) {
  std::cerr << "troupe node: " << to_string(why) << "\n";
  return exit_code::usage;
}

/// Reports a refusal of a process that may have no standard error.
exit_code say_refusal(const error& why, const announcer& tell) {
  actors::logger("node")->error("{}", to_string(why));
  tell.say({announcement::kind::failed, to_string(why), 0});
  return refuse(why);
}

/// Detaches this process from the one that started it.
result<void> go_on_detached(node_arguments& given, detached_cores cores) {
  if (!given.log.file.empty()) {
    std::error_code failed;
    const auto file = std::filesystem::absolute(given.log.file, failed);
    if (failed) {
      return fail(errc::invalid_config,
                  "--log-file " + given.log.file +
                      " cannot be found from another folder: " + failed.message());
    }
    given.log.file = file.string();
  }
  return detach(given.announce_fd, cores);
}

/// Sets the name of the process.
result<void> go_by(const std::string& name, actors::log_options& log) {
  name_this_process(process_name(name));
  log.node = name;
  return actors::init_logging(log);
}

/// Reports why the node can no longer run, in the log and to the starter.
exit_code say_failure(const node_arguments& given, const std::string& name, const error& why,
                      const announcer& tell) {
  actors::logger("node")->error("{}", to_string(why));
  tell.say({announcement::kind::failed, to_string(why), 0});
  if (!given.log.file.empty() || given.log.level == "off")
    std::cerr << "troupe node: " << name << ": " << to_string(why) << "\n";
  return why.code == errc::stale_incarnation ? exit_code::replaced : exit_code::failed;
}

/// Runs work that may block, on a thread of its own, until a signal comes (`aborted`).
template <class Value, class Work>
result<Value> unless_signalled(stop_signals& signals, Work work) {
  return or_error("this process cannot wait for the supervisor", [&]() -> result<Value> {
    std::stop_source given_up;
    result<Value> done = fail(errc::internal, "it was not done");
    const auto all = [&] { done = work(given_up.get_token()); };
    if (!run_and_listen(signals, all, [&] { given_up.request_stop(); }))
      return fail(errc::aborted, "this process was told to end");
    return done;
  });
}

/// With `supervisor.begin`: finds the supervisor, or begins it. The node, which cannot be stopped
/// while it starts, then finds it at once.
result<actors::found_supervisor> find_first(const config::deployment& deployment,
                                            const node_arguments& given, stop_signals& signals) {
  const bool has_limit = given.wait_limit.count() >= 0;
  const auto patience =
      has_limit ? std::min(given.wait_limit, actors::begin_patience) : actors::begin_patience;
  return unless_signalled<actors::found_supervisor>(signals, [&](const std::stop_token& given_up) {
    return actors::find_or_begin_supervisor(deployment, patience, given_up);
  });
}

/// Asks the supervisor which node of the stage this process is.
result<std::unique_ptr<actors::leased_name>> claim_name(const config::deployment& deployment,
                                                        const node_arguments& given,
                                                        stop_signals& signals) {
  using claimed = std::unique_ptr<actors::leased_name>;
  return unless_signalled<claimed>(signals, [&](const std::stop_token& given_up) {
    return actors::leased_name::claim(deployment, given.stage, {given.wait_limit, given_up});
  });
}

bool may_not_pass(errc code) {
  return code == errc::invalid_config || code == errc::not_found || code == errc::version_mismatch;
}

exit_code run_node(node_arguments& given) {
  auto deployment = load_or_complain(given.file);
  if (!deployment) return exit_code::usage;
  if (given.supervisor_port != 0) {
    auto& supervisor = deployment->supervisor;
    // A port that the OS chose does not identify kept state: another run may get it.
    if (supervisor.port == 0 && supervisor.state_file == "auto") supervisor.state_file = "none";
    supervisor.port = given.supervisor_port;
    // A node that is told the supervisor's address looks for no other.
    if (given.name != "supervisor") supervisor.begin = false;
  }
  node_start start;
  start.wait_limit = given.wait_limit;
  if (!given.name.empty()) {
    auto node = find_runnable(*deployment, given.name);
    if (!node) return refuse(node.error());
    start.node = std::move(*node);
  } else if (const auto why = complaint_of_stage(*deployment, given.stage)) {
    return refuse(*why);
  }
  const bool supervises = !given.name.empty() && start.node.role == config::role::supervisor;
  if (supervises && given.wait_limit.count() >= 0)
    return refuse(
        {errc::invalid_config, "the supervisor waits for no other node; leave --wait-limit out"});
  if (!supervises && deployment->supervisor.port == 0 && !deployment->supervisor.begin) {
    std::cerr << "troupe node: supervisor.port is 0 in " << given.file
              << ", so this node cannot find the supervisor; give it a port there, or name the "
                 "port at which it listens with --supervisor-port\n";
    return exit_code::usage;
  }
  const auto first_name = given.name.empty() ? given.stage : given.name;
  if (given.detach) {
    // A supervisor shared by all uses all cores: the process that began it may be bound to a few.
    const bool is_begun = supervises && deployment->supervisor.begin;
    const auto cores = is_begun ? detached_cores::all : detached_cores::as_before;
    if (auto gone = go_on_detached(given, cores); !gone) return refuse(gone.error());
  }
  if (auto logging = go_by(first_name, given.log); !logging) return refuse(logging.error());
  const announcer tell{given.announce_fd};
  stop_signals signals;
  const orphan_wake wake;
  if (supervises && deployment->supervisor.begin) {
    auto notice = actors::supervisor_notice::claim(*deployment);
    if (!notice) return say_refusal(notice.error(), tell);
    start.notice = std::move(*notice);
  } else if (!given.name.empty() && deployment->supervisor.begin) {
    const auto found = find_first(*deployment, given, signals);
    if (!found && found.error().code == errc::aborted) return exit_code::ok;  // told to stop
    if (!found) return say_failure(given, first_name, found.error(), tell);
  }
  if (given.name.empty()) {
    auto claim = claim_name(*deployment, given, signals);
    if (!claim && claim.error().code == errc::aborted) return exit_code::ok;  // told to stop
    if (!claim && may_not_pass(claim.error().code)) return refuse(claim.error());
    if (!claim) return say_failure(given, first_name, claim.error(), tell);
    auto node = find_runnable(*deployment, (*claim)->name());
    if (!node) return refuse(node.error());
    start.node = std::move(*node);
    start.claim = std::move(*claim);
    if (auto logging = go_by(start.node.name, given.log); !logging) return refuse(logging.error());
    actors::logger("node")->info("the supervisor assigned the name {}", start.node.name);
  }
  const auto name = start.node.name;
  if (const auto ran = run_role(*deployment, start, tell, signals); !ran)
    return say_failure(given, name, ran.error(), tell);
  actors::logger("node")->info("{} stopped", name);
  return exit_code::ok;
}

}  // namespace

void add_node(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "node",
      "Run one node of a deployment in the foreground until Ctrl-C or SIGTERM, or until it is\n"
      "drained: the supervisor, a store, or a stage with the reference engine. A second signal\n"
      "ends it at once. A node without a supervisor says so, waits, and asks again every\n"
      "heartbeat_interval until it is stopped, or until --wait-limit. With --stage the supervisor\n"
      "chooses which node of the stage it is: one that no process has been yet, else the one that\n"
      "has been down for longest; if all are in use, it waits until one is free. A supervisor\n"
      "keeps what must survive it in the file that supervisor.state_file names. If FILE has\n"
      "`supervisor: {begin: true}`, a node that finds no supervisor begins one.");
  const auto given = std::make_shared<node_arguments>();
  verb->add_option("FILE", given->file, "The deployment file (YAML)")->required();
  auto* name = verb->add_option("--name", given->name,
                                "Which node, as `troupe check FILE --nodes` lists them");
  verb->add_option("--stage", given->stage,
                   "Instead of --name: any node of this stage, the supervisor chooses which")
      ->excludes(name);
  verb->add_option("--wait-limit", given->wait_limit_text,
                   "How long to wait until the supervisor has registered the node, a duration\n"
                   "like 60s; then the command ends with 1 (default: no limit)")
      ->check([given](const std::string& text) {
        const auto time = config::parse_duration(text);
        if (!time) return "takes a duration, like 60s or 5min, found `" + text + "`";
        given->wait_limit = *time;
        return std::string{};
      });
  verb->add_option("--log-level", given->log.level, "What is logged")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
  verb->add_option(
      "--log-file", given->log.file,
      "Log to this file, rotated at 64 MiB, with 3 old files kept; missing folders are\n"
      "created (default: standard error)");
  verb->add_option("--supervisor-port", given->supervisor_port,
                   "Instead of the port in FILE; for a supervisor that listens at any free port")
      ->check(CLI::Range(1, 65'535));
  verb->add_flag(
      "--detach", given->detach,
      "Go on in the background, detached from the caller, once FILE and the name have been\n"
      "checked; the log is lost without --log-file");
  // The pipe on which `troupe up` hears from the nodes that it starts.
  verb->add_option("--announce-fd", given->announce_fd)->group("");
  verb->callback([given, &code] {
    if (given->name.empty() && given->stage.empty()) throw CLI::RequiredError{"--name or --stage"};
    code = run_node(*given);
  });
}

}  // namespace troupe::deploy::cli
