#include <algorithm>
#include <cerrno>
#include <string>

#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/transport/link_check.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/tcp/tcp_link.hpp"

// From offers to lanes. The initiator dials every lane and greets; the acceptor answers once all
// lanes are there and it knows the initiator's offer, so the link goes up at the acceptor first and
// no frame can come too early.
namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t connect_timeout_key = ~std::uint64_t{0};
constexpr std::chrono::milliseconds redial_after{50};

}  // namespace

result<void> tcp_link::connect(const link_offer& peer) {
  if (auto ok = check_offer(backend_kind::tcp, options_.peer, peer); !ok) return ok;
  auto said = decode_offer(peer.payload);
  if (!said) return fail(std::move(said).error());
  trouble why;
  {
    const std::lock_guard lock{state_mutex_};
    if (state_.load() != state::idle) {
      return fail(errc::link_broken, "connect was called before, or the link is closed");
    }
    if (options_.role == link_role::initiator) {
      auto address = resolve(said->host, said->port);
      if (!address) return fail(std::move(address).error());
      peer_address_ = *address;
      halves_.resize(std::min<std::size_t>(options_.lanes, said->lanes));
    }
    peer_offer_ = std::move(*said);
    state_.store(state::connecting, std::memory_order_release);
    connect_timer_ = engine_.call_at(std::chrono::steady_clock::now() + options_.connect_timeout,
                                     shared_from_this(), connect_timeout_key);
    if (options_.role == link_role::initiator) {
      for (std::size_t i = 0; i < halves_.size() && !why; ++i) why = dial_lane(i);
    } else {
      why = complete_acceptor();
    }
  }
  after_handshake(std::move(why));
  return {};
}

// Called after each step, without the lock: the sink hears of what the step decided.
void tcp_link::after_handshake(trouble why) {
  if (why) {
    break_link(std::move(*why));
    return;
  }
  if (!is_up() || told_up_.exchange(true)) return;
  sink_.deliver(up_event{});
  announced_.store(true, std::memory_order_release);
  engine_.wake();
}

bool tcp_link::handshake_ready(std::uint64_t key) {
  trouble why;
  {
    const std::lock_guard lock{state_mutex_};
    if (state_.load() != state::connecting || key >= halves_.size()) return false;
    why = step_lane(key);
  }
  after_handshake(std::move(why));
  return true;
}

void tcp_link::on_timer(std::uint64_t key, steady_time) {
  if (key == guard_key) {
    watched_.store(false, std::memory_order_release);
    return;  // the round that follows looks
  }
  trouble why;
  {
    const std::lock_guard lock{state_mutex_};
    if (state_.load() != state::connecting) return;
    if (key == connect_timeout_key) {
      why = troupe::error{errc::peer_unreachable,
                          "the peer did not complete the link within " +
                              std::to_string(options_.connect_timeout.count()) + " ms" +
                              (last_refusal_.empty() ? "" : "; last: " + last_refusal_)};
    } else {
      why = dial_lane(key);
    }
  }
  after_handshake(std::move(why));
}

// -- initiator

tcp_link::trouble tcp_link::dial_lane(std::size_t lane) {
  auto& half = halves_[lane];
  auto fd = dial(*peer_address_, context_.options.peer_silence);
  if (!fd) {
    redial_later(lane, fd.error().message);
    return std::nullopt;
  }
  auto watch = engine_.watch(fd->get(), EPOLLOUT, shared_from_this(), lane);
  if (!watch) return std::move(watch).error();
  half.fd = std::move(*fd);
  half.watch = *watch;
  half.now = dial_state::connecting;
  half.got = 0;
  return std::nullopt;
}

// The listener drops the oldest of too many unknown connections: that may have been ours.
void tcp_link::redial_later(std::size_t lane, std::string why) {
  last_refusal_ = std::move(why);
  drop_half(halves_[lane]);
  redial_timers_.push_back(
      engine_.call_at(std::chrono::steady_clock::now() + redial_after, shared_from_this(), lane));
}

void tcp_link::drop_half(half_lane& half) {
  if (half.fd) engine_.unwatch(half.watch);
  half.fd.reset();
  half.now = dial_state::waiting;
  half.answered = false;
}

