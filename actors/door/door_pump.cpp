#include "troupe/actors/door/door_pump.hpp"

#include <cerrno>
#include <utility>

#include <sys/epoll.h>
#include <sys/socket.h>

namespace troupe::actors {

namespace {

constexpr std::size_t capacity = 64u << 10;
/// Bytes moved before the other connections have their turn.
constexpr std::size_t bytes_per_turn = 1u << 20;
constexpr std::chrono::milliseconds linger_time{5000};
/// How long the reader has to take the bytes that arrived before a reset.
constexpr std::chrono::milliseconds reset_time{250};

}  // namespace

door_pump::stretch::stretch() : bytes_(capacity) {}

std::span<std::byte> door_pump::stretch::room() noexcept {
  if (from_ == to_) clear();
  return std::span{bytes_}.subspan(to_);
}

std::span<const std::byte> door_pump::stretch::filled() const noexcept {
  return std::span{bytes_}.subspan(from_, to_ - from_);
}

void door_pump::stretch::take(std::size_t bytes) noexcept {
  from_ += bytes;
  if (from_ == to_) clear();
}

door_pump::door_pump(door_loop& loop, owned_fd net, std::unique_ptr<door_tls_session> tls,
                     owned_fd plain)
    : loop_{loop}, net_{std::move(net)}, plain_{std::move(plain)}, tls_{std::move(tls)} {}

void door_pump::begin(std::function<void()> ended) {
  ended_ = std::move(ended);
  const auto self = shared_from_this();
  net_watch_ = loop_.watch(net_.get(), 0, [self](std::uint32_t events) { self->on_net(events); });
  plain_watch_ =
      loop_.watch(plain_.get(), 0, [self](std::uint32_t events) { self->on_plain(events); });
  if (net_watch_ == 0 || plain_watch_ == 0) {
    finish();
  } else {
    turn();  // TLS may have read ahead
  }
}

void door_pump::stop() {
  ended_ = nullptr;
  loop_.forget(net_watch_);
  loop_.forget(plain_watch_);
  loop_.cancel(linger_);
  tls_.reset();
  net_.reset();
  plain_.reset();
}

void door_pump::on_net(std::uint32_t events) {
  const auto self = shared_from_this();
  turn();
  if (!ended_ || (events & (EPOLLERR | EPOLLHUP)) == 0) return;
  // These events would be reported again and again.
  loop_.forget(net_watch_);
  net_gone_ = true;
  if ((events & EPOLLERR) != 0) give_it(reset_time);
  turn();
}

void door_pump::on_plain(std::uint32_t events) {
  const auto self = shared_from_this();
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) plain_is_gone();
  turn();
}

void door_pump::turn() {
  const auto self = shared_from_this();
  posted_ = false;
  std::size_t moved = 0;
  while (ended_ && moved < bytes_per_turn) {
    // All four run, whatever the others moved.
    const auto now = read_net() + write_plain() + read_plain() + write_net();
    if (now == 0) break;
    moved += now;
  }
  if (!ended_) return;
  // The net is no longer watched, so nothing would wake us for more of its bytes.
  if (net_gone_ && moved < bytes_per_turn && !in_.room().empty()) net_ended_ = net_broken_ = true;
  carry_ends();
  if (moved > 0 && end_said_net_ && !plain_gone_ && !net_gone_) give_it(linger_time);
  if (over()) {
    finish();
    return;
  }
  ask_for_events();
  if (moved < bytes_per_turn || posted_) return;
  posted_ = true;
  loop_.post([self] {
    if (self->ended_) self->turn();
  });
}

std::size_t door_pump::read_net() {
  read_wants_write_ = false;
  const auto room = in_.room();
  if (net_ended_ || room.empty()) return 0;
  const auto got = tls_->read(room);
  switch (got.how) {
    case door_tls_session::step::done:
      if (!plain_gone_) in_.add(got.bytes);
      return got.bytes;
    case door_tls_session::step::wants_read: return 0;
    case door_tls_session::step::wants_write: read_wants_write_ = true; return 0;
    case door_tls_session::step::ended: net_ended_ = true; return 0;
    case door_tls_session::step::broken: net_ended_ = net_broken_ = true; return 0;
  }
  return 0;
}

