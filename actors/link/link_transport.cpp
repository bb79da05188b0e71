#include <atomic>
#include <memory>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/keep_alive.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::link_parts {

namespace {

/// Turns what the transport reports into messages, on the thread that made the progress. A frame is
/// decoded here: what does not decode breaks the link before any actor sees it. Whether we live is
/// answered here, too.
class transport_sink final : public transport::link_sink {
 public:
  struct settings {
    /// Of each batch that succeeds the peer's process itself has said so.
    bool acknowledged{false};
    bool polls{false};  ///< this process answers while its engine polls
  };
  transport_sink(link_actor target, std::uint64_t generation, settings with,
                 std::shared_ptr<signs_of_life> ear)
      : target_{std::move(target)}, generation_{generation}, with_{with}, ear_{std::move(ear)} {}

  /// Where to answer. Before the link connects.
  void bind(const std::shared_ptr<transport::link>& link) { link_ = link; }

  void on_up() override { report(link_came_up{}); }
  void on_completion(transport::completion done) override {
    if (with_.acknowledged && !done.failure) ear_->signs.fetch_add(1, std::memory_order_relaxed);
    report(std::move(done));
  }
  void on_frame(std::span<const std::byte> frame) override {
    ear_->signs.fetch_add(1, std::memory_order_relaxed);
    if (is_keep_alive(frame)) {
      hear_question(frame);
      return;
    }
    auto message = decode(frame);
    if (message) {
      report(std::move(*message));
    } else {
      report(link_broke{message.error()});
    }
  }
  void on_quiescent(transfer_id transfer) override { report(fence_holds{transfer, generation_}); }
  void on_broken(troupe::error why) override { report(link_broke{std::move(why)}); }

 private:
  template <class What>
  void report(What&& what) {
    tell(target_, link_event{generation_, std::forward<What>(what)});
  }
  void hear_question(std::span<const std::byte> frame) {
    const auto heard = decode_keep_alive(frame);
    if (!heard) {
      report(link_broke{heard.error()});
      return;
    }
    if (heard->polls) ear_->peer_polls.store(true, std::memory_order_relaxed);
    if (heard->said != keep_alive::word::question) return;
    const auto link = link_.lock();
    // One that cannot be said now is asked for again.
    if (link) (void)link->send_frame(encode(keep_alive{keep_alive::word::answer, with_.polls}));
  }

  link_actor target_;
  std::uint64_t generation_;
  settings with_;
  std::shared_ptr<signs_of_life> ear_;
  std::weak_ptr<transport::link> link_;
};

link_handle handle(self_pointer self) {
  const auto& st = self->state;
  return {st.peer.name,   incarnation{st.peer.incarnation},
          st.peer_layout, caf::actor_cast<link_actor>(self),
          st.generation,  std::string{to_string(st.choice.kind)}};
}

/// Whether it asks for an answer.
bool is_request(const session_message& message) {
  return std::holds_alternative<transfer_request>(message) ||
         std::holds_alternative<transfer_hold>(message) ||
         std::holds_alternative<transfer_forget>(message) ||
         std::holds_alternative<store_put>(message) || std::holds_alternative<store_get>(message) ||
         std::holds_alternative<store_query>(message) ||
         std::holds_alternative<store_remove>(message) ||
         std::holds_alternative<store_commit>(message);
}

}  // namespace

result<void> open_transport(self_pointer self) {
  auto& st = self->state;
  transport::link_options options;
  options.role = st.role;
  options.peer = incarnation{st.peer.incarnation};
  options.lanes = st.context->settings.lanes;
  options.post_batch_size = st.context->settings.post_batch_size;
  options.connect_timeout = st.context->settings.connect_timeout;
  ++st.generation;
  st.ear = std::make_shared<signs_of_life>();
  transport_sink::settings with;
  // The others' completions say what our own processor or our own NIC has done.
  with.acknowledged = st.choice.kind == transport::backend_kind::tcp;
  with.polls = st.context->polled;
  const auto sink = std::make_shared<transport_sink>(caf::actor_cast<link_actor>(self),
                                                     st.generation, with, st.ear);
  auto opened = st.context->endpoint->open(st.choice.kind, options, sink);
  if (!opened) return fail(opened.error());
  st.link = std::move(*opened);
  sink->bind(st.link);
  return {};
}

