#include "link_end.hpp"

#include <algorithm>
#include <utility>

namespace troupe::actors::link_simulation {

void node::take_apart() {
  for (const auto& end : ends) end->take_apart();
  ends.clear();
}

link_end::link_end(end_world& in, node_ptr at, node_ptr peer, transport::link_role role,
                   std::uint64_t number, std::uint64_t asked)
    : world_{in},
      at_{std::move(at)},
      peer_{std::move(peer)},
      number_{number},
      link_{*this, {at_->context, peer_->context->self, role, asked}} {}

void link_end::here(microseconds after, std::function<void()> what) {
  world_.wires().time.after(after, [self = shared_from_this(), what = std::move(what)] {
    self->world_.wires().in(self->at_, [self, what] { what(); });
  });
}

void link_end::put(std::function<void()> what) {
  mailbox_.put(world_.wires(), at_,
               [self = shared_from_this(), what = std::move(what)] { what(); });
}

void link_end::handle(const end_ptr& from, const std::function<void()>& what) {
  if (finished_) return;
  current_ = from;
  what();
  current_ = nullptr;
}

void link_end::order(link_command what, std::function<void()> then) {
  put([this, what = std::make_shared<link_command>(std::move(what)), then = std::move(then)] {
    handle(nullptr, [&] {
      link_.handle(*what);
      if (then) then();
    });
  });
}

time_point link_end::now() const {
  return world_.wires().time.now();
}

void link_end::later(std::chrono::nanoseconds pause, link_command what) {
  here(std::chrono::ceil<microseconds>(pause),
       [this, what = std::make_shared<link_command>(std::move(what))] {
         handle(nullptr, [&] { link_.handle(*what); });
       });
}

void link_end::tell_runner(runner_event event) {
  here(microseconds{0},
       [this, event = std::move(event)] { world_.to_runner(shared_from_this(), event); });
}

void link_end::tell_session(transfer_id transfer, const session_actor& /*session*/,
                            session_event event) {
  here(microseconds{0}, [this, transfer, event = std::move(event)] {
    world_.to_session(shared_from_this(), transfer, event);
  });
}

std::function<void(link_event)> link_end::reporter() {
  return [weak = weak_from_this()](link_event event) {
    const auto self = weak.lock();
    if (!self) return;
    // What is in the mailbox is handled, also if the link ends meanwhile.
    self->put([end = self.get(), what = std::make_shared<link_event>(std::move(event))] {
      end->handle(nullptr, [&] { end->link_.handle(*what); });
    });
  };
}

/// What arrives is told in its own time; the reader finds nothing more.
void link_end::read(transport::link& from, std::size_t /*polls*/) {
  (void)from.poll();
}

// -- the end of an end

void link_end::finish() {
  if (std::exchange(finished_, true)) return;
  for (const auto& one : watchers_) {
    if (const auto watcher = one.lock()) tell_end_down(watcher);
  }
  // The machine is still at work, and what it has told the runner comes first.
  here(microseconds{0}, [this] {
    std::erase_if(at_->ends, [this](const auto& one) { return one.get() == this; });
    take_apart();
    world_.ended(shared_from_this());
  });
}

void link_end::tell_end_down(const end_ptr& watcher) {
  world_.mail(at_, watcher->at_, [watcher, self = shared_from_this()] {
    if (watcher->other_ != self) return;
    watcher->handle(nullptr, [&] { watcher->link_.on_end_down(std::nullopt); });
  });
}

void link_end::peer_process_died() {
  if (std::exchange(other_, nullptr)) {
    handle(nullptr, [this] { link_.on_end_down("the node is unreachable"); });
  }
  if (reached_) handle(nullptr, [this] { link_.on_node_down(); });
}

// -- the peer

void link_end::reach_node() {
  const auto takes = world_.wires().between(microseconds{100}, milliseconds{5});
  const auto there =
      std::max(world_.wires().time.now() + takes, world_.wires().apart_until(*at_, *peer_));
  const auto wait = std::chrono::ceil<microseconds>(there - world_.wires().time.now());
  const auto patience = at_->context->settings.connect_timeout;
  here(std::min<microseconds>(wait, patience), [this, late = wait > patience] {
    handle(nullptr, [&] {
      reached_ = peer_->alive && !late;
      if (reached_) return link_.on_node_reached(std::nullopt);
      link_.on_node_reached(troupe::error{errc::peer_unreachable, "nobody answers"});
    });
  });
}

link_end::answer link_end::once(std::function<void(const links::link_answer&)> then,
                                std::chrono::milliseconds patience) {
  const auto asked = std::make_shared<bool>(true);
  here(patience, [this, asked, then] {
    if (!std::exchange(*asked, false)) return;
    handle(nullptr, [&] { then(links::no_answer{true, "request_timeout"}); });
  });
  return [self = shared_from_this(), asked, then](const end_ptr& from,
                                                  const links::link_answer& what) {
    if (!std::exchange(*asked, false)) return;
    self->handle(from, [&] { then(what); });
  };
}

void link_end::ask_node(link_request request, std::function<void(const links::link_answer&)> then) {
  const auto answered = once(std::move(then), at_->context->settings.connect_timeout);
  world_.mail(at_, peer_, [self = shared_from_this(), request = std::move(request), answered] {
    const auto acceptor = self->world_.make_acceptor(self->peer_, request);
    link_reply reply;
    if (acceptor) {
      acceptor->handle(self, [&] { reply = acceptor->link_.accept(request); });
    } else {
      reply.failed = static_cast<std::uint8_t>(errc::stale_incarnation);
      reply.sentence = "another life was asked for";
    }
    self->world_.mail(self->peer_, self->at_,
                      [answered, acceptor, reply] { answered(acceptor, reply); });
  });
}

void link_end::ask_end(links::far_end end, link_request request,
                       std::function<void(const links::link_answer&)> then) {
  const auto answered = once(std::move(then), at_->context->settings.connect_timeout);
  const auto whom = end_of(end);
  if (!whom) return;
  world_.mail(
      at_, peer_, [self = shared_from_this(), whom, request = std::move(request), answered] {
        links::link_answer out = links::no_answer{false, "request_receiver_down"};
        whom->handle(self, [&] { out = whom->link_.accept(request); });
        self->world_.mail(self->peer_, self->at_, [answered, whom, out] { answered(whom, out); });
      });
}

void link_end::notify(links::far_end end, link_notice notice) {
  const auto whom = end_of(end);
  if (!whom) return;
  world_.mail(at_, peer_, [self = shared_from_this(), whom, notice = std::move(notice)] {
    whom->handle(self, [&] { whom->link_.hear(notice); });
  });
}

void link_end::notify_and_wait(links::far_end end, link_notice notice,
                               std::chrono::milliseconds patience, std::function<void()> then) {
  const auto answered =
      once([then = std::move(then)](const links::link_answer&) { then(); }, patience);
  const auto whom = end_of(end);
  if (!whom) return;
  world_.mail(at_, peer_, [self = shared_from_this(), whom, notice = std::move(notice), answered] {
    whom->handle(self, [&] { whom->link_.hear(notice); });
    self->world_.mail(self->peer_, self->at_, [answered, whom] { answered(whom, link_reply{}); });
  });
}

void link_end::ask_whether_alive(links::far_end end, std::function<void()> then) {
  const auto whom = end_of(end);
  if (!whom) return;
  world_.mail(at_, peer_, [self = shared_from_this(), whom, then = std::move(then)] {
    if (whom->finished_) return;
    self->world_.mail(self->peer_, self->at_, [self, whom, then] { self->handle(whom, then); });
  });
}

links::far_end link_end::sender() {
  if (!current_) return {};
  if (current_ == other_) return end_;
  newcomer_ = current_;
  return {end_.number + 1};
}

void link_end::monitor(links::far_end end) {
  if (!newcomer_) return;
  end_ = end;
  other_ = std::exchange(newcomer_, nullptr);
  if (other_->finished_) {
    other_->tell_end_down(shared_from_this());
  } else {
    other_->watchers_.push_back(weak_from_this());
  }
}

void link_end::stop_monitoring(links::far_end end) {
  if (end == end_) other_ = nullptr;
}

}  // namespace troupe::actors::link_simulation
