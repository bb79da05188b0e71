#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "troupe/io/agent_core.hpp"
#include "troupe/transport/random.hpp"

// Those who dial us: greeted, given links and grants. On the loop's thread but what says otherwise.

namespace troupe::io {

namespace {

using clock = control_channel::clock;

/// Connections of the door that have not greeted yet.
constexpr std::size_t max_newcomers = 256;

}  // namespace

void agent_core::let_in(actors::unique_fd fd) {
  if (newcomers_.size() >= max_newcomers) return;  // its dialler tries again
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
                              if (const auto self = weak.lock()) guest_left(self, why);
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
  if (const auto* greeting = std::get_if<hello>(&said); greeting != nullptr && !from->who) {
    on_hello(from, *greeting);
  } else if (const auto* wanted = std::get_if<link_wanted>(&said); wanted != nullptr && from->who) {
    on_link_wanted(from->who, *wanted);
  } else if (std::holds_alternative<link_over>(said) && from->who) {
    std::uint64_t link = 0;
    {
      const lock_type lock{mutex_};
      link = from->who->guest_link;
    }
    if (link != 0) close_link(link, {errc::link_broken, "the peer gave the link up"});
  } else {
    send_away(from, {errc::unauthorized, "an agent that dials does not say this here"});
  }
}

void agent_core::send_away(const std::shared_ptr<newcomer>& from, const troupe::error& why) {
  from->channel->send(refusal{why});
  from->channel->close();
  if (from->who) {
    guest_left(from, why);
  } else {
    std::erase(newcomers_, from);
  }
}

void agent_core::on_hello(const std::shared_ptr<newcomer>& from, const hello& said) {
  if (said.to != life_) {
    send_away(from, {errc::stale_incarnation,
                     "agent '" + options_.name +
                         "' has another life now than the descriptor says; give the peer a new "
                         "descriptor"});
    return;
  }
  auto self = descriptor::decode(said.self);
  if (!self) {
    send_away(from, self.error());
    return;
  }
  const auto right = prove(proof_role::dialer, token_, from->nonce, said.nonce, self->life, life_);
  if (!same_proof(right, said.proof)) {
    send_away(from,
              {errc::unauthorized,
               "the peer did not prove that it has a descriptor of agent '" + options_.name + "'"});
    return;
  }
  std::shared_ptr<control_channel> former;
  std::uint64_t former_link = 0;
  welcome mine;
  result<peer_ptr> known = fail(errc::internal, "");
  {
    const lock_type lock{mutex_};
    known = take_in(std::move(*self));
    if (known && !(*known)->is_self) {
      auto& who = **known;
      former = std::exchange(who.guest, from->channel);
      former_link = who.guest_link;
      who.loss_told = true;
      mine.room = {options_.max_notices, options_.max_notice_bytes};
      mine.received = who.received;
      mine.taken = who.taken;
      who.told_taken = who.taken.notices;
      from->who = *known;
    }
  }
  if (!from->who) {
    send_away(from, known ? troupe::error{errc::invalid_config, "an agent does not dial itself"}
                          : known.error());
    return;
  }
  // It has greeted anew: what it had before is over.
  if (former) former->close();
  if (former_link != 0) {
    close_link(former_link, {errc::link_broken, "the peer has greeted anew"});
  }
  std::erase_if(newcomers_, [&](const auto& one) { return one->channel == former; });
  mine.proof =
      prove(proof_role::acceptor, token_, from->nonce, said.nonce, from->who->known.life, life_);
  mine.where = place_->identity();
  from->channel->send(mine);
}

void agent_core::guest_left(const std::shared_ptr<newcomer>& from, const troupe::error& why) {
  std::erase(newcomers_, from);
  if (!from->who) return;
  std::uint64_t link = 0;
  {
    const lock_type lock{mutex_};
    auto& who = *from->who;
    if (who.guest != from->channel) return;
    who.guest.reset();
    link = who.guest_link;
    who.last_error = why;
    if (std::exchange(who.loss_told, false)) {
      put_event({.what = event_kind::peer_lost, .who = who.id, .why = {}});
    }
  }
  if (link != 0) close_link(link, why);
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
                             ear_of(number));
  if (!opened) {
    refuse(opened.error());
    return;
  }
  {
    const lock_type lock{mutex_};
    links_.emplace(number, link_entry{.of = who, .guest = true, .wire = *opened, .closed_for = {}});
    who->guest_link = number;
    who->given.clear();
  }
  const auto offer = (*opened)->offer();
  if (auto joined = (*opened)->connect(said.offer); !joined) {
    close_link(number, joined.error());
    refuse(joined.error());
    return;
  }
  channel->send(link_answer{.attempt = said.attempt, .refused = {}, .offer = offer});
}

