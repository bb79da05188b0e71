#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/sec.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace troupe::actors::link_parts {

namespace {

/// Before the first repetition; doubled with each.
constexpr auto first_pause = std::chrono::milliseconds{20};

/// To make a link again every attempt takes its `connect_timeout`, also one that fails at once: what
/// broke it may take a while to be mended. A peer that has died is heard of meanwhile.
std::chrono::milliseconds pause_before_next(const link_state& st) {
  const std::chrono::milliseconds pause = first_pause * (1u << std::min(st.attempts, 6u));
  if (!st.broke) return pause;
  const auto rest = st.attempt_began + st.context->settings.connect_timeout - now();
  return std::max(pause, std::chrono::duration_cast<std::chrono::milliseconds>(rest));
}

/// Whether another backend could help after this refusal.
bool worth_another_backend(errc code) {
  switch (code) {
    case errc::backend_unavailable:
    case errc::no_device:
    case errc::peer_unreachable:
    case errc::link_broken:
    case errc::deadline:
    case errc::overloaded:
    case errc::internal: return true;
    case errc::invalid_config:
    case errc::layout_mismatch:
    case errc::version_mismatch:
    case errc::unknown_region:
    case errc::out_of_range:
    case errc::grant_revoked:
    case errc::pool_exhausted:
    case errc::not_found:
    case errc::already_exists:
    case errc::peer_lost:
    case errc::aborted:
    case errc::lease_expired:
    case errc::stale_incarnation:
    case errc::unauthorized: return false;
  }
  return false;
}

bool was_given_up(const link_state& st, transport::backend_kind kind) {
  return std::ranges::find(st.failed, kind, &link_state::failed_backend::kind) != st.failed.end();
}

/// The membership says where the peer is, the acceptor's reply on which GPUs its cache is, and each
/// side refuses what it cannot reach. `auto` leaves out what is unusable here or cannot join the two,
/// and asks for the others in order of preference.
std::optional<transport::backend_kind> next_kind(const link_state& st) {
  const auto& settings = st.context->settings;
  const auto tried = [&](transport::backend_kind kind) { return was_given_up(st, kind); };
  if (settings.backend) {
    if (!tried(*settings.backend)) return settings.backend;
  } else {
    for (const auto& here : st.context->endpoint->backends()) {  // the best comes first
      if (here.state.usable && !tried(here.kind) && !in_the_way(st, here.kind)) {
        return here.kind;
      }
    }
  }
  for (const auto kind : settings.fallback) {
    if (!settings.backend && in_the_way(st, kind)) continue;
    if (!tried(kind)) return kind;
  }
  return std::nullopt;
}

/// "; xgmi failed: no answer; shm failed: another host"
std::string failures(const link_state& st) {
  std::string text;
  for (const auto& failed : st.failed) {
    text += "; " + std::string{transport::to_string(failed.kind)} + " failed: " + failed.why;
  }
  return text;
}

/// "; xgmi: not built; shm: another host": what `auto` asks nobody for.
std::string left_out(const link_state& st) {
  std::string text;
  for (const auto& other : st.context->endpoint->backends()) {
    const auto name = "; " + std::string{transport::to_string(other.kind)} + ": ";
    if (!other.state.usable) {
      text += name;
      // What to do about it is for whoever asks `troupe info`.
      text += without_advice(other.state.reason);
    } else if (const auto why = in_the_way(st, other.kind); why && !was_given_up(st, other.kind)) {
      text += name + why->message;
    }
  }
  return text;
}

std::string reason_for(const link_state& st, transport::backend_kind kind) {
  if (st.context->settings.backend == kind) return "configured" + failures(st);
  return "best that both sides can use" + failures(st) + left_out(st);
}

/// What the caller reads when no backend is left.
troupe::error none_joins(const link_state& st) {
  const bool automatic = !st.context->settings.backend;
  return {errc::peer_unreachable, "no backend joins this node with " + st.peer.name + failures(st) +
                                      (automatic ? left_out(st) : "")};
}

troupe::error no_answer(self_pointer self, const caf::error& err) {
  return {errc::peer_unreachable, self->state.peer.name + " did not answer the link request (" +
                                      self->system().render(err) + ")"};
}

/// The next request goes to the node, which makes another end.
void part_from_other_end(self_pointer self, const std::string& why) {
  auto& st = self->state;
  self->demonitor(st.other_end.address());
  self->send(st.other_end, link_notice{link_fate::ended, why});
  st.other_end = nullptr;
}

/// The acceptor of an attempt that came to nothing need not wait until its time is over. The next
/// attempt has one of its own. One that may have gone up has sessions, perhaps, and is asked again.
void turn_away(self_pointer self, const std::string& why) {
  const auto& st = self->state;
  if (!st.broke && !st.may_be_up_there && st.other_end) part_from_other_end(self, why);
}

void got_reply(self_pointer self, const link_reply& reply) {
  auto& st = self->state;
  if (reply.failed != 0) {
    backend_failed(self, refusal(reply));
    return;
  }
  auto fits = adopt_layout(st, reply.layout);
  if (fits) fits = adopt_gpus(st, reply.gpus);
  if (!fits) {
    end_link(self, fits.error());
    return;
  }
  if (auto joined = judge(st, reply.gpus); !joined) {
    backend_failed(self, joined.error());
    return;
  }
  const transport::link_offer offer{st.choice.kind, incarnation{st.peer.incarnation},
                                    from_bytes(reply.offer)};
  st.now = link_state::phase::connecting;
  st.may_be_up_there = true;
  if (auto started = st.link->connect(offer); !started) backend_failed(self, started.error());
}

/// What an attempt hears late is neither for the pause behind it nor for the next one, which may be over
/// another backend.
auto over_with(self_pointer self) {
  return [self, attempt = self->state.generation] {
    const auto& st = self->state;
    return st.generation != attempt || st.now != link_state::phase::dialling || !st.link;
  };
}

/// For the attempt whose transport is open.
link_request request_of(const link_state& st) {
  link_request request;
  request.cluster = st.context->settings.cluster;
  request.from = st.context->self;
  request.to_incarnation = st.peer.incarnation;
  const auto registered = st.context->registration.last();
  request.supervisor_incarnation = registered.supervisor_incarnation;
  request.registered_epoch = registered.epoch;
  request.backend = static_cast<std::uint8_t>(st.choice.kind);
  request.lanes = st.context->settings.lanes;
  request.gpus = cache_gpus(*st.context);
  request.offer = to_bytes(st.link->offer().payload);
  request.layout = to_bytes(st.context->encoded_layout);
  request.reason = st.choice.reason;
  return request;
}

void ask_node(self_pointer self) {
  const auto& st = self->state;
  const auto is_over = over_with(self);
  self->request(st.peer_node, st.context->settings.connect_timeout, request_of(st))
      .then(
          [self, is_over](const link_reply& reply) {
            if (is_over()) return;
            if (reply.failed == 0) meet(self, self->current_sender());
            got_reply(self, reply);
          },
          [self, is_over](const caf::error& err) {
            if (!is_over()) end_link(self, no_answer(self, err));
          });
}

/// The actor of the peer's end, not its node: the link stays the same for both sides' sessions.
void ask_other_end(self_pointer self) {
  const auto& st = self->state;
  const auto is_over = [self, over = over_with(self), end = st.other_end.address()] {
    return over() || self->state.other_end.address() != end;
  };
  const auto may_have_another = [self] { return !self->state.broke && !self->state.leaving; };
  self->request(st.other_end, st.context->settings.connect_timeout, request_of(st))
      .then(
          [self, is_over, may_have_another](const link_reply& reply) {
            if (is_over()) return;
            self->state.unanswered = false;
            const bool ends = reply.failed == static_cast<std::uint8_t>(errc::peer_lost);
            if (ends && may_have_another()) {
              ask_node_instead(self);
            } else {
              got_reply(self, reply);
            }
          },
          [self, is_over, may_have_another](const caf::error& err) {
            if (is_over()) return;
            const bool late = err == caf::sec::request_timeout;
            if (!late && may_have_another()) {
              ask_node_instead(self);
            } else if (late && may_have_another() && std::exchange(self->state.unanswered, true)) {
              end_link(self, no_answer(self, err));  // as where the node does not answer
            } else {
              backend_failed(self, no_answer(self, err));
            }
          });
}

void try_next_backend(self_pointer self) {
  auto& st = self->state;
  const auto kind = next_kind(st);
  if (!kind) {
    if (st.broke) {
      end_link(self, given_up(st, {errc::link_broken, st.why_ended}));
      return;
    }
    end_link(self, none_joins(st));
    return;
  }
  st.choice = {*kind, reason_for(st, *kind)};
  st.chose = true;
  st.attempt_began = now();
  if (st.broke) ++st.tries;
  if (const auto why = in_the_way(st, *kind)) {
    backend_failed(self, *why);
    return;
  }
  if (auto opened = open_transport(self); !opened) {
    backend_failed(self, opened.error());
    return;
  }
  if (st.other_end) {
    ask_other_end(self);
  } else {
    ask_node(self);
  }
}

/// Of who it is that cannot be reached: the sentence names only the address.
/// A member speaks our version, or it would be none: whoever speaks another has the port of a process
/// that is gone.
troupe::error unreachable(const node_info& peer, const troupe::error& why) {
  return {why.code == errc::unauthorized ? why.code : errc::peer_unreachable,
          "cannot reach " + peer.name + " at " + peer.host + ":" + std::to_string(peer.port) +
              " (" + why.message + ")"};
}

}  // namespace

