#include "troupe/io/control_channel.hpp"

#include <array>
#include <cerrno>
#include <string>
#include <utility>
#include <variant>

#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/io/bytes.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::io {

namespace {

constexpr std::size_t length_size = 4;
/// How often the channel checks the peer within `silence`.
constexpr int looks = 4;

/// A peer that closes a socket with unread bytes in it resets the connection.
bool says_closed(int error) noexcept {
  return error == ECONNRESET || error == EPIPE;
}

}  // namespace

control_channel::control_channel(actors::door_loop& loop, actors::owned_fd fd,
                                 std::chrono::milliseconds silence)
    : loop_{loop}, fd_{std::move(fd)}, silence_{silence}, heard_{clock::now()} {}

void control_channel::begin(listener tell) {
  tell_ = std::move(tell);
  watch_ = loop_.watch(fd_.get(), EPOLLIN, [weak = weak_from_this()](std::uint32_t events) {
    if (const auto self = weak.lock()) self->on_ready(events);
  });
  if (watch_ == 0) {
    end({errc::overloaded,
         "the connection cannot be watched; allow the process more descriptors (ulimit -n)"});
    return;
  }
  look();
}

void control_channel::send(const control_message& said) {
  if (!fd_) return;
  const auto bytes = encode(said);
  out_.insert(out_.end(), bytes.begin(), bytes.end());
  if (out_.size() > max_waiting) {
    end({errc::peer_lost, "the peer does not read what is sent to it"});
    return;
  }
  flush();
}

void control_channel::close() {
  loop_.forget(watch_);
  loop_.cancel(timer_);
  fd_.reset();
}

void control_channel::on_ready(std::uint32_t events) {
  const auto self = shared_from_this();
  if ((events & EPOLLOUT) != 0) flush();
  if (!fd_ || (events & ~static_cast<std::uint32_t>(EPOLLOUT)) == 0) return;
  if (read_some()) take_messages();
}

bool control_channel::read_some() {
  std::array<std::byte, 16'384> buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled
  const auto got = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (got > 0) {
    heard_ = clock::now();
    in_.insert(in_.end(), buffer.begin(), buffer.begin() + got);
    return true;
  }
  if (got < 0 && actors::not_now(errno)) return true;
  closed_by_peer_ = got == 0 || says_closed(errno);
  end({errc::peer_lost,
       got == 0 ? "the peer is gone: it closed the connection"
                : "the connection to the peer failed: " + transport::what_errno(errno)});
  return false;
}

void control_channel::take_messages() {
  std::size_t at = 0;
  while (fd_ && in_.size() - at >= length_size) {
    const auto size = byte_reader{std::span{in_}.subspan(at)}.take<std::uint32_t>();
    if (size > max_control) {
      end({errc::unauthorized, "the peer announced a message of " + std::to_string(size) +
                                   " bytes, the most is " + std::to_string(max_control)});
      return;
    }
    if (in_.size() - at - length_size < size) break;
    auto said = decode_control(std::span{in_}.subspan(at + length_size, size));
    at += length_size + size;
    if (!said) {
      end(std::move(said).error());
      return;
    }
    if (std::holds_alternative<ping>(*said)) {
      send(pong{});
    } else if (!std::holds_alternative<pong>(*said)) {
      tell_.on_message(std::move(*said));
    }
  }
  if (fd_) in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(at));
}

void control_channel::flush() {
  while (fd_ && !out_.empty()) {
    const auto sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      out_.erase(out_.begin(), out_.begin() + sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      closed_by_peer_ = says_closed(errno);
      end({errc::peer_lost, "the connection to the peer failed: " + transport::what_errno(errno)});
      return;
    }
  }
  if (watch_ != 0) loop_.change(watch_, out_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void control_channel::look() {
  const auto now = clock::now();
  if (now - heard_ > silence_) {
    end({errc::peer_lost, "nothing was heard of the peer for " + std::to_string(silence_.count()) +
                              " ms: its process is stopped or cut off"});
    return;
  }
  timer_ = loop_.call_at(now + silence_ / looks, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->timer_ = 0;
      self->send(ping{});
      if (self->open()) self->look();
    }
  });
}

void control_channel::end(troupe::error why) {
  if (!fd_) return;
  const auto self = shared_from_this();
  close();
  if (const auto told = std::exchange(tell_.on_end, nullptr)) told(std::move(why));
}

}  // namespace troupe::io
