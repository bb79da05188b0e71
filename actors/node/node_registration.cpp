#include <chrono>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/sec.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/node/node_core.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace troupe::actors::nodes {

namespace {

constexpr std::chrono::milliseconds first_retry{50};

load_report load_of(const node_context& context) {
  load_report load;
  load.queue_length = context.counters.queue_length.load();
  load.active_transfers = context.counters.active_transfers.load();
  load.links_up = context.counters.links_up.load();
  load.links_broken = context.counters.links_broken.load();
  if (context.pool) {
    const auto counters = context.pool->counters();
    load.blocks_total = counters.total;
    load.blocks_free = counters.free;
    load.blocks_quarantined = counters.quarantined;
    load.queue_length += counters.waiters;
  }
  return load;
}

}  // namespace

/// Where the supervisor is asked, for messages.
std::string node_core::asked_at() const {
  const auto& settings = context_->settings;
  return found_ ? found_->host + ":" + std::to_string(found_->port)
                : settings.supervisor_host + ":" + std::to_string(settings.supervisor_port);
}

/// Logs the reason if it is new (by its code: the text may contain times), and rarely after that.
void node_core::say_unregistered(const troupe::error& why) {
  const bool due = reminder_.pass().has_value();
  if (refusal_said_ == why.code && !due) return;
  refusal_said_ = why.code;
  const auto& settings = context_->settings;
  logger("node")->warn("not registered with the supervisor at {}, tries again every {}: {}",
                       asked_at(), time_text(settings.heartbeat_interval), to_string(why));
}

/// Tries again before the next beat: after `first_retry`, then doubling, until the pause reaches a
/// beat.
void node_core::retry_soon() {
  if (retry_planned_) return;
  const auto pause = retry_pause_.count() == 0 ? first_retry : 2 * retry_pause_;
  if (pause >= context_->settings.heartbeat_interval) return;
  retry_pause_ = pause;
  retry_planned_ = true;
  self_->delayed_send(self_, pause, node_command{try_supervisor{}});
}

void node_core::asking_failed(const caf::error& why) {
  const bool late = why == caf::sec::request_timeout;
  lost_supervisor(late ? troupe::error{errc::deadline, "it has not answered in time"}
                       : troupe::error{errc::peer_unreachable,
                                       "it cannot be reached (" + self_->system().render(why) +
                                           "); start it, or check supervisor.host and port"});
}

/// Another process is this node now. Peers refuse this life already, so asking on is pointless.
void node_core::give_up(const troupe::error& why) {
  registering_ = false;
  replaced_ = true;
  refusal_ = to_string(why);
  supervisor_ = nullptr;
  logger("node")->error("the supervisor at {} no longer admits {}: {}", asked_at(),
                        context_->self.name, refusal_);
  for (const auto& [id, link] : links_) tell(link.actor, link_command{close_link{why}});
  context_->registration.end(why);
}

void node_core::registration_came(const registration& answer) {
  registering_ = false;
  if (replaced_) return;  // it was given up while it was registering
  if (answer.failed != 0) {
    const auto why = refusal(answer);
    if (why.code == errc::stale_incarnation) {
      give_up(why);
    } else {
      lost_supervisor(why);  // any other error may pass
    }
    return;
  }
  registered_ = true;
  refusal_.clear();
  retry_pause_ = {};
  refusal_said_.reset();
  context_->registration.taken_in({answer.supervisor_incarnation, answer.epoch});
  context_->registration.set(true, {});
  logger("node")->info(
      "registered with the supervisor as replica {} rank {} of stage {}, incarnation {:016x}",
      answer.replica, context_->self.rank, context_->self.stage, context_->self.incarnation);
  if (drain_->registered()) {
    self_->send(supervisor_, leave_atom::value, context_->self.name, context_->self.incarnation);
    logger("node")->info("{} goes on draining and tells this supervisor, which knows nothing of it",
                         context_->self.name);
  }
  say_alive();  // it is `joining` for the supervisor until it does
}

void node_core::register_now(std::uint64_t attempt) {
  drain_->asks();
  registration_request request;
  request.cluster = context_->settings.cluster;
  request.node = context_->self;
  request.wanted_replica = context_->self.replica;
  request.join = context_->settings.joins ? 1 : 0;
  self_
      ->request(supervisor_, context_->settings.heartbeat_interval * 2, register_atom::value,
                request, caf::actor_cast<node_actor>(caf::actor_cast<caf::strong_actor_ptr>(self_)))
      .then(
          [this, attempt](const registration& answer) {
            if (attempt == attempt_) registration_came(answer);
          },
          [this, attempt](const caf::error& err) {
            if (attempt == attempt_) asking_failed(err);
          });
}

