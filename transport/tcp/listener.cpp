#include "troupe/transport/tcp/listener.hpp"

#include <algorithm>
#include <cerrno>
#include <span>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/transport/random.hpp"

namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t door_key = 0;  // strangers count from 1
constexpr std::chrono::milliseconds patience{2000};
constexpr std::chrono::milliseconds sweep_every{250};
constexpr std::chrono::seconds notice_every{1};
constexpr int accepts_per_turn = 256;

owned_fd spare_descriptor() {
  return owned_fd{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
}

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

listener::listener(backend_context& context, owned_fd fd)
    : context_{context},
      engine_{context.progress.next()},
      fd_{std::move(fd)},
      port_{bound_port(fd_.get())},
      address_{bound_address(fd_.get())},
      spare_{spare_descriptor()} {}

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
    owned_fd caller{::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)};
    if (!caller) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EMFILE && errno != ENFILE) break;
      caller = take_without_descriptors();
      if (!caller) break;
    }
    worked = true;
    admit(std::move(caller));
  }
  return worked;
}

owned_fd listener::take_without_descriptors() {
  // A connection left in the backlog would wait for ever and wake this thread again and again.
  spare_.reset();
  owned_fd caller{::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)};
  spare_ = spare_descriptor();
  if (caller && !spare_) {
    notice("out of file descriptors: a connection was dropped");
    if (strangers_.empty()) {
      caller.reset();
    } else {
      drop(strangers_.begin());
    }
    spare_ = spare_descriptor();
  }
  return caller;
}

void listener::admit(owned_fd fd) {
  if (!strangers_.empty() && strangers_.size() >= context_.options.max_pending_connections) {
    make_room();
  }
  const auto key = ++last_key_;
  auto watch = engine_.watch(fd.get(), EPOLLIN, shared_from_this(), key);
  if (!watch) return;
  const auto now = std::chrono::steady_clock::now();
  strangers_.push_back({.key = key,
                        .fd = std::move(fd),
                        .watch = *watch,
                        .until = now + patience,
                        .greeting = {},
                        .got = 0,
                        .said = {},
                        .challenge = {},
                        .shown = {}});
  by_key_.emplace(key, std::prev(strangers_.end()));
  if (!timer_set_) {
    timer_set_ = true;
    engine_.call_at(now + sweep_every, shared_from_this(), 0);
  }
  listen_to(std::prev(strangers_.end()));  // most have sent their greeting by now
}

// A real peer has usually greeted before it is accepted, and answers its challenge at once.
void listener::make_room() {
  notice("too many connections that have not proved themselves: the oldest was dropped");
  const auto silent = std::ranges::find_if(strangers_, [](const stranger& s) { return !s.said; });
  drop(silent != strangers_.end() ? silent : strangers_.begin());
}

void listener::listen_to(strangers::iterator who) {
  // Read no byte beyond the expected message: what follows belongs to the link.
  const auto into =
      who->said ? std::span<std::byte>{who->shown} : std::span<std::byte>{who->greeting};
  const auto got =
      ::recv(who->fd.get(), into.data() + who->got, into.size() - who->got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) {
    drop(who);
    return;
  }
  who->got += static_cast<std::size_t>(got);
  if (!who->said) {
    hear_greeting(who);
  } else if (who->got == who->shown.size()) {
    judge(who);
  }
}

// Refuses as soon as the first bytes cannot be a greeting, without waiting for the rest.
void listener::hear_greeting(strangers::iterator who) {
  const auto heard = std::span{who->greeting}.first(who->got);
  auto readable = check_hello_start(heard);
  if (readable && who->got < hello_size) return;
  if (readable) {
    auto said = decode_hello(who->greeting);
    if (said) {
      who->said = *said;
      challenge(who);
      return;
    }
    readable = fail(std::move(said).error());
  }
  if (readable.error().code == errc::version_mismatch) {
    refuse(who, readable.error());
  } else {
    notice("a connection was closed: " + readable.error().message);
    drop(who);
  }
}

// Challenges every connection, even for an unknown link.
void listener::challenge(strangers::iterator who) {
  hello_reply question{.kind = reply_kind::challenge, .status = 0, .body = {}};
  random_bytes(question.body);
  who->challenge = encode(question);
  who->got = 0;
  // A fresh socket accepts 48 bytes at once; drop any other.
  const auto sent = ::send(who->fd.get(), who->challenge.data(), who->challenge.size(),
                           MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(who->challenge.size())) drop(who);
}

void listener::judge(strangers::iterator who) {
  const lane_claim claim{.said = *who->said,
                         .greeting = who->greeting,
                         .challenge = who->challenge,
                         .shown = decode_proofs(who->shown)};
  std::shared_ptr<lane_acceptor> link;
  {
    const std::lock_guard lock{mutex_};
    const auto at = waiting_.find(claim.said.link);
    if (at != waiting_.end()) link = at->second.lock();
  }
  if (!link) {  // an unknown link gets the same answer as a wrong proof
    refuse(who,
           {errc::unauthorized, "it did not prove that it has the offer of a link that waits"});
    return;
  }
  engine_.unwatch(who->watch);
  if (auto why = link->accept_lane(who->fd, claim)) {
    refuse(who, *why);
    return;
  }
  by_key_.erase(who->key);
  strangers_.erase(who);
}

void listener::refuse(strangers::iterator who, const troupe::error& why) {
  notice("a connection was refused: " + to_string(why));
  const auto bytes = refusal_of(why.code);
  // The socket has taken at most 48 bytes before. It does not matter whether these arrive.
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
