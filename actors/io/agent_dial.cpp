#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "troupe/io/agent_core.hpp"
#include "troupe/transport/random.hpp"

// Our connections to peers, and the links over which their memory is used. All on the loop's thread but
// what says otherwise.

namespace troupe::io {

namespace {

using clock = control_channel::clock;

/// Between two attempts that fail, doubled from the first to the last.
constexpr std::chrono::milliseconds first_pause{20};
constexpr std::chrono::milliseconds longest_pause{1000};
/// Links in a row that may fail over one backend before the next one is tried.
constexpr std::uint32_t tries_of_backend = 2;

std::chrono::milliseconds pause_after(std::uint32_t failures) {
  const auto shift = std::min<std::uint32_t>(failures, 6);
  return std::min(longest_pause, first_pause * (1 << shift));
}

/// Reports of one link.
class link_ear final : public transport::link_sink {
 public:
  link_ear(agent_core& core, std::uint64_t link) noexcept : core_{core}, link_{link} {}
  void on_up() override { core_.on_up(link_); }
  void on_completion(transport::completion done) override {
    core_.on_completion(link_, std::move(done));
  }
  void on_frame(std::span<const std::byte> frame) override { core_.on_frame(link_, frame); }
  void on_quiescent(transfer_id of) override { core_.on_quiescent(link_, of); }
  void on_broken(troupe::error why) override { core_.on_broken(link_, std::move(why)); }