void ask_node_instead(self_pointer self) {
  part_from_other_end(self, "it ends already");
  ask_node(self);
}

time_point now() {
  return std::chrono::steady_clock::now();
}

void backend_failed(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  if (st.now == link_state::phase::ending) return;
  if (st.leaving) {
    end_link(self, *st.leaving);
    return;
  }
  if (st.link) {
    st.link->close();
    st.link.reset();
  }
  if (!worth_another_backend(why.code)) {
    end_link(self, st.broke ? given_up(st, why) : why);
    return;
  }
  // The sentence of the last failure is what the caller reads if nothing else is left.
  st.why_ended = to_string(why);
  st.now = link_state::phase::dialling;
  turn_away(self, st.why_ended);
  // What cannot be used here or there will not be usable in a moment either, and the peer does not
  // wait for ever. But a link that was up may find its port up again.
  const bool hopeless =
      why.code == errc::backend_unavailable || (!st.broke && why.code == errc::no_device);
  const bool again = !hopeless && st.attempts < st.context->settings.max_reconnects;
  logger("link")->warn("link to {} over {} failed: {}; {}", st.peer.name,
                       transport::to_string(st.choice.kind), st.why_ended,
                       again ? "trying again" : "giving this backend up");
  if (again) {
    const auto pause = pause_before_next(st);
    ++st.attempts;
    self->delayed_send(self, pause, link_command{dial_again{}});
    return;
  }
  st.failed.push_back({st.choice.kind, st.why_ended});
  st.attempts = 0;
  try_next_backend(self);
}

void dial(self_pointer self) {
  auto& st = self->state;
  reach<node_actor>(self, st.peer.host, st.peer.port, st.context->settings.connect_timeout)
      .then(
          [self](const reached& answer) {
            auto& state = self->state;
            if (state.now == link_state::phase::ending) return;
            if (answer.failed) {
              end_link(self, unreachable(state.peer, *answer.failed));
              return;
            }
            state.peer_node = caf::actor_cast<node_actor>(answer.actor);
            self->monitor(state.peer_node);
            try_next_backend(self);
          },
          [self](const caf::error& err) {
            end_link(self, unreachable(self->state.peer,
                                       {errc::peer_unreachable, self->system().render(err)}));
          });
}

void on_dial_again(self_pointer self) {
  const auto& st = self->state;
  if (st.now != link_state::phase::dialling || st.link || st.leaving) return;
  if (st.peer_node) {
    try_next_backend(self);
  } else {
    dial(self);
  }
}

}  // namespace troupe::actors::link_parts
