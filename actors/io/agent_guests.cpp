#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "troupe/io/agent_core.hpp"
#include "troupe/transport/random.hpp"

// Peers that dial us: greeted, given links. On the loop's thread unless said otherwise.

namespace troupe::io {

namespace {

using clock = control_channel::clock;

/// Connections of the door that have not introduced themselves yet.
constexpr std::size_t max_newcomers = 256;

}  // namespace

void agent_core::let_in(actors::owned_fd fd) {
  const auto strangers =
      std::ranges::count_if(newcomers_, [](const auto& one) { return !one->who; });
  if (static_cast<std::size_t>(strangers) >= max_newcomers) return;  // its dialler tries again
  auto from = std::make_shared<newcomer>();
  transport::random_bytes(from->nonce);
  from->channel = std::make_shared<control_channel>(*loop_, std::move(fd), options_.peer_silence);
  newcomers_.push_back(from);
  from->channel->begin({.on_message =
                            [this, weak = std::weak_ptr{from}](control_message said) {
                              if (const auto self = weak.lock())
                                on_guest_message(self, std::move(said));
                            },
                        .on_end =
                            [this, weak = std::weak_ptr{from}](const troupe::error& why) {
                              if (const auto self = weak.lock()) on_guest_end(self, why);
                            }});
  from->channel->send(challenge{.nonce = from->nonce});
  static_cast<void>(
      loop_->call_at(clock::now() + options_.connect_timeout, [this, weak = std::weak_ptr{from}] {
        const auto self = weak.lock();
        if (!self || self->who) return;
        self->channel->close();
        std::erase(newcomers_, self);
      }));
}

void agent_core::on_guest_message(const std::shared_ptr<newcomer>& from, control_message said) {
  const bool proved = from->life.value != 0;
  if (const auto* greeting = std::get_if<hello>(&said); greeting != nullptr && !proved) {
    on_hello(from, *greeting);
  } else if (const auto* self = std::get_if<introduction>(&said);
             self != nullptr && proved && !from->who) {
    on_introduction(from, *self);
  } else if (const auto* wanted = std::get_if<link_wanted>(&said); wanted != nullptr && from->who) {
    on_link_wanted(from->who, *wanted);
  } else if (std::holds_alternative<link_over>(said) && from->who) {
    std::uint64_t link = 0;
    {
      const lock_type lock{mutex_};
      link = from->who->guest_link;
    }
    let_link_end(link, {errc::link_broken, "the peer gave the link up"});
  } else {
    send_away(from, {errc::unauthorized, "an agent that dials does not say this here"});
  }
}

void agent_core::send_away(const std::shared_ptr<newcomer>& from, const troupe::error& why) {
  from->channel->send(refusal{why});
  from->channel->close();
  if (const auto link = guest_left(from, why); link != 0) close_link(link, why);
}

void agent_core::on_hello(const std::shared_ptr<newcomer>& from, const hello& said) {
  if (said.to != life_) {
    send_away(
        from,
        {errc::stale_incarnation,
         "agent '" + options_.name +
             "' is not the incarnation that the descriptor names; give the peer a new descriptor"});
    return;
  }
  const auto right = prove(proof_role::dialer, token_, from->nonce, said.nonce, said.from, life_);
  if (!same_proof(right, said.proof)) {
    send_away(from,
              {errc::unauthorized,
               "the peer did not prove that it has a descriptor of agent '" + options_.name + "'"});
    return;
  }
  if (said.from == life_ || said.from.value == 0) {
    send_away(from, {errc::invalid_config, "an agent does not dial itself"});
    return;
  }
  from->life = said.from;
  welcome mine;
  mine.proof = prove(proof_role::acceptor, token_, from->nonce, said.nonce, said.from, life_);
  mine.where = place_->identity();
  from->channel->send(mine);
}

/// A holder of our descriptor can send any introduction: it must not describe this agent, nor add
/// to the program's knowledge of a peer's memory.
result<descriptor> agent_core::check_introduction(const newcomer& from, const introduction& said) {
  auto self = descriptor::decode(said.self);
  if (!self) return self;
  if (self->life != from.life) {
    return fail(errc::unauthorized,
                "the peer introduces itself under another identity than it greeted with");
  }
  if (!self->memories.empty()) {
    return fail(errc::unauthorized,
                "the peer describes memory in its greeting; its program is to do that");
  }
  return self;
}

void agent_core::on_introduction(const std::shared_ptr<newcomer>& from, const introduction& said) {
  auto self = check_introduction(*from, said);
  if (!self) {
    send_away(from, self.error());
    return;
  }
  std::shared_ptr<control_channel> former;
  std::uint64_t former_link = 0;
  result<peer_ptr> known = fail(errc::internal, "");
  {
    const lock_type lock{mutex_};
    known = take_in(std::move(*self));
    if (known) {
      former = std::exchange((*known)->guest, from->channel);
      former_link = (*known)->guest_link;
      from->who = *known;
    }
  }
  if (!known) {
    send_away(from, known.error());
    return;
  }
  // The peer has greeted again: its former connection and link are over.
  if (former) former->close();
  std::erase_if(newcomers_, [&](const auto& one) { return one->channel == former; });
  if (former_link != 0) {
    close_link(former_link, {errc::link_broken, "the peer has greeted again"});
  }
  accepted mine{
      .room = {options_.max_notices, options_.max_notice_bytes}, .received = {}, .taken = {}};
  {
    const lock_type lock{mutex_};
    auto& who = *from->who;
    mine.received = who.received;
    mine.taken = who.told_taken = who.taken;
  }
  from->channel->send(mine);
}

/// A peer that was merely silent may come back to its link and must find it closed.
void agent_core::on_guest_end(const std::shared_ptr<newcomer>& from, const troupe::error& why) {
  const auto link = guest_left(from, why);
  if (link == 0) return;
  if (from->channel->closed_by_peer()) {
    let_link_end(link, why);
  } else {
    close_link(link, why);
  }
}

/// Returns the link that the peer had, or 0.
std::uint64_t agent_core::guest_left(const std::shared_ptr<newcomer>& from,
                                     const troupe::error& why) {
  std::erase(newcomers_, from);
  if (!from->who) return 0;
  const lock_type lock{mutex_};
  auto& who = *from->who;
  if (who.guest != from->channel) return 0;
  who.guest.reset();
  who.last_error = why;
  tell_of_loss(who);
  return who.guest_link;
}

/// The peer ends its link. Its last messages may still be in the link: they are read first, then
/// the link ends by itself. A timer closes a link that the peer leaves open.
void agent_core::let_link_end(std::uint64_t link, const troupe::error& why) {
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end() || std::exchange(at->second.ending, true)) return;
  }
  static_cast<void>(loop_->call_at(clock::now() + options_.peer_silence,
                                   [this, link, why] { close_link(link, why); }));
}