 private:
  agent_core& core_;
  const std::uint64_t link_;
};

}  // namespace

std::shared_ptr<transport::link_sink> agent_core::ear_of(std::uint64_t link) {
  return std::make_shared<link_ear>(*this, link);
}

// -- the way to a link

void agent_core::want_link(const peer_ptr& who) {
  loop_->post([this, who] { make_way(who); });
}

/// The next step towards a link, if something wants one and nothing is under way.
void agent_core::make_way(const peer_ptr& who) {
  bool dials = false;
  bool links = false;
  {
    const lock_type lock{mutex_};
    if (ending_ || who->removed) return;
    using phase = remote_agent::phase;
    dials = who->now == phase::idle;
    links = who->now == phase::greeted;
    if (!dials && !links) return;
    if (clock::now() < who->next_try) {
      try_later(who);
      return;
    }
    who->now = dials ? phase::dialling : phase::linking;
  }
  if (dials) dial(who);
  if (links) make_link(who);
}

/// Under the lock.
void agent_core::try_later(const peer_ptr& who) {
  if (std::exchange(who->try_set, true)) return;
  static_cast<void>(loop_->call_at(who->next_try, [this, who] {
    {
      const lock_type lock{mutex_};
      who->try_set = false;
      if (!who->wants_link()) return;
    }
    make_way(who);
  }));
}

void agent_core::dial(const peer_ptr& who) {
  door_->connect(who->known.host, who->known.port, clock::now() + options_.connect_timeout,
                 [this, who](result<actors::door_socket> how) {
                   if (!how) {
                     loop_->post([this, who, why = how.error()] { lose(who, why, false); });
                     return;
                   }
                   // Owned, for a loop that ends calls nothing of what was posted to it.
                   auto fd = std::make_shared<actors::unique_fd>(*how);
                   loop_->post([this, who, fd] { on_dialled(who, std::move(*fd)); });
                 });
}

void agent_core::on_dialled(const peer_ptr& who, actors::unique_fd fd) {
  auto channel = std::make_shared<control_channel>(*loop_, std::move(fd), options_.peer_silence);
  {
    const lock_type lock{mutex_};
    if (ending_ || who->removed) return;
    who->now = remote_agent::phase::greeting;
    who->channel = channel;
  }
  channel->begin(
      {.on_message = [this, who](control_message said) { on_answer(who, std::move(said)); },
       .on_end = [this, who](const troupe::error& why) { lose(who, why, false); }});
  // Whoever answers and says nothing is found out by its silence, but later.
  static_cast<void>(loop_->call_at(
      clock::now() + options_.connect_timeout, [this, who, weak = std::weak_ptr{channel}] {
        const auto same = weak.lock();
        if (!same || who->channel != same) return;
        {
          const lock_type lock{mutex_};
          using phase = remote_agent::phase;
          if (who->now != phase::greeting && who->now != phase::introducing) return;
        }
        lose(who,
             {errc::peer_unreachable, "whoever answers for agent '" + who->known.name +
                                          "' did not complete the greeting in time"},
             false);
      }));
}

void agent_core::on_answer(const peer_ptr& who, control_message said) {
  if (const auto* question = std::get_if<challenge>(&said)) {
    greet(who, *question);
  } else if (const auto* answer = std::get_if<welcome>(&said)) {
    on_welcome(who, *answer);
  } else if (const auto* known = std::get_if<accepted>(&said)) {
    on_accepted(who, *known);
  } else if (const auto* no = std::get_if<refusal>(&said)) {
    // A token or a life that is wrong now will not be right later.
    const auto code = no->why.code;
    lose(who, no->why, code == errc::stale_incarnation || code == errc::unauthorized);
  } else if (const auto* link = std::get_if<link_answer>(&said)) {
    on_link_answer(who, *link);
  } else {
    lose(who, {errc::unauthorized, "agent '" + who->known.name + "' speaks out of turn"}, false);
  }
}

void agent_core::greet(const peer_ptr& who, const challenge& said) {
  transport::random_bytes(who->nonce);
  who->challenged = said.nonce;
  hello mine;
  mine.to = who->known.life;
  mine.from = life_;
  mine.nonce = who->nonce;
  mine.proof =
      prove(proof_role::dialer, who->known.token, said.nonce, who->nonce, life_, who->known.life);
  mine.where = place_->identity();
  who->channel->send(mine);
}

void agent_core::on_welcome(const peer_ptr& who, const welcome& said) {
  const auto right = prove(proof_role::acceptor, who->known.token, who->challenged, who->nonce,
                           life_, who->known.life);
  const bool proved = same_proof(right, said.proof);
  {
    const lock_type lock{mutex_};
    if (who->now != remote_agent::phase::greeting) return;
    if (proved) {
      who->now = remote_agent::phase::introducing;
      who->where = said.where;
    }
  }
  if (!proved) {
    lose(who,
         {errc::unauthorized, "whoever answers for agent '" + who->known.name +
                                  "' did not prove that it made the descriptor"},
         false);
    return;
  }
  // Our token is in it, so whoever has not proved itself does not get it.
  who->channel->send(introduction{own_descriptor().encode()});
}

void agent_core::on_accepted(const peer_ptr& who, const accepted& said) {
  {
    const lock_type lock{mutex_};
    if (who->now != remote_agent::phase::introducing) return;
    who->now = remote_agent::phase::greeted;
    who->attempt = 0;
    who->excluded.clear();
    who->next_try = {};
    who->account.begin(said);
  }
  make_way(who);
}

// -- links

result<std::pair<transport::backend_kind, std::string>> agent_core::choose_backend(
    const transport::host_identity& where,
    const std::vector<transport::backend_kind>& excluded) const {
  if (options_.backends.empty()) {
    auto best = place_->choose(where, std::nullopt, excluded);
    if (!best) return fail(std::move(best).error());
    return std::pair{best->kind, std::move(best->reason)};
  }
  std::string passed_over;
  for (const auto kind : options_.backends) {
    auto fits = place_->choose(where, kind, excluded);
    if (fits) return std::pair{fits->kind, std::move(fits->reason)};
    if (!passed_over.empty()) passed_over += "; ";
    passed_over += fits.error().message;
  }
  return fail(errc::backend_unavailable, passed_over);
}

void agent_core::make_link(const peer_ptr& who) {
  const auto chosen = choose_backend(who->where, who->excluded);
  if (!chosen) {
    no_way(who, chosen.error());
    return;
  }
  const auto& [kind, reason] = *chosen;
  std::uint64_t number = 0;
  {
    const lock_type lock{mutex_};
    number = ++last_link_;
    who->kind = kind;
    who->reason = reason;
  }
  auto opened = place_->open(kind,
                             {.role = transport::link_role::initiator,
                              .peer = who->known.life,
                              .lanes = options_.lanes,
                              .max_batches = max_batches(),
                              .connect_timeout = options_.connect_timeout},
                             ear_of(number));
  if (!opened) {
    link_failed(who, opened.error());
    return;
  }
  {
    const lock_type lock{mutex_};
    links_.emplace(number,
                   link_entry{.of = who, .guest = false, .wire = *opened, .closed_for = {}});
    who->link = number;
    who->answered = false;
    who->grants.clear();
    who->asking = 0;
    ++who->attempt;
  }
  who->channel->send(
      link_wanted{.attempt = who->attempt, .lanes = options_.lanes, .offer = (*opened)->offer()});
  watch_answer(who, number);
}

/// The transport bounds a link from the answer on; for the answer nobody does but us.
void agent_core::watch_answer(const peer_ptr& who, std::uint64_t link) {
  static_cast<void>(loop_->call_at(clock::now() + options_.connect_timeout, [this, who, link] {
    {
      const lock_type lock{mutex_};
      if (who->link != link || who->answered) return;
    }
    link_went(link, {errc::peer_unreachable, "agent '" + who->known.name +
                                                 "' did not answer in time to what a link is "
                                                 "made with"});
  }));
}

/// In case the transport does not: twice its own bound, so that its sentence comes first.
void agent_core::watch_link(const peer_ptr& who, std::uint64_t link) {
  static_cast<void>(loop_->call_at(clock::now() + 2 * options_.connect_timeout, [this, who, link] {
    {
      const lock_type lock{mutex_};
      if (who->link != link || who->now != remote_agent::phase::linking) return;
    }
    link_went(link, {errc::peer_unreachable,
                     "the link to agent '" + who->known.name + "' did not come up in time"});
  }));
}

void agent_core::on_link_answer(const peer_ptr& who, const link_answer& said) {
  link_ptr wire;
  std::uint64_t number = 0;
  {
    const lock_type lock{mutex_};
    if (who->now != remote_agent::phase::linking || said.attempt != who->attempt) return;
    if (std::exchange(who->answered, true)) return;
    number = who->link;
    wire = wire_of(number);
  }
  if (!wire) return;
  auto joined = said.refused ? result<void>{fail(*said.refused)} : wire->connect(said.offer);
  if (joined) {
    watch_link(who, number);
    return;
  }
  close_link(number, joined.error());
  link_failed(who, joined.error());
}

/// None was made of it, or it broke.
void agent_core::link_failed(const peer_ptr& who, const troupe::error& why) {
  {
    const lock_type lock{mutex_};
    if (who->now != remote_agent::phase::linking && who->now != remote_agent::phase::up) return;
    const bool was_up = who->now == remote_agent::phase::up;
    who->now = remote_agent::phase::greeted;
    who->leave_link();
    tell_of_lost_notes(*who);
    who->last_error = why;
    who->failures = was_up ? 1 : who->failures + 1;
    const bool hopeless = why.code == errc::backend_unavailable || why.code == errc::no_device;
    if (hopeless || who->failures >= tries_of_backend) {
      if (!was_up) who->excluded.push_back(who->kind);
      who->failures = 0;
    }
    who->next_try =
        clock::now() + (hopeless ? std::chrono::milliseconds{0} : pause_after(who->failures));
    if (!who->wants_link()) return;
  }
  make_way(who);
}

/// No backend is left. The connection stays, and the next that wants a link begins again.
void agent_core::no_way(const peer_ptr& who, const troupe::error& why) {
  const lock_type lock{mutex_};
  if (who->now != remote_agent::phase::linking) return;
  auto words = why.message;
  if (who->last_error && !who->excluded.empty()) words += "; last: " + who->last_error->message;
  who->last_error = troupe::error{why.code, words};
  who->now = remote_agent::phase::greeted;
  who->excluded.clear();
  who->next_try = clock::now() + longest_pause;
  ++who->failed;
  who->connecting = who->wants_count = false;
  fail_waiting(who, *who->last_error);
  if (drop_notes(*who)) tell_of_loss(*who);
  wake_waiters();
}

void agent_core::on_up(std::uint64_t link) {
  loop_->post([this, link] { link_came_up(link); });
}

void agent_core::link_came_up(std::uint64_t link) {
  peer_ptr who;
  bool guest = false;
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end()) return;
    at->second.up = true;
    guest = at->second.guest;
    who = at->second.of;
    if (link != (guest ? who->guest_link : who->link)) return;
  }
  if (guest) {
    // What was taken while there was no link is told now: the peer may wait for nothing else.
    send_counts(who, 0);
  } else {
    use_link(who, link);
  }
}