bool means_broken(const troupe::error& why) {
  return why.code == errc::link_broken || why.code == errc::peer_lost;
}

// -- what the transport reports

void on_link_came_up(self_pointer self) {
  auto& st = self->state;
  if (st.now != link_state::phase::connecting) return;
  st.now = link_state::phase::up;
  st.up_since = now();
  st.context->counters.links_up.fetch_add(1);
  const bool again = st.broke.has_value();
  if (again) {
    ++st.rebuilds;
    st.context->counters.links_broken.fetch_sub(1);
  }
  st.broke.reset();
  logger("link")->info("link to {} ({:016x}) is up {}over {}: {}", st.peer.name,
                       st.peer.incarnation, again ? "again " : "",
                       transport::to_string(st.choice.kind), st.choice.reason);
  tell(st.port, port_event{link_ready{handle(self)}});
  if (again) resume_sessions(st);
  introduce(st);
  st.pulse.begin(now());
  watch(self);
}

void on_session_message(self_pointer self, session_message message) {
  auto& st = self->state;
  // Sessions were told that the link is lost, and the port that it is gone: nothing may follow.
  if (st.now == link_state::phase::ending) return;
  const auto route = route_of(message);
  // Asked again for what has ended here, since the end of it was lost with the former link.
  if (st.rebuilds > 0 && is_request(message) && repeat_words(st, route)) return;
  if (const auto found = st.sessions.find(route); found != st.sessions.end()) {
    tell(found->second, session_event{std::move(message)});
  } else {
    tell(st.port, port_event{unrouted_message{handle(self), std::move(message)}});
  }
}

void on_completion(self_pointer self, transport::completion done) {
  auto& st = self->state;
  const auto found = st.batches.find(done.id.value);
  if (found == st.batches.end()) return;
  done.id = found->second;
  st.batches.erase(found);
  if (done.failure && means_broken(*done.failure)) {
    // The first failure is a session's outcome: it hears that the peer is lost, not that a batch
    // failed.
    on_link_broke(self, link_broke{std::move(*done.failure)});
    return;
  }
  const auto transfer = done.transfer;
  to_session(st, transfer, session_event{std::move(done)});
  post_waiting(self);
}

void on_fence_holds(self_pointer self, const fence_holds& fence) {
  auto& st = self->state;
  for (auto& former : st.former) {
    if (former.generation == fence.generation) former.pending.erase(fence.transfer);
  }
  std::erase_if(st.former, [](const auto& former) { return former.pending.empty(); });
  const auto asked = st.fencing.find(fence.transfer);
  if (asked == st.fencing.end()) return;
  asked->second.erase(fence.generation);
  if (!asked->second.empty()) return;
  st.fencing.erase(asked);
  to_session(st, fence.transfer, session_event{transfer_fenced{}});
  serve_room(self);
}

void on_link_broke(self_pointer self, link_broke broke) {
  auto& st = self->state;
  switch (st.now) {
    case link_state::phase::dialling:
    case link_state::phase::connecting:
      if (!st.link) return;  // of an attempt that was given up already
      if (st.role == transport::link_role::initiator) {
        // Whether the peer is lost is not for the transport to say before the link is up.
        if (broke.why.code == errc::peer_lost) broke.why.code = errc::link_broken;
        // The offer came from the peer itself. It is refused where the peer waits for us no longer, since this
        // attempt took more than its time, or where somebody else answers in the peer's place. The next attempt
        // has another offer.
        if (broke.why.code == errc::unauthorized) broke.why.code = errc::link_broken;
        backend_failed(self, broke.why);
      } else if (st.broke) {
        st.now = link_state::phase::dialling;
        retire_transport(st);
        wait_for_dialler(self);
      } else {
        end_link(self, std::move(broke.why));
      }
      return;
    case link_state::phase::up: break_link(self, broke.why); return;
    case link_state::phase::ending: return;
  }
}

}  // namespace troupe::actors::link_parts