/// Connects to the supervisor where it was found last, and registers.
void node_core::reach_where_it_is(std::uint64_t attempt) {
  const auto& settings = context_->settings;
  const auto& host = found_ ? found_->host : settings.supervisor_host;
  const auto port = found_ ? found_->port : settings.supervisor_port;
  reach<supervisor_actor>(self_, host, port, settings.heartbeat_interval * 2)
      .then(
          [this, attempt](const reached& answer) {
            if (attempt != attempt_) return;
            if (answer.failed) {
              lost_supervisor(*answer.failed);
              return;
            }
            if (replaced_) {
              registering_ = false;
              return;
            }
            supervisor_ = caf::actor_cast<supervisor_actor>(answer.actor);
            // The supervisor keeps one entry per monitor call, so drop the old one.
            if (watched_) self_->demonitor(watched_);
            watched_ = supervisor_.address();
            self_->monitor(supervisor_);
            tell_untold();
            register_now(attempt);
          },
          [this, attempt](const caf::error& err) {
            if (attempt == attempt_) asking_failed(err);
          });
}

/// Whether a thread looks for the supervisor after it was lost: a `supervisor_looked` follows.
/// Between looks, the node asks where it was last.
bool node_core::looks_for_it(std::uint64_t attempt) {
  const auto& terms = context_->settings.begun_from;
  const auto now = std::chrono::steady_clock::now();
  const bool too_soon = looked_ && now - *looked_ < between_looks;
  if (!terms || !look_due_ || too_soon) return false;
  looked_ = now;
  const auto me = caf::actor_cast<local_node_actor>(caf::actor_cast<caf::strong_actor_ptr>(self_));
  const auto looks =
      context_->search.begin(terms, [me, attempt](const result<found_supervisor>& found) {
        tell(me, node_command{supervisor_looked{attempt, found}});
      });
  return looks && *looks;
}

void node_core::lost_supervisor(const troupe::error& why) {
  registering_ = false;
  ++attempt_;
  if (replaced_) return;
  say_unregistered(why);
  registered_ = false;
  refusal_ = to_string(why);
  context_->registration.set(false, refusal_);
  supervisor_ = nullptr;
  look_due_ = true;
  // A supervisor that is gone may be back in a moment; one that answers badly, or not at all, is
  // only asked with the beats.
  if (why.code == errc::peer_lost || why.code == errc::peer_unreachable) retry_soon();
}

void node_core::on_try_supervisor() {
  retry_planned_ = false;
  if (!registered_) reach_supervisor();
}

void node_core::take_order(const drain_order& order) {
  if (!drain_->ordered(order, context_->self.incarnation)) return;
  std::string_view what;
  switch (drain_->standing()) {
    case drain_standing::serving: what = "its drain was cancelled, it serves on"; break;
    case drain_standing::draining:
      what = "an operator drains it: no new request is placed here, what is here goes on";
      break;
    case drain_standing::drained: what = "drained, it may leave now"; break;
  }
  logger("node")->info("{}: {}", context_->self.name, what);
}

void node_core::reach_supervisor() {
  if (replaced_) return;
  const auto now = std::chrono::steady_clock::now();
  if (registering_) {
    // About a beat has passed: log it, in case an operator wonders.
    const bool slow = now - asking_since_ > context_->settings.heartbeat_interval * 3 / 4;
    if (slow && !refusal_said_) say_unregistered({errc::deadline, "it has not answered yet"});
    return;
  }
  asking_since_ = now;
  registering_ = true;
  const auto attempt = ++attempt_;
  if (supervisor_) {
    register_now(attempt);
    return;
  }
  if (!looks_for_it(attempt)) reach_where_it_is(attempt);
}

void node_core::on_supervisor_looked(supervisor_looked& order) {
  if (order.attempt != attempt_) return;
  if (replaced_) {
    registering_ = false;
    return;
  }
  if (!order.found) {
    lost_supervisor(order.found.error());
    return;
  }
  look_due_ = false;
  const bool is_news = !found_ || *found_ != *order.found;
  found_ = std::move(*order.found);
  context_->registration.asks_at(asked_at());
  if (is_news) {
    logger("node")->info("the supervisor is at {} (pid {}, incarnation {})", asked_at(),
                         found_->pid, life_text(found_->incarnation));
  }
  reach_where_it_is(order.attempt);
}

void node_core::say_alive() {
  heartbeat message{
      context_->self.name, context_->self.incarnation, ++beats_, load_of(*context_), failure_,
      members_.epoch};
  if (drain_->beats(message.load)) {
    logger("node")->info("{} has nothing left to do and is drained", context_->self.name);
  }
  self_->request(supervisor_, context_->settings.heartbeat_interval, std::move(message))
      .then(
          [this, asked = std::chrono::steady_clock::now()](const heartbeat_ack& ack) {
            if (ack.known) {
              tell(runner_,
                   node_notice{heartbeat_answered{ack.supervisor_incarnation, ack.epoch, asked}});
              return;
            }
            if (!registered_) return;
            registered_ = false;
            reach_supervisor();
          },
          [this](const caf::error& err) {
            // A late answer does no harm; the monitor reports a supervisor that is gone.
            logger("node")->debug("heartbeat not answered: {}", self_->system().render(err));
          });
}

}  // namespace troupe::actors::nodes
