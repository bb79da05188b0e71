#include <algorithm>
#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"

// Links: made, broken, closed. On the loop's thread unless said otherwise.

namespace troupe::io {

namespace {

using clock = control_channel::clock;

/// Consecutive links over one backend that may fail before the next backend is tried.
constexpr std::uint32_t tries_of_backend = 2;
/// Links that may break while a transfer waits for its grants, however much else moves over them.
constexpr std::uint32_t most_lost_links = 8;

/// Forwards the reports of one link. One that cannot be taken in ends the link, not the thread that
/// makes progress for every link.
class peer_link_sink final : public transport::link_sink {
 public:
  peer_link_sink(agent_core& core, std::uint64_t link) noexcept : core_{core}, link_{link} {}
  void on_up() override { core_.on_up(link_); }
  void on_completion(transport::completion done) override {
    or_break([&] { core_.on_completion(link_, std::move(done)); });
  }
  void on_frame(std::span<const std::byte> frame) override {
    or_break([&] { core_.on_frame(link_, frame); });
  }
  void on_quiescent(transfer_id of) override {
    or_break([&] { core_.on_quiescent(link_, of); });
  }
  void on_broken(troupe::error why) override { core_.on_broken(link_, std::move(why)); }

 private:
  template <class Call>
  void or_break(Call&& call) {
    if (auto taken = or_error("a link's report is taken in", call); !taken) {
      core_.on_broken(link_, std::move(taken).error());
    }
  }

  agent_core& core_;
  const std::uint64_t link_;
};

}  // namespace

std::shared_ptr<transport::link_sink> agent_core::sink_of(std::uint64_t link) {
  return std::make_shared<peer_link_sink>(*this, link);
}

// -- made

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
                             sink_of(number));
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
    who->drop_grants();
    ++who->attempt;
  }
  who->channel->send(
      link_wanted{.attempt = who->attempt, .lanes = options_.lanes, .offer = (*opened)->offer()});
  watch_answer(who, number);
}

/// Limits the wait for the peer's answer. From the answer on the transport limits the wait.
void agent_core::watch_answer(const peer_ptr& who, std::uint64_t link) {
  static_cast<void>(loop_->call_at(clock::now() + options_.connect_timeout, [this, who, link] {
    {
      const lock_type lock{mutex_};
      if (who->link != link || who->answered) return;
    }
    link_went(link,
              {errc::peer_unreachable,
               "agent '" + who->known.name + "' did not answer the request for a link in time"});
  }));
}

/// Backstop for the transport's own time limit: twice as long, so that the transport's error comes
/// first.
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

/// The link could not be made, or broke.
void agent_core::link_failed(const peer_ptr& who, const troupe::error& why) {
  {
    const lock_type lock{mutex_};
    if (who->now != remote_agent::phase::linking && who->now != remote_agent::phase::up) return;
    const bool was_up = who->now == remote_agent::phase::up;
    const bool was_idle = was_up && !who->wants_link();
    who->now = remote_agent::phase::greeted;
    who->leave_link();
    who->failures = was_idle ? 1 : who->failures + 1;
    const bool hopeless = why.code == errc::backend_unavailable || why.code == errc::no_device;
    const bool tries_another = hopeless || who->failures >= tries_of_backend;
    // What waits needs another link, also if there is no memory for the reasons.
    (void)or_error("", [&] {
      if (tries_another && !was_idle) who->excluded.push_back(who->kind);
      tell_of_lost_notes(*who);
      who->last_error = why;
      if (was_up) count_lost_link(who, why);
      if (was_up && !was_idle && tries_another && !hopeless) {
        who->last_error->message = "each link to agent '" + who->known.name + "' over " +
                                   std::string{to_string(who->kind)} +
                                   " broke before anything moved over it: " + why.message;
      }
    });
    if (tries_another) who->failures = 0;
    who->next_try =
        clock::now() + (hopeless ? std::chrono::milliseconds{0} : pause_after(who->failures));
    if (!who->wants_link()) return;
  }
  make_way(who);
}

/// A link was up and broke. Ends the transfers that have waited over too many such links: a peer
/// that answers some questions on each and breaks it would hold them for ever.
void agent_core::count_lost_link(const peer_ptr& who, const troupe::error& why) {
  std::erase_if(who->waiting, [&](const transfer_ptr& one) {
    if (one->at != agent_transfer::stage::waiting || ++one->lost_links < most_lost_links) {
      return false;
    }
    refuse(*who, one,
           {why.code, std::to_string(one->lost_links) + " links to agent '" + who->known.name +
                          "' broke before it had granted all memory of the transfer; the last: " +
                          why.message});
    return true;
  });
}

/// No backend is left. The connection stays, and the next request for a link starts over.
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
    // Report the notices taken while there was no link: the peer may wait for room.
    send_counts(who, 0);
  } else {
    use_link(who, link);
  }
}

/// Resumes all work that waited for a link.
void agent_core::use_link(const peer_ptr& who, std::uint64_t link) {
  {
    lock_type lock{mutex_};
    if (who->link != link || who->now != remote_agent::phase::linking) return;
    who->now = remote_agent::phase::up;
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
    only_close = at->second.guest || who->link != link;  // or another link was made since
    channel = who->channel;
    attempt = who->attempt;
  }
  close_link(link, why);
  if (only_close) return;
  if (channel) channel->send(link_over{attempt});
  link_failed(who, why);
}

/// On the thread that ends: its links make no progress any more.
void agent_core::on_thread_lost(const troupe::error& why) {
  loop_->post([this, why] {
    std::vector<std::uint64_t> all;
    {
      const lock_type lock{mutex_};
      for (const auto& [number, one] : links_) all.push_back(number);
    }
    for (const auto link : all) link_went(link, why);
  });
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
      // `deregister` waits until the peer no longer uses the memory, also one whose turn is last.
      std::vector<revocation> those;
      for (const auto& [memory, given] : who.given) {
        for (const auto& grant : given) those.push_back({link, wire, grant, memory_id{memory}});
      }
      begin_revoking(those);
      who.guest_link = 0;
      who.granting.clear();
      who.given.clear();
      lock.unlock();
      revoke(those);
    }
  }
  wire->close();  // the link's batches end before this returns, or once their bytes are at rest
  const lock_type lock{mutex_};
  const auto uses = [link](const auto& one) { return one.second->link == link; };
  const auto revokes = [link](const auto& one) { return one.first.first == link; };
  if (std::ranges::none_of(runs_, uses) && std::ranges::none_of(revoking_, revokes)) {
    links_.erase(link);
    return;
  }
  // A copy is still running. Try again later: it may end on a thread that is inside the link.
  static_cast<void>(
      loop_->call_at(clock::now() + longest_pause, [this, link, why] { close_link(link, why); }));
}

}  // namespace troupe::io
