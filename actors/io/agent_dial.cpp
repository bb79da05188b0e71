#include <algorithm>
#include <utility>
#include <variant>

#include "troupe/io/agent_core.hpp"
#include "troupe/transport/random.hpp"

// Our connections to peers: dialled, greeted, lost. On the loop's thread unless said otherwise.

namespace troupe::io {

namespace {

using clock = control_channel::clock;

constexpr std::chrono::milliseconds first_pause{20};

}  // namespace

std::chrono::milliseconds pause_after(std::uint32_t failures) noexcept {
  const auto shift = std::min<std::uint32_t>(failures, 6);
  return std::min(longest_pause, first_pause * (1 << shift));
}

// -- the way to a link

void agent_core::want_link(const peer_ptr& who) {
  loop_->post([this, who] { make_way(who); });
}

/// Takes the next step towards a link, if one is wanted and no step is in progress.
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
                     auto why = how.error();
                     // Nothing was sent to the peer, which `link_broken` would leave open.
                     if (why.code == errc::link_broken) why.code = errc::peer_unreachable;
                     loop_->post([this, who, why] { lose(who, why, false); });
                     return;
                   }
                   // Owned by the closure: a loop that ends drops posted calls unrun.
                   actors::owned_fd own{*how};
                   auto fd = std::make_shared<actors::owned_fd>(std::move(own));
                   loop_->post([this, who, fd] { on_dialled(who, std::move(*fd)); });
                 });
}

void agent_core::on_dialled(const peer_ptr& who, actors::owned_fd fd) {
  auto channel = std::make_shared<control_channel>(*loop_, std::move(fd), options_.peer_silence);
  {
    const lock_type lock{mutex_};
    if (ending_ || who->removed) return;
    who->now = remote_agent::phase::greeting;
    who->channel = channel;
  }
  // Weak, to avoid a cycle: the peer owns its channel, and the agent may end before `part_from`
  // runs.
  const std::weak_ptr of{who};
  channel->begin({.on_message =
                      [this, of](control_message said) {
                        if (const auto peer = of.lock()) on_answer(peer, std::move(said));
                      },
                  .on_end =
                      [this, of](const troupe::error& why) {
                        if (const auto peer = of.lock()) lose(peer, why, false);
                      }});
  // The channel's silence check would also find a peer that answers and says nothing, but later.
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
    // A wrong token or life stays wrong.
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
  // The descriptor holds our token: send it only to a peer that has proved itself.
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

/// Drops the notices of `notify` that wait for a link.
bool agent_core::drop_notes(remote_agent& who) {
  const auto dropped = std::exchange(who.notes, {});
  for (const auto& one : dropped) who.account.unreserve(one.bytes);
  const bool in_hand = std::exchange(who.note_in_hand, false);
  return in_hand || !dropped.empty();
}

/// Queues `peer_lost` unless one is still unread.
void agent_core::tell_of_loss(remote_agent& who) {
  if (who.removed || who.loss_event) return;
  who.loss_event = put_event({.what = event_kind::peer_lost, .who = who.id});
}

}  // namespace troupe::io
