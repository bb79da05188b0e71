#include "troupe/actors/link.hpp"

#include <algorithm>
#include <chrono>
#include <set>
#include <string_view>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/io/middleman.hpp>
#include <caf/io/middleman_actor.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/system.hpp"

namespace troupe::actors {

namespace {

using self_pointer = link_actor::stateful_pointer<link_state>;

time_point now() {
  return std::chrono::steady_clock::now();
}

/// Turns what the transport reports into messages, on the thread that made the progress. A frame is
/// decoded here: what does not decode breaks the link before any actor sees it.
class transport_sink final : public transport::link_sink {
 public:
  transport_sink(link_actor target, std::uint64_t generation)
      : target_{std::move(target)}, generation_{generation} {}

  void on_up() override { report(link_came_up{}); }
  void on_completion(transport::completion done) override { report(std::move(done)); }
  void on_frame(std::span<const std::byte> frame) override {
    auto message = decode(frame);
    if (message) {
      report(std::move(*message));
    } else {
      report(link_broke{message.error()});
    }
  }
  void on_quiescent(transfer_id transfer) override { report(fence_holds{transfer}); }
  void on_broken(troupe::error why) override { report(link_broke{std::move(why)}); }

 private:
  template <class What>
  void report(What&& what) {
    tell(target_, link_event{generation_, std::forward<What>(what)});
  }

