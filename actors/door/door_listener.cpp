#include "troupe/actors/door/door_listener.hpp"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/actors/door/door_sockets.hpp"

namespace troupe::actors {

namespace {

/// Accepts per turn of the loop. Few, so that strangers that have answered are served before too
/// many others arrive.
constexpr int accepts_per_turn = 16;
/// How long a listener pauses without descriptors: pending connections would wake the loop again
/// and again.
constexpr std::chrono::milliseconds pause_time{50};

/// Whether the peer is to blame, rather than this process.
bool is_fault_of_peer(errc code) {
  return code == errc::unauthorized || code == errc::version_mismatch || code == errc::deadline ||
         code == errc::link_broken;
}

owned_fd spare_descriptor() {
  return owned_fd{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
}

}  // namespace

door_listener::door_listener(door_loop& loop, rules limits, reports tell)
    : loop_{loop}, limits_{limits}, tell_{std::move(tell)}, spare_{spare_descriptor()} {}

result<void> door_listener::open(owned_fd fd, std::uint16_t port, admit_call admitted) {
  if (listeners_.contains(port)) {
    return fail(errc::already_exists, "this process listens at port " + std::to_string(port) +
                                          " of another address already; choose another port");
  }
  auto& made = listeners_[port];
  made.fd = std::move(fd);
  made.admitted = std::make_shared<const admit_call>(std::move(admitted));
  made.watch =
      loop_.watch(made.fd.get(), EPOLLIN, [this, port](std::uint32_t) { accept_some(port); });
  if (made.watch != 0) return {};
  listeners_.erase(port);
  return fail(errc::overloaded, "port " + std::to_string(port) +
                                    " cannot be watched; allow the process more descriptors "
                                    "(ulimit -n)");
}

void door_listener::close(std::uint16_t port) {
  const auto at = listeners_.find(port);
  if (at == listeners_.end()) return;
  loop_.forget(at->second.watch);
  loop_.cancel(at->second.pause);
  listeners_.erase(at);
  for (auto who = strangers_.begin(); who != strangers_.end();) {
    const auto next = std::next(who);
    if (who->port == port) {
      who->greeting->give_up();
      strangers_.erase(who);
    }
    who = next;
  }
  count();
}

void door_listener::close() {
  while (!listeners_.empty()) close(listeners_.begin()->first);
}

void door_listener::accept_some(std::uint16_t port) {
  for (int i = 0; i < accepts_per_turn; ++i) {
    const auto at = listeners_.find(port);  // the `admitted` callback may have closed it
    if (at == listeners_.end()) return;
    owned_fd fd{::accept4(at->second.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)};
    if (fd) {
      let_in(port, std::move(fd));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      out_of_descriptors(port);
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

void door_listener::out_of_descriptors(std::uint16_t port) {
  tell_.notice(
      "a connection was dropped: out of file descriptors or of the kernel's memory; allow the "
      "process more of them "
      "(ulimit -n)");
  tell_.refused();
  drop_one(false, "no file descriptor is left");
  const auto found = listeners_.find(port);
  if (found == listeners_.end()) return;
  auto& at = found->second;
  spare_.reset();
  owned_fd{::accept4(at.fd.get(), nullptr, nullptr, SOCK_CLOEXEC)}.reset();
  spare_ = spare_descriptor();
  loop_.change(at.watch, 0);
  if (at.pause != 0) return;
  at.pause = loop_.call_at(door_loop::clock::now() + pause_time, [this, port] {
    const auto again = listeners_.find(port);
    if (again == listeners_.end()) return;
    again->second.pause = 0;
    loop_.change(again->second.watch, EPOLLIN);
  });
}

void door_listener::let_in(std::uint16_t port, owned_fd fd) {
  for (const bool have_key : {false, true}) {
    if (how_many(have_key) >= limits_.max_strangers)
      drop_one(have_key, "too many others came after it");
  }
  const auto at = listeners_.find(port);
  if (at == listeners_.end()) return;
  send_at_once(fd.get());
  const auto peer = peer_of_socket(fd.get());
  auto from = peer_text(fd.get());
  auto greeting = std::make_shared<door_greeting>(
      loop_, std::move(fd), door_handshake::role::server, port, tell_.credentials());
  const auto who = strangers_.insert(
      strangers_.end(), {port, std::move(from), address_bytes(peer), network_of(peer), greeting});
  count();
  greeting->begin(door_loop::clock::now() + limits_.patience,
                  [this, who, admitted = at->second.admitted](result<proven_connection> how) {
                    on_end(who, *admitted, std::move(how));
                  });
}

void door_listener::on_end(strangers::iterator who, const admit_call& admitted,
                           result<proven_connection> how) {
  const auto from = std::move(who->from);
  if (!how && is_fault_of_peer(how.error().code))
    offenders_.add(who->network, door_loop::clock::now());
  strangers_.erase(who);
  count();
  if (how) {
    tell_.admitted();
    admitted(std::move(*how));
  } else {
    tell_.refused();
    tell_.notice("a connection from " + from + " was refused: " + how.error().message);
  }
}

std::uint32_t door_listener::how_many(bool have_key) const {
  return static_cast<std::uint32_t>(std::ranges::count_if(
      strangers_, [&](const auto& one) { return one.greeting->has_key() == have_key; }));
}

void door_listener::drop_one(bool has_key, const char* why) {
  while (true) {
    const auto who = choose(has_key);
    if (who == strangers_.end()) return;
    const auto greeting = who->greeting;
    const auto stage = greeting->stage();
    greeting->catch_up();
    if (greeting->ended() || greeting->has_key() != has_key) return;  // catching up made room
    if (greeting->stage() != stage) continue;
    greeting->give_up();
    offenders_.add(who->network, door_loop::clock::now());
    tell_.refused();
    tell_.notice("a connection from " + who->from +
                 " was closed before it had proved itself: " + why);
    strangers_.erase(who);
    count();
    return;
  }
}

door_listener::strangers::iterator door_listener::choose(bool has_key) {
  std::vector<strangers::iterator> who;
  std::vector<door_seat> seats;
  for (auto it = strangers_.begin(); it != strangers_.end(); ++it) {
    const auto& greeting = *it->greeting;
    if (greeting.has_key() != has_key) continue;
    who.push_back(it);
    seats.push_back({it->address, it->network, greeting.stage(), greeting.stage_began()});
  }
  if (who.empty()) return strangers_.end();
  return who[choose_who_goes(seats, offenders_, door_loop::clock::now())];
}

void door_listener::count() {
  tell_.strangers(static_cast<std::uint32_t>(strangers_.size()));
}

}  // namespace troupe::actors