void agent_core::on_link_wanted(const peer_ptr& who, const link_wanted& said) {
  std::shared_ptr<control_channel> channel;
  std::uint64_t former = 0;
  std::uint64_t number = 0;
  {
    const lock_type lock{mutex_};
    channel = who->guest;
    former = who->guest_link;
    number = ++last_link_;
  }
  if (!channel) return;
  if (former != 0) close_link(former, {errc::link_broken, "the peer makes another link"});
  const auto refuse = [&](troupe::error why) {
    channel->send(link_answer{.attempt = said.attempt, .refused = std::move(why), .offer = {}});
  };
  const auto& wanted = options_.backends;
  if (!wanted.empty() && std::ranges::find(wanted, said.offer.kind) == wanted.end()) {
    refuse({errc::backend_unavailable, "agent '" + options_.name + "' is not to use " +
                                           std::string{to_string(said.offer.kind)}});
    return;
  }
  auto opened = place_->open(said.offer.kind,
                             {.role = transport::link_role::acceptor,
                              .peer = who->known.life,
                              .lanes = std::min(std::max(said.lanes, 1U), options_.lanes),
                              .max_batches = max_batches(),
                              .connect_timeout = options_.connect_timeout},
                             sink_of(number));
  if (!opened) {
    refuse(opened.error());
    return;
  }
  {
    const lock_type lock{mutex_};
    links_.emplace(number, link_entry{.of = who, .guest = true, .wire = *opened, .closed_for = {}});
    who->guest_link = number;
    who->given.clear();
    who->granting.clear();
  }
  const auto offer = (*opened)->offer();
  if (auto joined = (*opened)->connect(said.offer); !joined) {
    close_link(number, joined.error());
    refuse(joined.error());
    return;
  }
  channel->send(link_answer{.attempt = said.attempt, .refused = {}, .offer = offer});
}

// -- frames of links, both ends; on any thread that makes progress

void agent_core::on_frame(std::uint64_t link, std::span<const std::byte> bytes) {
  auto said = decode_frame(bytes);
  peer_ptr who;
  bool guest = false;
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end()) return;
    who = at->second.of;
    guest = at->second.guest;
    if (link != (guest ? who->guest_link : who->link)) return;  // the frame's link is over
  }
  const auto* const asked = said ? std::get_if<grant_wanted>(&*said) : nullptr;
  const auto* const words = said ? std::get_if<note>(&*said) : nullptr;
  const auto* const count = said ? std::get_if<count_wanted>(&*said) : nullptr;
  if (guest && words != nullptr) {
    on_note(link, who, words->bytes);
  } else if (guest && asked != nullptr) {
    on_grant_wanted(link, who, asked->memory);
  } else if (guest && count != nullptr) {
    send_counts(who, count->number);
  } else if (!guest && said && std::holds_alternative<grants>(*said)) {
    on_grants(link, who, std::get<grants>(std::move(*said)));
  } else if (!guest && said && std::holds_alternative<grants_refused>(*said)) {
    on_grants_refused(link, who, std::get<grants_refused>(std::move(*said)));
  } else if (!guest && said && std::holds_alternative<taken>(*said)) {
    on_taken(link, who, std::get<taken>(*said));
  } else {
    const auto why = said ? troupe::error{errc::link_broken,
                                          "the peer sent a frame that only the other end sends"}
                          : said.error();
    loop_->post([this, link, why] { link_went(link, why); });
  }
}

}  // namespace troupe::io