  link_actor target_;
  std::uint64_t generation_;
};

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

bytes to_bytes(std::span<const std::byte> from) {
  bytes to(from.size());
  std::ranges::transform(from, to.begin(),
                         [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  return to;
}

std::vector<std::byte> from_bytes(const bytes& from) {
  std::vector<std::byte> to(from.size());
  std::ranges::transform(from, to.begin(), [](std::uint8_t b) { return std::byte{b}; });
  return to;
}

void report_gone(self_pointer self, troupe::error why) {
  auto& st = self->state;
  tell(st.port, port_event{link_gone{st.peer.name, st.peer.incarnation, self->id(),
                                     st.role == transport::link_role::initiator, std::move(why)}});
}

void finish_if_idle(self_pointer self) {
  auto& st = self->state;
  if (st.now != link_state::phase::ending || !st.sessions.empty()) return;
  if (st.link) st.link->close();
  st.link.reset();
  self->quit();
}

void end_link(self_pointer self, troupe::error why) {
  auto& st = self->state;
  if (st.now == link_state::phase::ending) return;
  const bool was_up = st.now == link_state::phase::up;
  st.now = link_state::phase::ending;
  st.why_ended = to_string(why);
  st.lost = why;
  if (was_up) st.context->counters.links_up.fetch_sub(1);
  logger("link")->info("link to {} ({:016x}) over {} ended: {}", st.peer.name, st.peer.incarnation,
                       transport::to_string(st.choice.kind), st.why_ended);
  if (st.link) st.link->close();
  for (const auto& [transfer, session] : st.sessions) {
    tell(session, session_event{link_is_lost{why}});
  }
  report_gone(self, std::move(why));
  finish_if_idle(self);
}

result<void> adopt_layout(link_state& st, const bytes& encoded) {
  if (encoded.empty()) return {};
  auto layout = kvcache::decode(from_bytes(encoded));
  if (!layout) return fail(layout.error());
  if (st.context->layout) {
    if (auto fits = kvcache::check_compatible(*st.context->layout, *layout); !fits) return fits;
  }
  st.peer_layout = std::make_shared<const kvcache::cache_layout>(std::move(*layout));
  return {};
}

/// Opens a transport link of the chosen kind with a sink that reports to this actor.
result<void> open_transport(self_pointer self) {
  auto& st = self->state;
  transport::link_options options;
  options.role = st.role;
  options.peer = incarnation{st.peer.incarnation};
  options.lanes = st.context->settings.lanes;
  options.post_batch_size = st.context->settings.post_batch_size;
  options.connect_timeout = st.context->settings.connect_timeout;
  ++st.generation;
  auto opened = st.context->endpoint->open(
      st.choice.kind, options,
      std::make_shared<transport_sink>(caf::actor_cast<link_actor>(self), st.generation));
  if (!opened) return fail(opened.error());
  st.link = std::move(*opened);
  return {};
}

transport::host_identity identity_of(const link_request& request) {
  return {request.boot_id, request.network_namespace, request.pid_namespace, request.pid,
          request.uid};
}

// -- the dialling side

/// How long a link whose peer has left is read on.
constexpr auto last_words = std::chrono::milliseconds{300};
/// Before the first repetition; doubled with each.
constexpr auto first_pause = std::chrono::milliseconds{20};

void try_next_backend(self_pointer self);

void backend_failed(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  if (st.now == link_state::phase::ending) return;
  if (st.link) {
    st.link->close();
    st.link.reset();
  }
  if (!worth_another_backend(why.code)) {
    end_link(self, why);
    return;
  }
  // The sentence of the last failure is what the caller reads if nothing else is left.
  st.why_ended = to_string(why);
  st.now = link_state::phase::dialling;
  // What cannot be used here or there will not be usable in a moment either.
  const bool hopeless = why.code == errc::backend_unavailable || why.code == errc::no_device;
  const bool again = !hopeless && st.attempts < st.context->settings.max_reconnects;
  logger("link")->warn("link to {} over {} failed: {}; {}", st.peer.name,
                       transport::to_string(st.choice.kind), st.why_ended,
                       again ? "trying again" : "giving this backend up");
  if (again) {
    const auto pause = first_pause * (1u << std::min(st.attempts, 6u));
    ++st.attempts;
    self->delayed_send(self, pause, link_command{dial_again{}});
    return;
  }
  st.failed.push_back(st.choice.kind);
  st.attempts = 0;
  try_next_backend(self);
}

/// Identities travel in the request and the acceptor refuses what cannot reach it. So the dialling
/// side only leaves out what is unusable here, and asks in order of preference.
std::optional<transport::backend_kind> next_kind(const link_state& st) {
  const auto& settings = st.context->settings;
  const auto tried = [&](transport::backend_kind kind) {
    return std::ranges::find(st.failed, kind) != st.failed.end();
  };
  if (settings.backend) {
    if (!tried(*settings.backend)) return settings.backend;
  } else {
    for (const auto kind : {transport::backend_kind::xgmi, transport::backend_kind::shm,
                            transport::backend_kind::rdma, transport::backend_kind::tcp}) {
      const auto all = st.context->endpoint->backends();
      const auto found = std::ranges::find(all, kind, &transport::backend_status::kind);
      if (found != all.end() && found->state.usable && !tried(kind)) return kind;
    }
  }
  for (const auto kind : settings.fallback) {
    if (!tried(kind)) return kind;
  }
  return std::nullopt;
}

std::string reason_for(const link_state& st, transport::backend_kind kind) {
  std::string reason =
      st.context->settings.backend == kind ? "configured" : "best that both sides can use";
  for (const auto failed : st.failed) {
    reason += "; ";
    reason += transport::to_string(failed);
    reason += " failed: ";
    reason += st.why_ended;
  }
  if (st.context->settings.backend != kind) {
    for (const auto& other : st.context->endpoint->backends()) {
      if (!other.state.usable) {
        reason += "; ";
        reason += transport::to_string(other.kind);
        reason += ": " + other.state.reason;
      }
    }
  }
  return reason;
}

void got_reply(self_pointer self, const link_reply& reply) {
  auto& st = self->state;
  if (st.now != link_state::phase::dialling || !st.link) return;
  if (reply.failed != 0) {
    const auto code = is_errc(reply.failed) ? static_cast<errc>(reply.failed) : errc::internal;
    backend_failed(self, {code, reply.sentence});
    return;
  }
  if (auto fits = adopt_layout(st, reply.layout); !fits) {
    end_link(self, fits.error());
    return;
  }
  const transport::link_offer offer{st.choice.kind, incarnation{st.peer.incarnation},
                                    from_bytes(reply.offer)};
  st.now = link_state::phase::connecting;
  if (auto started = st.link->connect(offer); !started) backend_failed(self, started.error());
}

void try_next_backend(self_pointer self) {
  auto& st = self->state;
  const auto kind = next_kind(st);
  if (!kind) {
    end_link(self, {errc::peer_unreachable,
                    "no backend joins this node with " + st.peer.name +
                        (st.why_ended.empty() ? std::string{} : "; last: " + st.why_ended)});
    return;
  }
  st.choice = {*kind, reason_for(st, *kind)};
  if (auto opened = open_transport(self); !opened) {
    backend_failed(self, opened.error());
    return;
  }
  const auto identity = st.context->endpoint->identity();
  link_request request;
  request.cluster = st.context->settings.cluster;
  request.from = st.context->self;
  request.to_incarnation = st.peer.incarnation;
  request.backend = static_cast<std::uint8_t>(*kind);
  request.lanes = st.context->settings.lanes;
  request.boot_id = identity.boot_id;
  request.network_namespace = identity.network_namespace;
  request.pid_namespace = identity.pid_namespace;
  request.pid = identity.pid;
  request.uid = identity.uid;
  request.offer = to_bytes(st.link->offer().payload);
  request.layout = to_bytes(st.context->encoded_layout);
  request.reason = st.choice.reason;
  self->request(st.peer_node, st.context->settings.connect_timeout, std::move(request))
      .then([self](const link_reply& reply) { got_reply(self, reply); },
            [self](const caf::error& err) {
              end_link(self, {errc::peer_unreachable, self->state.peer.name +
                                                          " did not answer the link request (" +
                                                          self->system().render(err) + ")"});
            });
}

void dial(self_pointer self) {
  auto& st = self->state;
  auto middleman = self->system().middleman().actor_handle();
  self->request(middleman, st.context->settings.connect_timeout, caf::connect_atom::value,
                st.peer.host, st.peer.port)
      .then(
          [self](const caf::node_id&, const caf::strong_actor_ptr& found,
                 const std::set<std::string>& interface) {
            auto& state = self->state;
            if (state.now == link_state::phase::ending) return;
            if (!found ||
                !self->system().assignable(interface, self->system().message_types<node_actor>())) {
              end_link(self, {errc::peer_unreachable, "what listens at " + state.peer.host + ":" +
                                                          std::to_string(state.peer.port) +
                                                          " is no Troupe node"});
              return;
            }
            state.peer_node = caf::actor_cast<node_actor>(found);
            self->monitor(state.peer_node);
            try_next_backend(self);
          },
          [self](const caf::error& err) {
            auto& state = self->state;
            if (was_cut_by_keep_alive(err) && now() < state.dial_until) {
              const auto pause = std::exchange(state.dial_pause, state.dial_pause * 2);
              self->delayed_send(self, pause, link_command{dial_again{}});
              return;
            }
            end_link(self, {errc::peer_unreachable, "cannot reach " + state.peer.name + " at " +
                                                        state.peer.host + ":" +
                                                        std::to_string(state.peer.port) + " (" +
                                                        self->system().render(err) + ")"});
          });
}

// -- the accepting side

link_reply refusal(self_pointer self, troupe::error why) {
  link_reply reply;
  reply.failed = static_cast<std::uint8_t>(why.code);
  reply.sentence = why.message;
  end_link(self, std::move(why));
  return reply;
}

link_reply accept(self_pointer self, const link_request& request) {
  auto& st = self->state;
  if (st.link) return refusal(self, {errc::internal, "this link was accepted before"});
  const auto kind = static_cast<transport::backend_kind>(request.backend);
  auto chosen = st.context->endpoint->choose(identity_of(request), kind);
  if (!chosen) return refusal(self, chosen.error());
  st.choice = {chosen->kind, request.reason};
  if (auto fits = adopt_layout(st, request.layout); !fits) return refusal(self, fits.error());
  if (auto opened = open_transport(self); !opened) return refusal(self, opened.error());
  const transport::link_offer offer{kind, incarnation{request.from.incarnation},
                                    from_bytes(request.offer)};
  link_reply reply;
  reply.offer = to_bytes(st.link->offer().payload);
  reply.layout = to_bytes(st.context->encoded_layout);
  st.now = link_state::phase::connecting;
  if (auto started = st.link->connect(offer); !started) return refusal(self, started.error());
  return reply;
}

// -- what sessions ask

void to_session(link_state& st, transfer_id transfer, session_event event) {
  if (const auto found = st.sessions.find(transfer); found != st.sessions.end()) {
    tell(found->second, std::move(event));
  }
}

/// What a session is told that comes to a link which cannot be used any more.
troupe::error not_up(const link_state& st) {
  if (st.lost) return *st.lost;
  return {errc::peer_lost, "the link to " + st.peer.name + " is not up"};
}

/// Whether a failure is one of the whole link, not of what was asked of it.
bool means_broken(const troupe::error& why) {
  return why.code == errc::link_broken || why.code == errc::peer_lost;
}

void happened(self_pointer self, link_broke broke);

result<void> fill_grants(link_state& st, say& order) {
  std::vector<transport::remote_grant> given;
  for (auto& wish : order.grants) {
    auto grant =
        st.link->grant(wish.region, std::move(wish.extents), wish.rights, route_of(order.message));
    if (!grant) return fail(grant.error());
    given.push_back(std::move(*grant));
  }
  if (given.empty()) return {};
  if (auto* request = std::get_if<transfer_request>(&order.message)) {
    request->grants = std::move(given);
  } else if (auto* offer = std::get_if<transfer_offer>(&order.message)) {
    offer->grants = std::move(given);
  } else if (auto* put = std::get_if<store_put>(&order.message)) {
    put->source = std::move(given.front());
  } else if (auto* reply = std::get_if<store_reply>(&order.message)) {
    reply->source = std::move(given.front());
  }
  return {};
}

void carry_out(self_pointer self, say order) {
  auto& st = self->state;
  const auto transfer = route_of(order.message);
  if (st.now != link_state::phase::up) {
    to_session(st, transfer, session_event{link_is_lost{not_up(st)}});
    return;
  }
  auto outcome = [&]() -> result<void> {
    if (auto filled = fill_grants(st, order); !filled) return filled;
    auto frame = encode(order.message);
    if (!frame) return fail(frame.error());
    return st.link->send_frame(*frame);
  }();
  if (outcome) return;
  if (means_broken(outcome.error())) {
    happened(self, link_broke{outcome.error()});
  } else {
    to_session(st, transfer, session_event{engine_aborts{outcome.error()}});
  }
}

void carry_out(self_pointer self, post_batch order) {
  auto& st = self->state;
  const auto transfer = order.work.transfer;
  const auto session_id = order.work.id;
  if (st.now != link_state::phase::up) {
    to_session(st, transfer, session_event{link_is_lost{not_up(st)}});
    return;
  }
  const auto id = st.next_batch++;
  st.batches.emplace(id, session_id);
  order.work.id = transport::batch_id{id};
  const auto posted = st.link->post(std::move(order.work));
  if (posted) return;
  st.batches.erase(id);
  if (means_broken(posted.error())) {
    happened(self, link_broke{posted.error()});
  } else {
    to_session(st, transfer,
               session_event{transport::completion{session_id, transfer, posted.error(), 0, {}}});
  }
}

void carry_out(self_pointer self, const fence_now& order) {
  auto& st = self->state;
  if (!st.link || st.link->fence(order.transfer) == transport::fence_state::quiescent) {
    to_session(st, order.transfer, session_event{transfer_is_quiescent{}});
  }
}

void carry_out(self_pointer self, attach_session order) {
  auto& st = self->state;
  if (st.now != link_state::phase::up) {
    tell(order.session, session_event{link_is_lost{not_up(st)}});
  }
  st.sessions.emplace(order.transfer, std::move(order.session));
}

void carry_out(self_pointer self, const detach_session& order) {
  self->state.sessions.erase(order.transfer);
  finish_if_idle(self);
}

void carry_out(self_pointer self, const dial_again&) {
  if (self->state.now != link_state::phase::dialling || self->state.link) return;
  if (self->state.peer_node) {
    try_next_backend(self);
  } else {
    dial(self);
  }
}

void carry_out(self_pointer self, close_link order) {
  end_link(self, std::move(order.why));
}

/// What the peer said last may still be on its way through the link, a release above all: the
/// transport reads it out before it says that the link broke. The pause is for a peer that stands
/// still, of which the transport hears nothing.
void carry_out(self_pointer self, peer_left order) {
  if (self->state.now != link_state::phase::up) {
    end_link(self, std::move(order.why));
    return;
  }
  self->delayed_send(self, last_words, link_command{close_link{std::move(order.why)}});
}

// -- what the transport reports

void happened(self_pointer self, const link_came_up&) {
  auto& st = self->state;
  if (st.now != link_state::phase::connecting) return;
  st.now = link_state::phase::up;
  st.context->counters.links_up.fetch_add(1);
  logger("link")->info("link to {} ({:016x}) is up over {}: {}", st.peer.name, st.peer.incarnation,
                       transport::to_string(st.choice.kind), st.choice.reason);
  tell(st.port, port_event{link_ready{{st.peer.name, incarnation{st.peer.incarnation},
                                       st.peer_layout, caf::actor_cast<link_actor>(self)}}});
}

void happened(self_pointer self, session_message message) {
  auto& st = self->state;
  // Sessions were told that the link is lost, and the port that it is gone: nothing may follow.
  if (st.now == link_state::phase::ending) return;
  const auto route = route_of(message);
  if (const auto found = st.sessions.find(route); found != st.sessions.end()) {
    tell(found->second, session_event{std::move(message)});
  } else {
    tell(st.port, port_event{link_message{{st.peer.name, incarnation{st.peer.incarnation},
                                           st.peer_layout, caf::actor_cast<link_actor>(self)},
                                          std::move(message)}});
  }
}

void happened(self_pointer self, transport::completion done) {
  auto& st = self->state;
  const auto found = st.batches.find(done.id.value);
  if (found == st.batches.end()) return;
  done.id = found->second;
  st.batches.erase(found);
  if (done.failure && means_broken(*done.failure)) {
    // The first failure is a session's outcome: it hears that the peer is lost, not that a batch
    // failed.
    happened(self, link_broke{std::move(*done.failure)});
    return;
  }
  const auto transfer = done.transfer;
  to_session(st, transfer, session_event{std::move(done)});
}

void happened(self_pointer self, const fence_holds& fence) {
  to_session(self->state, fence.transfer, session_event{transfer_is_quiescent{}});
}

void happened(self_pointer self, link_broke broke) {
  auto& st = self->state;
  switch (st.now) {
    case link_state::phase::dialling:
    case link_state::phase::connecting:
      if (st.role == transport::link_role::initiator) {
        backend_failed(self, broke.why);
      } else {
        end_link(self, std::move(broke.why));
      }
      return;
    case link_state::phase::up:
      // To its users a broken link is a lost peer: whether the process lives is not known here, and
      // the next operation makes a new link if it does.
      end_link(self, {errc::peer_lost,
                      "the link to " + st.peer.name + " broke (" + to_string(broke.why) + ")"});
      return;
    case link_state::phase::ending: return;
  }
}

link_report report(const link_state& st) {
  link_report r;
  r.peer = st.peer.name;
  r.peer_incarnation = st.peer.incarnation;
  r.backend = std::string{transport::to_string(st.choice.kind)};
  r.reason = st.choice.reason;
  switch (st.now) {
    case link_state::phase::dialling:
    case link_state::phase::connecting: r.state = "connecting"; break;
    case link_state::phase::up: r.state = "up"; break;
    case link_state::phase::ending: r.state = "broken"; break;
  }
  if (st.link) {
    const auto stats = st.link->stats();
    r.lanes = stats.lanes;
    r.bytes_out = stats.bytes_out;
    r.bytes_in = stats.bytes_in;
    r.in_flight = stats.in_flight;
    r.refused = stats.refused;
  }
  return r;
}

}  // namespace

link_actor::behavior_type link_behavior(link_actor::stateful_pointer<link_state> self,
                                        link_options options) {
  set_log_handlers(*self, "link");
  auto& st = self->state;
  st.context = std::move(options.context);
  st.port = std::move(options.port);
  st.peer = std::move(options.peer);
  st.role = options.role;
  self->set_down_handler([self](const caf::down_msg&) {
    carry_out(self,
              peer_left{{errc::peer_lost, "the process of " + self->state.peer.name + " is gone"}});
  });
  st.dial_until = now() + st.context->settings.connect_timeout;
  if (st.role == transport::link_role::initiator) dial(self);
  return {
      [self](link_command& command) {
        std::visit([self](auto& order) { carry_out(self, std::move(order)); }, command.what);
      },
      [self](link_event& event) {
        if (event.generation != self->state.generation) return;
        std::visit([self](auto& what) { happened(self, std::move(what)); }, event.what);
      },
      [self](const link_request& request) { return accept(self, request); },
      [self](report_atom) { return report(self->state); },
  };
}

}  // namespace troupe::actors
