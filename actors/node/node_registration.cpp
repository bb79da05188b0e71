#include <chrono>
#include <set>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/sec.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/node/node_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace troupe::actors::node_parts {

namespace {

constexpr std::chrono::milliseconds first_retry{50};

/// Where the supervisor is asked, for sentences.
std::string asked_at(const node_state_data& st) {
  const auto& settings = st.context->settings;
  return st.found ? st.found->host + ":" + std::to_string(st.found->port)
                  : settings.supervisor_host + ":" + std::to_string(settings.supervisor_port);
}

/// Says it when it is news (the sentence may tell times, its kind does not), and rarely again.
void say_unregistered(node_state_data& st, const troupe::error& why) {
  const bool due = st.reminder.pass().has_value();
  if (st.refusal_said == why.code && !due) return;
  st.refusal_said = why.code;
  const auto& settings = st.context->settings;
  logger("node")->warn("not registered with the supervisor at {}, tries again every {}: {}",
                       asked_at(st), time_text(settings.heartbeat_interval), to_string(why));
}

/// Tries again before the next beat does: after `first_retry`, then twice as long each time, until a
/// beat is as soon.
void retry_soon(self_pointer self) {
  auto& st = self->state;
  if (st.retry_planned) return;
  const auto pause = st.retry_pause.count() == 0 ? first_retry : 2 * st.retry_pause;
  if (pause >= st.context->settings.heartbeat_interval) return;
  st.retry_pause = pause;
  st.retry_planned = true;
  self->delayed_send(self, pause, node_command{try_supervisor{}});
}

void asking_failed(self_pointer self, const caf::error& why) {
  const bool late = why == caf::sec::request_timeout;
  lost_supervisor(self, late ? troupe::error{errc::deadline, "it has not answered in time"}
                             : troupe::error{errc::peer_unreachable,
                                             "it cannot be reached (" + self->system().render(why) +
                                                 "); start it, or check supervisor.host and port"});
}

/// Another process is this node now. Peers refuse this life already; asking on would help nobody.
void give_up(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  st.registering = false;
  st.replaced = true;
  st.refusal = to_string(why);
  st.supervisor = nullptr;
  logger("node")->error("the supervisor at {} takes {} in no more: {}", asked_at(st),
                        st.context->self.name, st.refusal);
  for (const auto& [id, link] : st.links) tell(link.actor, link_command{close_link{why}});
  st.context->registration.end(why);
}

void registration_came(self_pointer self, const registration& answer) {
  auto& st = self->state;
  st.registering = false;
  if (st.replaced) return;  // it was given up while it asked
  if (answer.failed != 0) {
    const auto why = refusal(answer);
    if (why.code == errc::stale_incarnation) {
      give_up(self, why);
    } else {
      lost_supervisor(self, why);  // what else is wrong may pass
    }
    return;
  }
  st.registered = true;
  st.refusal.clear();
  st.retry_pause = {};
  st.refusal_said.reset();
  st.context->registration.taken_in({answer.supervisor_incarnation, answer.epoch});
  st.context->registration.set(true, {});
  logger("node")->info(
      "registered with the supervisor as replica {} rank {} of stage {}, incarnation {:016x}",
      answer.replica, st.context->self.rank, st.context->self.stage, st.context->self.incarnation);
  if (st.drain->registered()) {
    self->send(st.supervisor, leave_atom::value, st.context->self.name,
               st.context->self.incarnation);
    logger("node")->info("{} goes on draining: this supervisor, which knows nothing of it, is told",
                         st.context->self.name);
  }
  say_alive(self);  // it is `joining` for the supervisor until it does
}

void register_now(self_pointer self, std::uint64_t attempt) {
  auto& st = self->state;
  st.drain->asks();
  registration_request request;
  request.cluster = st.context->settings.cluster;
  request.node = st.context->self;
  request.wanted_replica = st.context->self.replica;
  request.join = st.context->settings.joins ? 1 : 0;
  self->request(st.supervisor, st.context->settings.heartbeat_interval * 2, register_atom::value,
                request, caf::actor_cast<node_actor>(caf::actor_cast<caf::strong_actor_ptr>(self)))
      .then(
          [self, attempt](const registration& answer) {
            if (attempt == self->state.attempt) registration_came(self, answer);
          },
          [self, attempt](const caf::error& err) {
            if (attempt == self->state.attempt) asking_failed(self, err);
          });
}

/// Connects to it, and registers.
void reach_where_it_is(self_pointer self, std::uint64_t attempt) {
  auto& st = self->state;
  const auto& settings = st.context->settings;
  const auto& host = st.found ? st.found->host : settings.supervisor_host;
  const auto port = st.found ? st.found->port : settings.supervisor_port;
  reach<supervisor_actor>(self, host, port, settings.heartbeat_interval * 2)
      .then(
          [self, attempt](const reached& answer) {
            auto& state = self->state;
            if (attempt != state.attempt) return;
            if (answer.failed) {
              lost_supervisor(self, *answer.failed);
              return;
            }
            if (state.replaced) {
              state.registering = false;
              return;
            }
            state.supervisor = caf::actor_cast<supervisor_actor>(answer.actor);
            // It remembers whoever watches it, as often as it is asked to.
            if (state.watched) self->demonitor(state.watched);
            state.watched = state.supervisor.address();
            self->monitor(state.supervisor);
            tell_untold(self);
            register_now(self, attempt);
          },
          [self, attempt](const caf::error& err) {
            if (attempt == self->state.attempt) asking_failed(self, err);
          });
}

/// Whether a thread looks where the supervisor is, after it was lost: a `supervisor_looked` follows. In
/// between it is asked where it was last.
bool looks_for_it(self_pointer self, std::uint64_t attempt) {
  auto& st = self->state;
  const auto& terms = st.context->settings.begun_from;
  const auto now = std::chrono::steady_clock::now();
  const bool too_soon = st.looked && now - *st.looked < between_looks;
  if (!terms || !st.look_due || too_soon) return false;
  st.looked = now;
  const auto me = caf::actor_cast<local_node_actor>(caf::actor_cast<caf::strong_actor_ptr>(self));
  const auto looks =
      st.context->search.begin(terms, [me, attempt](const result<found_supervisor>& found) {
        tell(me, node_command{supervisor_looked{attempt, found}});
      });
  return looks && *looks;
}

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

void lost_supervisor(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  st.registering = false;
  ++st.attempt;
  if (st.replaced) return;
  say_unregistered(st, why);
  st.registered = false;
  st.refusal = to_string(why);
  st.context->registration.set(false, st.refusal);
  st.supervisor = nullptr;
  st.look_due = true;
  // One that is gone may be back in a moment; one that answers badly, or not at all, is asked with
  // the beats alone.
  if (why.code == errc::peer_lost || why.code == errc::peer_unreachable) retry_soon(self);
}

void on_try_supervisor(self_pointer self) {
  auto& st = self->state;
  st.retry_planned = false;
  if (!st.registered) reach_supervisor(self);
}

void take_order(self_pointer self, const drain_order& order) {
  auto& st = self->state;
  if (!st.drain->ordered(order, st.context->self.incarnation)) return;
  std::string_view what;
  switch (st.drain->standing()) {
    case drain_standing::serving: what = "its drain was cancelled, it serves on"; break;
    case drain_standing::draining:
      what = "an operator drains it: no new request is placed here, what is here goes on";
      break;
    case drain_standing::drained: what = "drained, it may leave now"; break;
  }
  logger("node")->info("{}: {}", st.context->self.name, what);
}

void reach_supervisor(self_pointer self) {
  auto& st = self->state;
  if (st.replaced) return;
  const auto now = std::chrono::steady_clock::now();
  if (st.registering) {
    // A beat has passed, or nearly: somebody may wait and wonder.
    const bool slow = now - st.asking_since > st.context->settings.heartbeat_interval * 3 / 4;
    if (slow && !st.refusal_said) say_unregistered(st, {errc::deadline, "it has not answered yet"});
    return;
  }
  st.asking_since = now;
  st.registering = true;
  const auto attempt = ++st.attempt;
  if (st.supervisor) {
    register_now(self, attempt);
    return;
  }
  if (!looks_for_it(self, attempt)) reach_where_it_is(self, attempt);
}

void on_supervisor_looked(self_pointer self, supervisor_looked& order) {
  auto& st = self->state;
  if (order.attempt != st.attempt) return;
  if (st.replaced) {
    st.registering = false;
    return;
  }
  if (!order.found) {
    lost_supervisor(self, order.found.error());
    return;
  }
  st.look_due = false;
  const bool is_news = !st.found || *st.found != *order.found;
  st.found = std::move(*order.found);
  st.context->registration.asks_at(asked_at(st));
  if (is_news) {
    logger("node")->info("the supervisor is at {} (pid {}, incarnation {})", asked_at(st),
                         st.found->pid, life_text(st.found->incarnation));
  }
  reach_where_it_is(self, order.attempt);
}

void say_alive(self_pointer self) {
  auto& st = self->state;
  heartbeat message{st.context->self.name,
                    st.context->self.incarnation,
                    ++st.beats,
                    load_of(*st.context),
                    st.failure,
                    st.members.epoch};
  if (st.drain->beats(message.load)) {
    logger("node")->info("{} has nothing left to do and is drained", st.context->self.name);
  }
  self->request(st.supervisor, st.context->settings.heartbeat_interval, std::move(message))
      .then(
          [self, asked = std::chrono::steady_clock::now()](const heartbeat_ack& ack) {
            if (ack.known) {
              tell(self->state.port,
                   node_notice{heartbeat_answered{ack.supervisor_incarnation, ack.epoch, asked}});
              return;
            }
            if (!self->state.registered) return;
            self->state.registered = false;
            reach_supervisor(self);
          },
          [self](const caf::error& err) {
            // A late answer is no loss; a supervisor that is gone is told by its monitor.
            logger("node")->debug("heartbeat not answered: {}", self->system().render(err));
          });
}

}  // namespace troupe::actors::node_parts