/// All that waited for a link.
void agent_core::use_link(const peer_ptr& who, std::uint64_t link) {
  {
    lock_type lock{mutex_};
    if (who->link != link || who->now != remote_agent::phase::linking) return;
    who->now = remote_agent::phase::up;
    who->failures = 0;
    who->connecting = who->wants_count = false;
    ++who->links;
    wake_waiters();
    ask_for_count(lock, who);
    go_on(lock, who);
  }
  send_notes(who);
}

void agent_core::on_broken(std::uint64_t link, troupe::error why) {
  loop_->post([this, link, why = std::move(why)] { link_went(link, why); });
}

void agent_core::link_went(std::uint64_t link, const troupe::error& why) {
  peer_ptr who;
  bool only_close = false;
  std::shared_ptr<control_channel> channel;
  std::uint32_t attempt = 0;
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end()) return;
    who = at->second.of;
    only_close = at->second.guest || who->link != link;  // another one was made since
    channel = who->channel;
    attempt = who->attempt;
  }
  close_link(link, why);
  if (only_close) return;
  if (channel) channel->send(link_over{attempt});
  link_failed(who, why);
}

void agent_core::close_link(std::uint64_t link, const troupe::error& why) {
  link_ptr wire;
  {
    lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end()) return;
    if (!at->second.closed_for) at->second.closed_for = why;
    wire = at->second.wire;
    auto& who = *at->second.of;
    if (who.guest_link == link) {
      who.guest_link = 0;
      who.granting.clear();
      // Who deregisters a memory of them waits until the peer has left it.
      for (const auto& [memory, given] : std::exchange(who.given, {})) {
        std::vector<revocation> those;
        for (const auto& grant : given) those.push_back({link, wire, grant});
        revoke_all(lock, std::move(those), memory_id{memory});
      }
    }
  }
  wire->close();  // its batches end before this returns, or when their bytes are at rest
  const lock_type lock{mutex_};
  const auto uses = [link](const auto& one) { return one.second->link == link; };
  const auto revokes = [link](const auto& one) { return one.first.first == link; };
  if (std::ranges::none_of(runs_, uses) && std::ranges::none_of(revoking_, revokes)) {
    links_.erase(link);
    return;
  }
  // Some copy runs yet. It is asked for again, since its end may come on a thread that is in the link.
  static_cast<void>(
      loop_->call_at(clock::now() + longest_pause, [this, link, why] { close_link(link, why); }));
}

