#include <chrono>
#include <utility>

#include <caf/send.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/node/node_core.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::nodes {

namespace {

/// Bound on remembered peers whose links crashed; no deployment has more names.
constexpr std::size_t max_remembered = 1024;

}  // namespace

/// The node takes part no more: tells everyone who still relies on it, once.
void node_core::give_this_node_up(const troupe::error& why) {
  if (replaced_) return;
  replaced_ = true;
  refusal_ = to_string(why);
  refusal_code_ = why.code;
  if (supervisor_) {
    heartbeat last;
    last.name = context_->self.name;
    last.incarnation = context_->self.incarnation;
    last.sequence = ++beats_;
    last.failure = why.message;
    self_->request(supervisor_, context_->settings.heartbeat_interval, std::move(last))
        .then([](const heartbeat_ack&) {}, [](const caf::error&) {});  // best effort
  }
  registered_ = false;
  fail_placements(why);
  for (auto& [id, call] : calls_) {
    call.promise.deliver(call_reply{static_cast<std::uint8_t>(why.code), why.message, {}});
  }
  calls_.clear();
  for (const auto& [id, link] : links_) tell(link.actor, link_command{close_link{why}});
}

void node_core::watch_essentials() {
  if (runner_) self_->monitor(runner_);
  if (pool_) self_->monitor(pool_);
}

bool node_core::essential_ended(const caf::down_msg& down) {
  const bool runner = runner_ && down.source == runner_.address();
  if (!runner && !(pool_ && down.source == pool_.address())) return false;
  if (crashed(down.reason)) {
    give_this_node_up({errc::internal, std::string{runner ? "the operation runner" : "the pool"} +
                                           " of " + context_->self.name + " crashed"});
  }
  return true;
}

void node_core::link_crashed(const known_link& link) {
  auto& all = crashed_links_;
  if (!all.contains(link.peer) && all.size() >= max_remembered) all.erase(all.begin());
  auto& of = all[link.peer];
  if (of.incarnation != link.incarnation) {
    // A late crash of a former life says nothing about the present one.
    if (of.incarnation != 0 && shown_life(link.peer) == of.incarnation) return;
    of = {link.incarnation};
  }
  if (of.given_up || of.limit.allows(std::chrono::steady_clock::now())) return;
  of.given_up = true;
  logger("node")->error(
      "links with {} ({:016x}) crashed {} times within {} s: no more are made with this life of "
      "the peer",
      link.peer, link.incarnation, of.limit.ends(),
      std::chrono::floor<std::chrono::seconds>(of.limit.within()).count());
}

std::optional<troupe::error> node_core::links_given_up(const std::string& peer,
                                                       std::uint64_t incarnation) const {
  const auto found = crashed_links_.find(peer);
  if (found == crashed_links_.end() || !found->second.given_up) return std::nullopt;
  if (found->second.incarnation != incarnation) return std::nullopt;
  return troupe::error{errc::internal, "links between " + context_->self.name + " and " + peer +
                                           " keep crashing and are given up; see the log of " +
                                           context_->self.name +
                                           ", and start one of the two again"};
}

}  // namespace troupe::actors::nodes
