#include "troupe/transport/shm/shm_listener.hpp"

#include <array>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/transport/random.hpp"

namespace troupe::transport::shm {

namespace {

constexpr std::uint64_t listening_key = 0;  // strangers count from 1

std::string unguessable_name() {
  std::array<std::byte, 16> random{};
  random_bytes(random);
  std::string name = "troupe-";
  for (const auto byte : random) {
    constexpr std::string_view digits = "0123456789abcdef";
    name += digits[std::to_integer<std::size_t>(byte >> 4)];
    name += digits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
  return name;
}

owned_fd spare_descriptor() {
  return owned_fd{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
}

}  // namespace

result<std::shared_ptr<shm_listener>> shm_listener::start(const backend_context& context) {
  auto name = unguessable_name();
  auto socket = listen_at(name);
  if (!socket) return fail(std::move(socket).error());
  std::shared_ptr<shm_listener> made{
      new shm_listener(context, std::move(*socket), std::move(name))};
  auto watch = made->engine_.watch(made->socket_.get(), EPOLLIN, made, listening_key);
  if (!watch) return fail(std::move(watch).error());
  made->watch_ = *watch;
  return made;
}

shm_listener::shm_listener(const backend_context& context, owned_fd socket, std::string address)
    : engine_{context.progress.next()},
      notice_{context.options.notice},
      uid_{context.identity.uid},
      max_pending_{std::max<std::size_t>(context.options.max_pending_connections, 1)},
      socket_{std::move(socket)},
      address_{std::move(address)},
      spare_{spare_descriptor()} {}

void shm_listener::stop() {
  const auto self = shared_from_this();
  const std::lock_guard lock{mutex_};
  stopped_ = true;
  engine_.unwatch(watch_);
  while (!strangers_.empty()) drop(strangers_.begin());
}

void shm_listener::expect(const token& secret, std::weak_ptr<dial_in_target> target) {
  const std::lock_guard lock{mutex_};
  expected_.insert_or_assign(secret, std::move(target));
}

void shm_listener::forget(const token& secret) {
  const std::lock_guard lock{mutex_};
  expected_.erase(secret);
}

bool shm_listener::on_ready(std::uint64_t key, std::uint32_t /*events*/) {
  if (key == listening_key) {
    take_connections();
    return true;
  }
  owned_fd socket;
  peer_credentials from;
  {
    const std::lock_guard lock{mutex_};
    const auto at = strangers_.find(key);
    if (at == strangers_.end()) return false;
    from = at->second.from;
    socket = std::move(at->second.socket);
    engine_.unwatch(at->second.watch);
    strangers_.erase(at);
  }
  hear(socket, from);
  return true;
}

void shm_listener::take_connections() {
  constexpr int most_at_once = 64;
  for (int i = 0; i < most_at_once; ++i) {
    owned_fd caller{::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
    if (!caller) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EMFILE && errno != ENFILE) return;
      caller = take_without_descriptors();
      if (!caller) return;
    }
    const auto from = credentials_of(caller.get());
    if (!from || from->uid != uid_) {
      notice("user " + std::to_string(from ? from->uid : 0) + " (process " +
             std::to_string(from ? from->pid : 0) +
             ") was sent away; only our own user may connect");
      continue;
    }
    // A real peer has sent its hello before we come to accept it.
    if (hear(caller, *from)) continue;

    const std::lock_guard lock{mutex_};
    if (stopped_) return;
    if (strangers_.size() >= max_pending_) drop(strangers_.begin());
    const auto key = ++last_stranger_;
    auto watch = engine_.watch(caller.get(), EPOLLIN, shared_from_this(), key);
    if (!watch) continue;
    const auto until = std::chrono::steady_clock::now() + hello_timeout;
    strangers_.emplace(key, stranger{std::move(caller), *watch, until, *from});
    if (!timer_set_) {
      timer_set_ = true;
      engine_.call_at(until, shared_from_this(), 0);
    }
  }
}

owned_fd shm_listener::take_without_descriptors() {
  // A connection left in the queue would wait for ever and wake us again and again.
  spare_.reset();
  owned_fd caller{::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
  spare_ = spare_descriptor();
  if (caller && !spare_) {
    notice("out of file descriptors: a connection was dropped");
    caller.reset();
    spare_ = spare_descriptor();
  }
  return caller;
}

bool shm_listener::hear(owned_fd& socket, const peer_credentials& from) {
  auto heard = receive_message(socket.get(), fds_allowed::no);
  if (heard && std::holds_alternative<socket_state>(*heard)) {
    return std::get<socket_state>(*heard) == socket_state::closed;
  }
  const auto who = "process " + std::to_string(from.pid);
  if (!heard) {
    notice(who + ": " + heard.error().message);
    return true;
  }
  const auto* hello = std::get_if<hello_message>(&std::get<received>(*heard).body);
  if (hello == nullptr) {
    notice(who + " did not begin with a hello");
    return true;
  }
  std::shared_ptr<dial_in_target> target;
  {
    const std::lock_guard lock{mutex_};
    const auto at = expected_.find(hello->acceptor_token);
    if (at != expected_.end()) target = at->second.lock();
  }
  if (target) {
    target->accept({std::move(socket), *hello, from});
  } else {
    notice(who + " showed a token that no link here waits for");
    static_cast<void>(send_message(socket.get(), bye_message{}));
  }
  return true;
}

void shm_listener::notice(const std::string& what) {
  if (!notice_) return;
  std::string sentence = "shm socket: " + what;
  {
    const std::lock_guard lock{mutex_};
    const auto now = std::chrono::steady_clock::now();
    if (now - last_notice_ < std::chrono::seconds{1}) {
      ++unnoticed_;
      return;
    }
    last_notice_ = now;
    if (const auto others = std::exchange(unnoticed_, 0); others != 0) {
      sentence += " (and " + std::to_string(others) + " more before)";
    }
  }
  notice_(sentence);
}

void shm_listener::on_timer(std::uint64_t /*key*/, steady_time now) {
  const std::lock_guard lock{mutex_};
  timer_set_ = false;
  while (!strangers_.empty() && strangers_.begin()->second.until <= now) drop(strangers_.begin());
  if (stopped_ || strangers_.empty()) return;
  timer_set_ = true;
  engine_.call_at(strangers_.begin()->second.until, shared_from_this(), 0);
}

void shm_listener::drop(std::map<std::uint64_t, stranger>::iterator which) {
  engine_.unwatch(which->second.watch);
  strangers_.erase(which);
}

}  // namespace troupe::transport::shm