// -- the end of a connection

void agent_core::lose(const peer_ptr& who, const troupe::error& why, bool for_good) {
  std::shared_ptr<control_channel> channel;
  std::uint64_t link = 0;
  troupe::error said = why;
  {
    const lock_type lock{mutex_};
    using phase = remote_agent::phase;
    if (who->now == phase::gone || (who->now == phase::idle && !for_good)) return;
    const bool was_there =
        who->now == phase::greeted || who->now == phase::linking || who->now == phase::up;
    who->now = for_good ? phase::gone : phase::idle;
    channel = std::exchange(who->channel, nullptr);
    link = who->link;
    who->leave_link();
    who->unsure_notes = 0;
    said.message = "agent '" + who->known.name + "': " + why.message;
    who->last_error = said;
    who->failures = was_there ? 0 : who->failures + 1;
    who->next_try = clock::now() + pause_after(who->failures);
    ++who->failed;
    who->connecting = who->wants_count = false;
    fail_waiting(who, said);
    static_cast<void>(drop_notes(*who));
    tell_of_loss(*who);
    wake_waiters();
  }
  if (channel) channel->close();
  if (link != 0) close_link(link, said);
}

/// Notices of `notify` that waited for a link.
bool agent_core::drop_notes(remote_agent& who) {
  const auto dropped = std::exchange(who.notes, {});
  for (const auto& bytes : dropped) who.account.unreserve(bytes.size());
  return !dropped.empty();
}

/// Once, until the program has heard it.
void agent_core::tell_of_loss(remote_agent& who) {
  if (who.removed || who.loss_event) return;
  who.loss_event = put_event({.what = event_kind::peer_lost, .who = who.id});
}

}  // namespace troupe::io