std::size_t door_pump::write_plain() {
  const auto bytes = in_.filled();
  if (bytes.empty() || plain_gone_) return 0;
  const auto n = ::send(plain_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) {
    in_.take(static_cast<std::size_t>(n));
    return static_cast<std::size_t>(n);
  }
  if (!not_now(errno)) plain_is_gone();
  return 0;
}

std::size_t door_pump::read_plain() {
  // Read only into an empty buffer: few large TLS records.
  if (plain_ended_ || net_broken_ || !out_.filled().empty()) return 0;
  const auto room = out_.room();
  const auto n = ::recv(plain_.get(), room.data(), room.size(), MSG_DONTWAIT);
  if (n > 0) {
    out_.add(static_cast<std::size_t>(n));
    return static_cast<std::size_t>(n);
  }
  if (n == 0 || !not_now(errno)) plain_ended_ = true;
  return 0;
}

std::size_t door_pump::write_net() {
  write_wants_write_ = false;
  const auto bytes = out_.filled();
  if (bytes.empty() || net_broken_) return 0;
  const auto sent = tls_->write(bytes);
  switch (sent.how) {
    case door_tls_session::step::done: out_.take(sent.bytes); return sent.bytes;
    case door_tls_session::step::wants_read: return 0;
    case door_tls_session::step::wants_write: write_wants_write_ = true; return 0;
    case door_tls_session::step::ended:
    case door_tls_session::step::broken: net_broken_ = true; return 0;
  }
  return 0;
}

void door_pump::carry_ends() {
  if (net_ended_ && in_.filled().empty() && !end_said_plain_) {
    end_said_plain_ = true;
    ::shutdown(plain_.get(), SHUT_WR);
  }
  if (plain_ended_ && out_.filled().empty() && !end_said_net_ && !net_broken_) {
    switch (tls_->say_end()) {
      case door_tls_session::step::wants_write: write_wants_write_ = true; break;
      case door_tls_session::step::broken: net_broken_ = true; break;
      case door_tls_session::step::done:
      case door_tls_session::step::ended:
      case door_tls_session::step::wants_read:
        end_said_net_ = true;
        // Only shut down: closing the socket with unread bytes would discard sent bytes.
        ::shutdown(net_.get(), SHUT_WR);
        if (linger_ == 0) give_it(linger_time);
        break;
    }
  }
}

void door_pump::plain_is_gone() {
  // Stop watching, or its events would wake us again and again. Its bytes are still to be read.
  loop_.forget(plain_watch_);
  if (plain_gone_) return;
  plain_gone_ = true;
  in_.clear();
  if (!net_gone_) give_it(linger_time);
}

void door_pump::give_it(std::chrono::milliseconds time) {
  loop_.cancel(linger_);
  linger_ = loop_.call_at(door_loop::clock::now() + time, [self = shared_from_this()] {
    self->linger_ = 0;
    self->finish();
  });
}

bool door_pump::over() const noexcept {
  const bool delivered = in_.filled().empty();
  if (net_broken_) return delivered;  // nobody is there to answer
  return net_ended_ && delivered && plain_ended_ && end_said_net_;
}

void door_pump::ask_for_events() {
  std::uint32_t net = 0;
  if (!net_ended_ && !in_.room().empty()) net |= EPOLLIN;
  if (read_wants_write_ || write_wants_write_) net |= EPOLLOUT;
  std::uint32_t plain = 0;
  // Do not read the plain side if the net is broken: nothing takes its bytes.
  if (!plain_ended_ && !net_broken_ && out_.filled().empty()) plain |= EPOLLIN;
  if (!in_.filled().empty()) plain |= EPOLLOUT;
  loop_.change(plain_watch_, plain);
  // A broken net would be reported until the rest of its bytes is taken.
  if (net_broken_) {
    loop_.forget(net_watch_);
  } else {
    loop_.change(net_watch_, net);
  }
}

void door_pump::finish() {
  auto ended = std::move(ended_);
  stop();
  if (ended) ended();
}

}  // namespace troupe::actors
