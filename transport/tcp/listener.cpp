#include "troupe/transport/tcp/listener.hpp"

#include <cerrno>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t door_key = 0;  // strangers count from 1
constexpr std::chrono::milliseconds patience{2000};
constexpr std::chrono::milliseconds sweep_every{250};
constexpr std::chrono::seconds notice_every{1};
constexpr int accepts_per_turn = 256;

}  // namespace

result<std::shared_ptr<listener>> listener::create(backend_context& context) {
  auto fd = listen_on(context.options.host, context.options.data_port);
  if (!fd) return fail(std::move(fd).error());
  std::shared_ptr<listener> made{new listener{context, std::move(*fd)}};
  auto watch = made->engine_.watch(made->fd_.get(), EPOLLIN, made, door_key);
  if (!watch) return fail(std::move(watch).error());
  made->watch_ = *watch;
  return made;
}

listener::listener(backend_context& context, unique_fd fd)
    : context_{context},
      engine_{context.progress.next()},
      fd_{std::move(fd)},
      port_{bound_port(fd_.get())},
      spare_{::open("/dev/null", O_RDONLY | O_CLOEXEC)} {}

void listener::expect(std::uint64_t link, std::weak_ptr<lane_acceptor> who) {
  const std::lock_guard lock{mutex_};
  waiting_[link] = std::move(who);
}

void listener::forget(std::uint64_t link) {
  const std::lock_guard lock{mutex_};
  waiting_.erase(link);
}

void listener::stop() {
  engine_.unwatch(watch_);
}

bool listener::on_ready(std::uint64_t key, std::uint32_t) {
  if (key == door_key) return accept_all();
  const auto at = by_key_.find(key);
  if (at == by_key_.end()) return false;
  listen_to(at->second);
  return true;
}

bool listener::accept_all() {
  bool worked = false;
  for (int i = 0; i < accepts_per_turn; ++i) {
    const int fd = ::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      worked = true;
      admit(fd);
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EMFILE && errno != ENFILE) break;
    // Out of descriptors: the connection would wait for ever and wake us again and again. Take it
    // and drop it.
    notice("out of file descriptors: a connection was dropped");
    if (!strangers_.empty()) drop(strangers_.begin());
    spare_.reset();
    unique_fd{::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC)}.reset();
    spare_ = unique_fd{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  }
  return worked;
}

void listener::admit(int fd) {
  if (strangers_.size() >= context_.options.max_pending_connections) {
    notice("too many connections that say nothing: the oldest was dropped");
    drop(strangers_.begin());
  }
  const auto key = ++last_key_;
  unique_fd owned{fd};
  auto watch = engine_.watch(fd, EPOLLIN, shared_from_this(), key);
  if (!watch) return;
  const auto now = std::chrono::steady_clock::now();
  strangers_.push_back({.key = key,
                        .fd = std::move(owned),
                        .watch = *watch,
                        .until = now + patience,
                        .said = {},
                        .got = 0});
  by_key_.emplace(key, std::prev(strangers_.end()));
  if (!timer_set_) {
    timer_set_ = true;
    engine_.call_at(now + sweep_every, shared_from_this(), 0);
  }
  listen_to(std::prev(strangers_.end()));  // most have spoken already when they are accepted
}

void listener::listen_to(strangers::iterator who) {
  const auto got =
      ::recv(who->fd.get(), who->said.data() + who->got, hello_size - who->got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) {
    drop(who);
    return;
  }
  who->got += static_cast<std::size_t>(got);
  // What is no greeting from its first bytes on need not be waited for.
  if (who->got < hello_size) {
    std::array<std::byte, hello_size> wanted = encode(hello{});
    const auto known = std::min<std::size_t>(who->got, 8);
    if (!std::equal(who->said.begin(), who->said.begin() + static_cast<std::ptrdiff_t>(known),
                    wanted.begin())) {
      notice("a connection whose first bytes are not those of a lane of ours was closed");
      drop(who);
    }
    return;
  }
  auto said = decode_hello(who->said);
  if (!said) {
    if (said.error().code == errc::version_mismatch) {
      refuse(who, said.error());
    } else {
      notice("a connection was closed: " + said.error().message);
      drop(who);
    }
    return;
  }
  judge(who, *said);
}

void listener::judge(strangers::iterator who, const hello& said) {
  std::shared_ptr<lane_acceptor> link;
  {
    const std::lock_guard lock{mutex_};
    const auto at = waiting_.find(said.link);
    if (at != waiting_.end()) link = at->second.lock();
  }
  // An unknown link and a wrong token look the same from outside, and take the same comparison.
  static constexpr token nobody{};
  const bool right = equal(link ? link->secret() : nobody, said.acceptor_token);
  if (!link || !right) {
    refuse(who, {errc::unauthorized, "it showed no token of a link that waits"});
    return;
  }
  engine_.unwatch(who->watch);
  if (auto why = link->accept_lane(who->fd, said)) {
    refuse(who, *why);
    return;
  }
  by_key_.erase(who->key);
  strangers_.erase(who);
}

void listener::refuse(strangers::iterator who, const troupe::error& why) {
  notice("a connection was refused: " + to_string(why));
  const auto bytes = encode(hello_reply{.status = static_cast<std::uint8_t>(why.code),
                                        .from = context_.options.self,
                                        .initiator_token = {}});
  // 48 bytes into a fresh socket; whether they arrive is the stranger's affair.
  [[maybe_unused]] const auto sent =
      ::send(who->fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  drop(who);
}

void listener::drop(strangers::iterator who) {
  engine_.unwatch(who->watch);
  by_key_.erase(who->key);
  strangers_.erase(who);
}

void listener::on_timer(std::uint64_t, steady_time now) {
  timer_set_ = false;
  while (!strangers_.empty() && strangers_.front().until <= now) {
    notice("a connection that did not complete its greeting in time was closed");
    drop(strangers_.begin());
  }
  if (!strangers_.empty()) {
    timer_set_ = true;
    engine_.call_at(now + sweep_every, shared_from_this(), 0);
  }
}

void listener::notice(const std::string& what) {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_notice_ < notice_every) {
    ++unsaid_;
    return;
  }
  last_notice_ = now;
  auto sentence = "data port " + std::to_string(port_) + ": " + what;
  if (unsaid_ > 0) sentence += " (and " + std::to_string(unsaid_) + " more like it)";
  unsaid_ = 0;
  if (context_.options.notice) context_.options.notice(sentence);
}

}  // namespace troupe::transport::tcp
