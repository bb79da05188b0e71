#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/keep_alive.hpp"

namespace troupe::actors::links {

namespace {

/// Turns reports of the transport into messages, on the thread that made the progress. Frames are
/// decoded here: one that does not decode breaks the link before any actor sees it. Keep-alive
/// questions are answered here, too.
class transport_sink final : public transport::link_sink {
 public:
  struct settings {
    /// The peer's process itself acknowledges each batch that succeeds.
    bool acknowledged{false};
    bool polls{false};  ///< this process answers while its engine polls
  };
  transport_sink(std::function<void(link_event)> reporter, std::uint64_t generation, settings with,
                 std::shared_ptr<signs_of_life> ear)
      : reporter_{std::move(reporter)},
        generation_{generation},
        with_{with},
        ear_{std::move(ear)} {}

  /// Sets the link that answers go over. Called before the link connects.
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
    reporter_(link_event{generation_, std::forward<What>(what)});
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
    // If the answer cannot be sent now, the peer asks again.
    if (link) (void)link->send_frame(encode(keep_alive{keep_alive::word::answer, with_.polls}));
  }

  std::function<void(link_event)> reporter_;
  std::uint64_t generation_;
  settings with_;
  std::shared_ptr<signs_of_life> ear_;
  std::weak_ptr<transport::link> link_;
};

/// Whether the message asks for an answer.
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

link_handle peer_link::handle() const {
  return {peer_.name,  incarnation{peer_.incarnation},       peer_layout_, around_.this_end(),
          generation_, std::string{to_string(choice_.kind)}, around_.id()};
}

result<void> peer_link::open_transport() {
  transport::link_options options;
  options.role = role_;
  options.peer = incarnation{peer_.incarnation};
  options.lanes = context_->settings.lanes;
  options.post_batch_size = context_->settings.post_batch_size;
  options.connect_timeout = context_->settings.connect_timeout;
  ++generation_;
  ear_ = std::make_shared<signs_of_life>();
  transport_sink::settings with;
  // Completions of the other backends say only what our own processor or our own NIC has done.
  with.acknowledged = choice_.kind == transport::backend_kind::tcp;
  with.polls = context_->polled;
  const auto sink = std::make_shared<transport_sink>(around_.reporter(), generation_, with, ear_);
  auto opened = context_->endpoint->open(choice_.kind, options, sink);
  if (!opened) return fail(opened.error());
  link_ = std::move(*opened);
  sink->bind(link_);
  return {};
}

bool means_broken(const troupe::error& why) {
  return why.code == errc::link_broken || why.code == errc::peer_lost;
}

// -- what the transport reports

void peer_link::on_link_came_up() {
  if (phase_ != phase::connecting) return;
  phase_ = phase::up;
  up_since_ = around_.now();
  count_.is_up();
  const bool again = broke_.has_value();
  if (again) ++rebuilds_;
  broke_.reset();
  logger("link")->info("link to {} ({:016x}) is up {}over {}: {}", peer_.name, peer_.incarnation,
                       again ? "again " : "", transport::to_string(choice_.kind), choice_.reason);
  around_.tell_runner({link_ready{handle()}});
  if (again) resume_sessions();
  introduce();
  pulse_.begin(around_.now());
  watch();
}

void peer_link::on_session_message(session_message message) {
  // Sessions were told that the link is lost, the runner that it is gone: no message may follow.
  if (phase_ == phase::ending) return;
  const auto route = route_of(message);
  // The peer repeats a request that has ended here: its last word was lost with the former link.
  if (rebuilds_ > 0 && is_request(message) && resend_final_messages(route)) return;
  if (const auto found = sessions_.find(route); found != sessions_.end()) {
    around_.tell_session(route, found->second, {std::move(message)});
  } else {
    around_.tell_runner({unrouted_message{handle(), std::move(message)}});
  }
}

void peer_link::on_completion(transport::completion done) {
  const auto found = batches_.find(done.id.value);
  if (found == batches_.end()) return;
  done.id = found->second;
  batches_.erase(found);
  if (done.failure && means_broken(*done.failure)) {
    // The first failure is the outcome of a session, which must hear that the peer is lost, not
    // that a batch failed.
    on_link_broke(link_broke{std::move(*done.failure)});
    return;
  }
  const auto transfer = done.transfer;
  to_session(transfer, session_event{std::move(done)});
  post_waiting();
}

void peer_link::on_fence_holds(const fence_holds& fence) {
  for (auto& former : former_) {
    if (former.generation == fence.generation) former.pending.erase(fence.transfer);
  }
  std::erase_if(former_, [](const auto& former) { return former.pending.empty(); });
  const auto asked = fencing_.find(fence.transfer);
  if (asked == fencing_.end()) return;
  asked->second.erase(fence.generation);
  if (!asked->second.empty()) return;
  fencing_.erase(asked);
  to_session(fence.transfer, session_event{transfer_fenced{}});
  serve_room();
}

void peer_link::on_link_broke(link_broke broke) {
  switch (phase_) {
    case phase::dialling:
    case phase::connecting:
      if (!link_) return;  // the attempt was given up already
      if (role_ == transport::link_role::initiator) {
        // Before the link is up, the transport cannot tell whether the peer is lost.
        if (broke.why.code == errc::peer_lost) broke.why.code = errc::link_broken;
        // The offer came from the peer itself. It is refused if the peer no longer waits for us,
        // since this attempt took too long, or if another process answers at the peer's address.
        // The next attempt has another offer.
        if (broke.why.code == errc::unauthorized) broke.why.code = errc::link_broken;
        backend_failed(broke.why);
      } else if (broke_) {
        phase_ = phase::dialling;
        drop_transport();
        wait_for_dialler();
      } else {
        end_link(std::move(broke.why));
      }
      return;
    case phase::up: break_link(broke.why); return;
    case phase::ending: return;
  }
}

}  // namespace troupe::actors::links