// -- frames of links, both ends; on whatever thread makes progress

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
    if (link != (guest ? who->guest_link : who->link)) return;  // of a link that is over
  }
  const auto* const asked = said ? std::get_if<grant_wanted>(&*said) : nullptr;
  const auto* const words = said ? std::get_if<note>(&*said) : nullptr;
  if (guest && words != nullptr) {
    on_note(who, words->bytes);
  } else if (guest && asked != nullptr) {
    work_->post([this, link, number = asked->memory] { grant_to(link, number); });
  } else if (guest && said && std::holds_alternative<count_wanted>(*said)) {
    send_counts(who, true);
  } else if (!guest && said && std::holds_alternative<grants>(*said)) {
    on_grants(link, who, std::get<grants>(std::move(*said)));
  } else if (!guest && said && std::holds_alternative<grants_refused>(*said)) {
    lock_type lock{mutex_};
    if (who->link != link) return;
    auto& no = std::get<grants_refused>(*said);
    who->grants[no.memory].refused = std::move(no.why);
    go_on(lock, who);
  } else if (!guest && said && std::holds_alternative<taken>(*said)) {
    const lock_type lock{mutex_};
    const auto& count = std::get<taken>(*said);
    who->account.on_count(count.received, count.taken);
  } else {
    const auto why =
        said ? troupe::error{errc::link_broken, "the peer sent a frame of the other end"}
             : said.error();
    loop_->post([this, link, why] { link_went(link, why); });
  }
}

void agent_core::on_grants(std::uint64_t link, const peer_ptr& who, grants said) {
  lock_type lock{mutex_};
  if (who->link != link) return;
  auto& known = who->grants[said.memory];
  if (!known.asked || !known.parts.empty()) return;  // of nothing that was asked for
  for (auto& one : said.parts) {
    known.parts.push_back(std::make_shared<const transport::remote_grant>(std::move(one)));
  }
  go_on(lock, who);
}

/// On the work thread.
void agent_core::grant_to(std::uint64_t link, std::uint64_t memory) {
  link_ptr wire;
  described_memory what;
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end()) return;
    wire = at->second.wire;
    auto* own = memories_.find(memory_id{memory});
    if (own != nullptr && !own->withdrawn) {
      what = own->what;
      ++own->busy;
    }
  }
  const auto refuse = [&](troupe::error why) {
    static_cast<void>(wire->send_frame(encode_frame(grants_refused{memory, std::move(why)})));
  };
  if (what.parts.empty()) {
    refuse({errc::grant_revoked, "memory " + std::to_string(memory) + " of agent '" +
                                     options_.name + "' was deregistered, or never registered"});
    return;
  }
  grants made{.memory = memory, .parts = {}};
  std::optional<troupe::error> why;
  for (const auto& part : what.parts) {
    auto one = wire->grant(part.region, {{part.offset, part.length, 0, 1}}, what.rights,
                           transport::grant_scope::for_all_transfers());
    if (!one) {
      why = std::move(one).error();
      break;
    }
    made.parts.push_back(std::move(*one));
  }
  bool stays = false;
  {
    const lock_type lock{mutex_};
    auto* own = memories_.find(memory_id{memory});
    const auto at = links_.find(link);
    // Who deregisters waits for us, and does not know of these.
    stays = !why && own != nullptr && !own->withdrawn && at != links_.end() &&
            at->second.of->guest_link == link &&
            at->second.of->given.emplace(memory, made.parts).second;
    if (own != nullptr && stays) --own->busy;
    wake_waiters();
  }
  if (stays) {
    static_cast<void>(wire->send_frame(encode_frame(made)));
    return;
  }
  take_back(link, wire, memory_id{memory}, made.parts);
  if (!why) why = troupe::error{errc::grant_revoked, "the memory was deregistered"};
  refuse(std::move(*why));
}

/// Grants that nobody has heard of. Ends the use of the memory, too.
void agent_core::take_back(std::uint64_t link, const link_ptr& wire, memory_id of,
                           const std::vector<transport::remote_grant>& given) {
  lock_type lock{mutex_};
  std::vector<revocation> those;
  for (const auto& one : given) those.push_back({link, wire, one});
  revoke_all(lock, std::move(those), of);
  if (auto* own = memories_.find(of)) --own->busy;
  wake_waiters();
}

}  // namespace troupe::io
