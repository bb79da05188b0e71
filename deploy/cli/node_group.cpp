#include "troupe/deploy/cli/node_group.hpp"

#include <algorithm>
#include <iostream>
#include <utility>

#include <poll.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/deploy/stop_together.hpp"

namespace troupe::deploy::cli {

using namespace std::chrono_literals;

namespace {

/// A clean end takes a second or two. Processes that still run after this are killed.
constexpr std::chrono::milliseconds stop_patience = 8s;
/// Signals within this time of the first count as the same one.
constexpr auto second_thought = 1s;
constexpr auto start_patience = 30s;
/// Between the end of a node's pipe and the end of its process.
constexpr auto exit_patience = 3s;
/// When a reminder is printed that nodes wait for a supervisor: once all of them have listened for
/// this long, or once one fails to register; repeated.
constexpr auto first_reminder = 1s;
constexpr auto slow_start = 10s;
constexpr auto next_reminder = 30s;
constexpr auto step_interval = 100ms;

/// Whether a restart helps, or would end in the same way.
bool starting_again_helps(const std::optional<int>& code) {
  return code != to_int(exit_code::usage) && code != to_int(exit_code::replaced);
}

}  // namespace

void complain(const std::string& sentence) {
  std::cerr << "troupe up: " + sentence + "\n";
}

std::string node_group::child::who() const {
  return member.node.name + " (pid " + std::to_string(process.pid()) + ")";
}

exit_code node_group::run(const std::vector<group_member>& members) {
  expected_ = members.size();
  const bool good = start_all(members) && (signalled_ || watch());
  const bool clean = stop_all();
  return good && clean ? exit_code::ok : exit_code::failed;
}

// -- starting

bool node_group::start_all(const std::vector<group_member>& members) {
  children_.reserve(members.size());
  for (const auto& member : members) {
    auto begun = start(member.node);
    if (!begun) {
      complain(member.node.name + ": " + to_string(begun.error()));
      return false;
    }
    children_.push_back(child{member, std::move(begun->process), std::move(begun->heard)});
    // The others need its port, and a taken port should be reported first.
    if (children_.back().supervises() && !wait_for_supervisor()) return false;
    if (signalled_) return true;
  }
  return true;
}

result<node_group::started> node_group::start(const config::resolved_node& node) const {
  auto heard = announcements::open();
  if (!heard) return fail(heard.error());
  std::vector<std::string> arguments{
      "node",        given_.file,      "--name",        node.name,
      "--log-level", given_.log_level, "--announce-fd", std::to_string(heard->far_end())};
  if (!given_.log_dir.empty()) {
    arguments.insert(arguments.end(), {"--log-file", given_.log_dir + "/" + node.name + ".log"});
  }
  // A restarted supervisor gets the same port, because the nodes look for it there.
  if (supervisor_port_ != 0) {
    arguments.insert(arguments.end(), {"--supervisor-port", std::to_string(supervisor_port_)});
  }
  auto process = child_process::start(own_program, std::move(arguments));
  if (!process) return fail(process.error());
  heard->close_far_end();
  return started{std::move(*process), std::move(*heard)};
}

bool node_group::wait_for_supervisor() {
  const auto until = clock::now() + start_patience;
  while (!signalled_ && !children_.front().listens) {
    if (clock::now() >= until) {
      complain("the supervisor did not listen within " + actors::time_text(start_patience));
      return false;
    }
    if (!step(step_interval)) return false;
  }
  return true;
}

// -- while they run

bool node_group::watch() {
  auto up_until = clock::now();
  while (!signalled_ && !nobody_is_left()) {
    const bool waiting = !everyone_is_up();
    if (!step(waiting ? step_interval : -1ms)) return false;
    if (!waiting) up_until = clock::now();
    if (everyone_is_up() || clock::now() < remind_at_) continue;
    if (all_listen_for(first_reminder) || clock::now() >= up_until + slow_start) say_who_waits();
  }
  if (!signalled_) std::cout << "every node has left" << std::endl;
  return true;
}

/// Waits for a signal or for news of a node, and restarts the nodes whose time has come. Returns
/// false if a node ended that is not restarted.
bool node_group::step(std::chrono::milliseconds timeout) {
  std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
  for (const auto& c : children_)  // poll ignores a negative descriptor
    fds.push_back({c.where == phase::runs ? c.heard.fd() : -1, POLLIN, 0});
  const auto ready =
      ::poll(fds.data(), fds.size(), static_cast<int>(until_next_start(timeout).count()));
  if (ready > 0 && fds.front().revents != 0 && signals_.wait(0ms)) {
    signalled_ = true;
    return true;
  }
  bool good = true;
  if (ready > 0) {
    for (auto& c : children_)
      if (c.where == phase::runs) good &= hear(c);
  }
  good = good && start_those_due();
  if (good) say_when_up();
  return good;
}

bool node_group::hear(child& c) {
  while (const auto what = c.heard.take()) {
    switch (what->what) {
      case announcement::kind::listening: on_listening(c, *what); break;
      case announcement::kind::registered: on_registered(c); break;
      case announcement::kind::failed: c.failure = what->text; break;
      case announcement::kind::drained: c.drained = true; break;
    }
  }
  return !c.heard.over() || on_end(c);
}

void node_group::on_listening(child& c, const announcement& what) {
  c.listens = true;
  c.listens_since = clock::now();
  std::cout << c.who() << " listens at " << what.text << ":" << what.port << std::endl;
  if (!c.supervises()) return;
  supervisor_port_ = what.port;
  given_.supervisor = what.text + ":" + std::to_string(what.port);
  on_registered(c);
}

void node_group::on_registered(child& c) {
  c.registered = true;
  c.backoff.up(clock::now());
  if (c.restarts > 0) std::cout << c.who() << " is up again" << std::endl;
}

void node_group::say_when_up() {
  if (said_up_ || children_.size() < expected_ || !everyone_is_up()) return;
  said_up_ = true;
  const auto count = std::ranges::count(children_, phase::runs, &child::where);
  std::cout << count << (count == 1 ? " node is" : " nodes are") << " up; Ctrl-C stops "
            << (count == 1 ? "it" : "them") << std::endl;
}

// -- when one of them ends

/// Returns false if it is not restarted, so that the others have to stop.
bool node_group::on_end(child& c) {
  (void)c.process.wait(exit_patience);
  const auto how = c.process.ended().value_or("a closed pipe, but is still running");
  const auto what_happened =
      c.who() + " ended with " + how + (c.failure.empty() ? std::string{} : ": " + c.failure);
  if (c.drained) {
    if (c.process.code() == to_int(exit_code::ok)) {
      std::cout << c.who() << " was drained and has left" << std::endl;
    } else {
      complain(what_happened + "; it was drained and is not started again");
      c.process.stop(0ms);  // one that closed its pipe and does not end
    }
    c.where = phase::left;
    return true;
  }
  if (c.member.restart == config::restart_policy::never) return give_up(c, what_happened);
  // A node that ends cleanly was told to; but a deployment without its supervisor is not in order.
  if (c.process.code() == to_int(exit_code::ok) && !c.supervises()) {
    complain(what_happened + "; it has left and is not started again");
    c.where = phase::left;
    return true;
  }
  // All other nodes wait for the first start of the supervisor.
  const bool never_began = c.supervises() && supervisor_port_ == 0;
  if (never_began || c.process.code() == to_int(exit_code::ok)) return give_up(c, what_happened);
  if (starting_again_helps(c.process.code())) return start_later(c, what_happened);
  const auto no_help = what_happened + "; starting it again would not help";
  return c.supervises() ? work_on_without(c, no_help) : give_up(c, no_help);
}

/// Nodes can work without the supervisor, and stopping them would lose their work: the supervisor
/// is restarted for as long as they run.
bool node_group::work_on_without(child& supervisor, const std::string& what_happened) {
  const bool alone = std::ranges::all_of(
      children_, [&](const child& c) { return &c == &supervisor || c.where == phase::left; });
  if (alone) return give_up(supervisor, what_happened);
  const auto delay = restart_backoff::longest_delay;
  complain(what_happened + "; the other nodes continue without it, and it is tried again in " +
           actors::time_text(delay));
  wait_for_next_start(supervisor, delay);
  return true;
}

void node_group::wait_for_next_start(child& c, std::chrono::milliseconds delay) {
  c.process.stop(0ms);  // one that closed its pipe and does not end
  c.where = phase::waits;
  c.start_at = clock::now() + delay;
  c.listens = c.registered = false;
  c.failure.clear();
}

bool node_group::give_up(child& c, const std::string& what_happened) {
  complain(what_happened + "; stopping the other nodes");
  c.reported = true;
  return false;
}

bool node_group::start_later(child& c, const std::string& what_happened) {
  const auto most = std::to_string(restart_backoff::most_restarts);
  const auto within = actors::time_text(restart_backoff::counted_within);
  const auto delay = c.backoff.ended(clock::now());
  if (!delay) {
    const auto given_up = what_happened + "; given up after " + most + " restarts within " + within;
    return c.supervises() ? work_on_without(c, given_up) : give_up(c, given_up);
  }
  complain(what_happened + "; starting it again in " + actors::time_text(*delay) + " (restart " +
           std::to_string(c.backoff.ends()) + " of at most " + most + " within " + within + ")");
  wait_for_next_start(c, *delay);
  return true;
}

std::chrono::milliseconds node_group::until_next_start(std::chrono::milliseconds most) const {
  for (const auto& c : children_) {
    if (c.where != phase::waits) continue;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(c.start_at - clock::now());
    most = std::min(most < 0ms ? left : most, std::max(left, 0ms));
  }
  return most;
}

bool node_group::start_those_due() {
  for (auto& c : children_) {
    if (c.where != phase::waits || clock::now() < c.start_at) continue;
    auto begun = start(c.member.node);
    if (!begun) {
      const auto why = c.member.node.name + " cannot be started: " + to_string(begun.error());
      if (!start_later(c, why)) return false;
      continue;
    }
    c.process = std::move(begun->process);
    c.heard = std::move(begun->heard);
    c.where = phase::runs;
    ++c.restarts;
    complain(c.who() + " is started again");
  }
  return true;
}

// -- who is up

bool node_group::all_listen_for(clock::duration time) const {
  return std::ranges::all_of(children_, [until = clock::now() - time](const child& c) {
    return c.where == phase::left || (c.listens && c.listens_since <= until);
  });
}

bool node_group::everyone_is_up() const {
  return std::ranges::all_of(children_,
                             [](const child& c) { return c.registered || c.where == phase::left; });
}

bool node_group::nobody_is_left() const {
  return std::ranges::all_of(children_, [](const child& c) { return c.where == phase::left; });
}

/// Names the waiting nodes. Their logs say why they wait, but may be elsewhere or off.
void node_group::say_who_waits() {
  std::string names;
  std::size_t waiting = 0;
  for (const auto& c : children_)
    if (c.where == phase::runs && c.listens && !c.registered) {
      names += (names.empty() ? "" : ", ") + c.member.node.name;
      ++waiting;
    }
  if (waiting == 0) return;
  remind_at_ = clock::now() + next_reminder;
  complain(names + (waiting == 1 ? " waits" : " wait") + " for the supervisor at " +
           given_.supervisor + (waiting == 1 ? " and keeps asking" : " and keep asking") +
           "; Ctrl-C stops " + (waiting == 1 ? "it" : "them"));
}

// -- stopping

/// Stops all nodes at once: they tell each other that they leave. Returns false if a node did not
/// end cleanly.
bool node_group::stop_all() {
  stopping_since_ = clock::now();
  bool hurried = false;
  ending_group group;
  group.patience = stop_patience;
  // A second signal means: now. A signal right after the first does not count: timeout(1) and
  // others signal the process and then its group.
  group.hurried = [&] {
    hurried = hurried || (signals_.wait(0ms) && clock::now() - stopping_since_ > second_thought);
    return hurried;
  };
  for (auto& c : children_) {
    if (c.where != phase::runs) continue;
    if (c.supervises()) {
      group.supervisor = &c.process;
    } else {
      group.nodes.push_back(&c.process);
    }
  }
  const auto killed = stop_together(group);
  bool clean = killed.empty();
  std::string names;
  for (auto& c : children_) {
    if (c.where != phase::runs) continue;
    if (std::ranges::find(killed, &c.process) == killed.end()) {
      clean &= ended_well(c);
    } else {
      names += (names.empty() ? "" : ", ") + c.who();
    }
  }
  if (!killed.empty()) {
    complain(names + " did not stop " +
             (hurried ? std::string{"before the second signal"}
                      : "within " + actors::time_text(stop_patience)) +
             (killed.size() == 1 ? " and was killed" : " and were killed"));
  }
  if (!children_.empty())
    std::cout << (clean ? "all nodes stopped" : "all nodes have ended, but not all in good order")
              << std::endl;
  return clean;
}

/// Reports a node that should have ended cleanly and did not.
bool node_group::ended_well(child& c) {
  const auto how = c.process.ended().value_or("nothing");
  // Signal 15: it was told to stop before it had installed its handler.
  if (c.reported || how == "exit code 0" || how == "signal 15") return true;
  complain(c.who() + " ended with " + how + " when told to stop");
  return false;
}

}  // namespace troupe::deploy::cli