// The other end must not wait for its timeout, nor take a link that we gave up for a peer that
// died. Whether it arrives is not ours to see to: the connection closes after it.
void tcp_link::leave_half(half_lane& half, errc why) {
  if (!half.fd || half.now == dial_state::connecting) return;
  const auto say = [&](const auto& bytes) {
    [[maybe_unused]] const auto sent =
        ::send(half.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  if (options_.role == link_role::acceptor && !half.answered) {
    say(encode(hello_reply{.status = static_cast<std::uint8_t>(why),
                           .from = context_.options.self,
                           .initiator_token = {}}));
    return;
  }
  std::array<std::byte, header_size> goodbye{};
  encode(frame_header{.type = frame_type::goodbye}, goodbye.data());
  say(goodbye);
}

tcp_link::trouble tcp_link::step_lane(std::size_t lane) {
  switch (halves_[lane].now) {
    case dial_state::waiting: return std::nullopt;
    case dial_state::connecting: return greet(lane);
    case dial_state::greeting: return read_reply(lane);
    case dial_state::ready: return std::nullopt;
  }
  return std::nullopt;
}

tcp_link::trouble tcp_link::greet(std::size_t lane) {
  auto& half = halves_[lane];
  int problem = 0;
  socklen_t size = sizeof problem;
  ::getsockopt(half.fd.get(), SOL_SOCKET, SO_ERROR, &problem, &size);
  if (problem != 0) {
    redial_later(lane, "connect: " + what_errno(problem));
    return std::nullopt;
  }
  const auto bytes = encode(hello{.lane = static_cast<std::uint16_t>(lane),
                                  .lanes = static_cast<std::uint16_t>(halves_.size()),
                                  .link = peer_offer_->link,
                                  .from = context_.options.self,
                                  .to = options_.peer,
                                  .acceptor_token = peer_offer_->secret,
                                  .initiator_token = secret_});
  // A fresh socket takes 80 bytes at once; one that does not is of no use.
  const auto sent = ::send(half.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(bytes.size())) {
    redial_later(lane, "send: " + what_errno(errno));
    return std::nullopt;
  }
  half.now = dial_state::greeting;
  engine_.rearm(half.watch, EPOLLIN);
  return std::nullopt;
}

tcp_link::trouble tcp_link::read_reply(std::size_t lane) {
  auto& half = halves_[lane];
  const auto got =
      ::recv(half.fd.get(), half.reply.data() + half.got, reply_size - half.got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (got <= 0) {
    redial_later(lane, got == 0 ? "the peer closed the connection" : "recv: " + what_errno(errno));
    return std::nullopt;
  }
  half.got += static_cast<std::size_t>(got);
  if (half.got < reply_size) return std::nullopt;
  auto reply = decode_reply(half.reply);
  if (!reply) return std::move(reply).error();
  if (reply->status != 0) {
    return troupe::error{static_cast<errc>(reply->status), "the peer refused the link"};
  }
  if (reply->from != options_.peer || !equal(reply->initiator_token, secret_)) {
    return troupe::error{errc::unauthorized, "whoever answered does not know our offer"};
  }
  half.now = dial_state::ready;
  engine_.rearm(half.watch, 0);  // frames wait in the socket until every lane is ready
  if (!std::all_of(halves_.begin(), halves_.end(),
                   [](const auto& h) { return h.now == dial_state::ready; })) {
    return std::nullopt;
  }
  return go_up();
}

// -- acceptor

std::optional<troupe::error> tcp_link::accept_lane(unique_fd& fd, const hello& said) {
  trouble why;
  {
    const std::lock_guard lock{state_mutex_};
    const auto now = state_.load();
    if (now != state::idle && now != state::connecting) {
      return troupe::error{errc::link_broken, "the link takes no lanes any more"};
    }
    if (said.to != context_.options.self || said.from != options_.peer) {
      return troupe::error{errc::stale_incarnation,
                           "the dialer means, or is, another life of a node"};
    }
    if (said.lanes == 0 || said.lanes > options_.lanes || said.lane >= said.lanes ||
        (!halves_.empty() && halves_.size() != said.lanes)) {
      return troupe::error{errc::invalid_config, "the dialer's lane numbers make no sense"};
    }
    halves_.resize(said.lanes);
    auto& half = halves_[said.lane];
    half.fd = std::move(fd);  // a lane that is dialled again replaces the one that failed
    half.now = dial_state::ready;
    half.initiator_token = said.initiator_token;
    tune_lane(half.fd.get(), context_.options.peer_silence);
    why = complete_acceptor();
  }
  after_handshake(std::move(why));
  return std::nullopt;
}

tcp_link::trouble tcp_link::complete_acceptor() {
  if (!peer_offer_ || halves_.empty()) return std::nullopt;
  for (const auto& half : halves_) {
    if (half.now != dial_state::ready) return std::nullopt;
    if (!equal(half.initiator_token, peer_offer_->secret)) {
      return troupe::error{errc::unauthorized,
                           "the dialer does not own the offer that we were given"};
    }
  }
  const auto bytes = encode(hello_reply{
      .status = 0, .from = context_.options.self, .initiator_token = peer_offer_->secret});
  for (std::size_t i = 0; i < halves_.size(); ++i) {
    auto& half = halves_[i];
    if (::send(half.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) !=
        static_cast<ssize_t>(bytes.size())) {
      return troupe::error{errc::peer_lost, "the dialer left during the handshake"};
    }
    auto watch = engine_.watch(half.fd.get(), 0, shared_from_this(), i);
    if (!watch) return std::move(watch).error();
    half.watch = *watch;
    half.answered = true;
  }
  return go_up();
}

tcp_link::trouble tcp_link::go_up() {
  for (std::size_t i = 0; i < halves_.size(); ++i) {
    lanes_.push_back(
        std::make_unique<tcp_lane>(*this, i, std::move(halves_[i].fd), halves_[i].watch));
  }
  halves_.clear();
  if (connect_timer_) engine_.cancel(*connect_timer_);
  for (const auto timer : redial_timers_) engine_.cancel(timer);
  redial_timers_.clear();
  door_->forget(number_);
  state_.store(state::up, std::memory_order_release);
  for (const auto& lane : lanes_) engine_.rearm(lane->watch(), EPOLLIN);
  engine_.add_poller(shared_from_this());
  return std::nullopt;
}

}  // namespace troupe::transport::tcp
