#include "troupe/actors/door/door_greeting.hpp"

#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::actors {

namespace {

/// How long a refused peer has to read the refusal and hang up. Closing a socket with unread bytes
/// in it would discard the refusal.
constexpr std::chrono::milliseconds parting_time{250};
constexpr std::size_t parting_bytes = 4096;

door_nonce fresh_nonce() {
  door_nonce nonce{};
  transport::random_bytes(nonce);
  return nonce;
}

}  // namespace

door_greeting::door_greeting(door_loop& loop, owned_fd fd, door_handshake::role who,
                             std::uint16_t port,
                             std::shared_ptr<const door_credentials> credentials)
    : loop_{loop},
      fd_{std::move(fd)},
      role_{who},
      credentials_{std::move(credentials)},
      handshake_{who, credentials_->mode, credentials_->keys, fresh_nonce(), port} {}

void door_greeting::begin(door_loop::clock::time_point until, outcome then) {
  then_ = std::move(then);
  stage_began_ = door_loop::clock::now();
  const auto self = shared_from_this();
  watch_ = loop_.watch(fd_.get(), EPOLLIN, [self](std::uint32_t) { self->on_ready(); });
  if (watch_ == 0) {
    finish(fail(errc::overloaded,
                "no room to watch the connection; allow the process more "
                "descriptors (ulimit -n)"));
    return;
  }
  timer_ = loop_.call_at(until, [self] {
    self->timer_ = 0;
    self->on_time();
  });
  on_ready();  // most peers have already sent bytes when they are accepted
}

void door_greeting::give_up() {
  then_ = nullptr;
  loop_.forget(watch_);
  loop_.cancel(timer_);
  tls_.reset();
  fd_.reset();
}

void door_greeting::catch_up() {
  if (then_) on_ready();
}

void door_greeting::on_ready() {
  const auto self = shared_from_this();  // `then_` may drop the last reference
  if (parting_) {
    discard_some();
    return;
  }
  while (then_) {
    if (!handshake_.to_send().empty()) {
      if (!send_some()) return;
    } else if (handshake_.where() == door_handshake::state::refused) {
      part();
      return;
    } else if (handshake_.where() == door_handshake::state::proven) {
      secure();
      return;
    } else if (!read_some()) {
      return;
    }
  }
}

void door_greeting::enter_stage() {
  const auto now_in = parting_                                              ? door_stage::refused
                      : handshake_.where() == door_handshake::state::proven ? door_stage::proven
                      : handshake_.greeted()                                ? door_stage::challenged
                      : handshake_.heard()                                  ? door_stage::speaking
                                                                            : door_stage::silent;
  if (now_in == stage_) return;
  stage_ = now_in;
  stage_began_ = door_loop::clock::now();
}

void door_greeting::secure() {
  if (credentials_->mode != door_security::mode::tls) {
    finish(proven_connection{std::move(fd_), nullptr});
    return;
  }
  if (!tls_) {
    auto made = door_tls_session::create(credentials_->tls, fd_.get(), role_);
    if (!made) {
      finish(fail(made.error()));
      return;
    }
    tls_ = std::move(*made);
  }
  switch (tls_->greet()) {
    case door_tls_session::step::done:
      finish(proven_connection{std::move(fd_), std::move(tls_)});
      return;
    case door_tls_session::step::wants_read: loop_.change(watch_, EPOLLIN); return;
    case door_tls_session::step::wants_write: loop_.change(watch_, EPOLLOUT); return;
    case door_tls_session::step::ended:
    case door_tls_session::step::broken: finish(fail(tls_->why())); return;
  }
}

bool door_greeting::send_some() {
  const auto rest = handshake_.to_send();
  const auto n = ::send(fd_.get(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) {
    handshake_.sent(static_cast<std::size_t>(n));
    if (handshake_.to_send().empty()) loop_.change(watch_, EPOLLIN);
    return true;
  }
  if (not_now(errno)) {
    loop_.change(watch_, EPOLLOUT);
  } else {
    finish_hung_up(errno);
  }
  return false;
}

bool door_greeting::read_some() {
  std::array<std::byte, door_handshake::hello_size> piece{};
  const auto wanted = std::min(handshake_.wants(), piece.size());
  const auto n = ::recv(fd_.get(), piece.data(), wanted, MSG_DONTWAIT);
  if (n > 0) {
    handshake_.take(std::span{piece}.first(static_cast<std::size_t>(n)));
    enter_stage();
    return true;
  }
  if (n == 0) {
    finish_hung_up(0);
  } else if (!not_now(errno)) {
    finish_hung_up(errno);
  }
  return false;
}

void door_greeting::part() {
  const bool was_told = role_ == door_handshake::role::server && handshake_.told();
  if (!was_told) {
    finish(fail(handshake_.why()));
    return;
  }
  parting_ = true;
  enter_stage();
  ::shutdown(fd_.get(), SHUT_WR);
  loop_.cancel(timer_);
  const auto self = shared_from_this();
  timer_ = loop_.call_at(door_loop::clock::now() + parting_time, [self] {
    self->timer_ = 0;
    self->finish(fail(self->handshake_.why()));
  });
  discard_some();
}

void door_greeting::discard_some() {
  std::array<std::byte, 512> piece{};
  while (discarded_ < parting_bytes) {
    const auto n = ::recv(fd_.get(), piece.data(), piece.size(), MSG_DONTWAIT);
    if (n < 0 && not_now(errno)) return;
    if (n <= 0) break;
    discarded_ += static_cast<std::size_t>(n);
  }
  finish(fail(handshake_.why()));
}

void door_greeting::on_time() {
  finish(fail(
      errc::deadline,
      handshake_.heard()
          ? "the peer did not complete its part of the greeting in time"
          : "the peer said nothing in time; it is stopped or overloaded, or not a Troupe node"));
}

void door_greeting::finish(result<proven_connection> how) {
  const auto self = shared_from_this();
  auto then = std::move(then_);
  give_up();
  if (then) then(std::move(how));
}

void door_greeting::finish_hung_up(int number) {
  std::string sentence = "the peer hung up ";
  sentence += handshake_.heard() ? "in the middle of the greeting" : "without a word";
  if (number != 0) sentence += " (" + transport::what_errno(number) + ")";
  sentence += "; it is ending, has too many other connections waiting, or is not a Troupe node";
  finish(fail(errc::link_broken, std::move(sentence)));
}

}  // namespace troupe::actors
