#include <algorithm>
#include <cerrno>
#include <string>

#include <sys/epoll.h>
#include <sys/socket.h>

#include "troupe/transport/link_check.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/random.hpp"
#include "troupe/transport/tcp/tcp_link.hpp"

// The handshake, from offers to lanes. The initiator dials every lane, greets and answers the
// listener's challenge. The acceptor sends its own proofs once all lanes have been proved, so the
// link goes up at the acceptor first and no frame can arrive too early.
namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t connect_timeout_key = ~std::uint64_t{0};
constexpr std::chrono::milliseconds redial_after{50};

bool has_ended(const owned_fd& fd) {
  std::byte next{};
  const auto got = ::recv(fd.get(), &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

result<void> tcp_link::connect(const link_offer& peer) {
  if (auto ok = check_offer(backend_kind::tcp, options_.peer, peer); !ok) return ok;
  auto said = decode_offer(peer.payload);
  if (!said) return fail(std::move(said).error());
  auto address = offered_address(said->host, said->port);
  if (!address) return fail(std::move(address).error());
  trouble why;
  {
    const std::lock_guard lock{state_mutex_};
    if (state_.load() != state::idle) {
      return fail(errc::link_broken, "connect was called before, or the link is closed");
    }
    if (options_.role == link_role::initiator) {
      peer_address_ = *address;
      halves_.resize(std::min<std::size_t>(options_.lanes, said->lanes));
    }
    peer_offer_ = std::move(*said);
    key_ = options_.role == link_role::initiator ? key_of_lanes(peer_offer_->secret, secret_)
                                                 : key_of_lanes(secret_, peer_offer_->secret);
    state_.store(state::connecting, std::memory_order_release);
    connect_timer_ = engine_.call_at(std::chrono::steady_clock::now() + options_.connect_timeout,
                                     shared_from_this(), connect_timeout_key);
    if (options_.role == link_role::initiator) {
      for (std::size_t i = 0; i < halves_.size() && !why; ++i) why = dial_lane(i);
    } else {
      why = check_held_lanes();
    }
  }
  after_handshake(std::move(why));
  return {};
}

// Called after each step, without the lock: tells the sink what the step decided.
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
    return;  // the next round checks the copies
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
  if (!fd) return redial_later(lane, fd.error().message);
  auto watch = engine_.watch(fd->get(), EPOLLOUT, shared_from_this(), lane);
  if (!watch) return std::move(watch).error();
  half.fd = std::move(*fd);
  half.watch = *watch;
  half.now = dial_state::connecting;
  half.got = 0;
  return std::nullopt;
}

// Dials again later, which is no trouble: the listener drops the oldest of too many unproved
// connections, which may have been ours.
tcp_link::trouble tcp_link::redial_later(std::size_t lane, std::string why) {
  last_refusal_ = std::move(why);
  drop_half(halves_[lane]);
  redial_timers_.push_back(
      engine_.call_at(std::chrono::steady_clock::now() + redial_after, shared_from_this(), lane));
  return std::nullopt;
}

void tcp_link::drop_half(half_lane& half) {
  if (half.fd) engine_.unwatch(half.watch);
  half.fd.reset();
  half.now = dial_state::waiting;
  half.answered = false;
}

// Tells the other end, so that it does not wait for its timeout, nor take an abandoned link for a
// dead peer. Best effort: the connection closes right after.
void tcp_link::leave_half(half_lane& half, errc why) {
  // Before the proof no link at the other end would receive it.
  const bool proved = half.now == dial_state::proving || half.now == dial_state::ready;
  if (!half.fd || !proved) return;
  const auto say = [&](const auto& bytes) {
    [[maybe_unused]] const auto sent =
        ::send(half.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  if (options_.role == link_role::acceptor && !half.answered) {
    say(refusal_of(why));
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
    case dial_state::greeting:
    case dial_state::proving: return read_reply(lane);
    case dial_state::ready: return std::nullopt;
  }
  return std::nullopt;
}

tcp_link::trouble tcp_link::greet(std::size_t lane) {
  auto& half = halves_[lane];
  int problem = 0;
  socklen_t size = sizeof problem;
  ::getsockopt(half.fd.get(), SOL_SOCKET, SO_ERROR, &problem, &size);
  if (problem != 0) return redial_later(lane, "connect: " + what_errno(problem));
  hello said{.lane = static_cast<std::uint16_t>(lane),
             .lanes = static_cast<std::uint16_t>(halves_.size()),
             .link = peer_offer_->link,
             .from = context_.options.self,
             .to = options_.peer,
             .drawn = {}};
  random_bytes(said.drawn);
  half.greeting = encode(said);
  // A fresh socket accepts 80 bytes at once; give up any other.
  const auto sent =
      ::send(half.fd.get(), half.greeting.data(), hello_size, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(hello_size)) {
    return redial_later(lane, "send: " + what_errno(errno));
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
    return redial_later(lane,
                        got == 0 ? "the peer closed the connection" : "recv: " + what_errno(errno));
  }
  half.got += static_cast<std::size_t>(got);
  if (half.got < reply_size) return std::nullopt;
  auto reply = decode_reply(half.reply);
  if (!reply) return std::move(reply).error();
  half.got = 0;
  switch (reply->kind) {
    case reply_kind::refusal: return on_refusal(lane, static_cast<errc>(reply->status));
    case reply_kind::challenge:
      if (half.now == dial_state::greeting) return answer_challenge(lane);
      break;
    case reply_kind::verdict:
      if (half.now == dial_state::proving) return on_verdict(lane, reply->body);
      break;
  }
  return troupe::error{errc::peer_unreachable,
                       "whoever answers at that address violates the protocol"};
}

tcp_link::trouble tcp_link::on_refusal(std::size_t lane, errc why) {
  // Only this node can have proved the lane, on a connection that it has lost since. The peer does
  // not replace that connection.
  if (why == errc::already_exists) {
    return troupe::error{errc::link_broken,
                         "the peer has lane " + std::to_string(lane) + " of the link already"};
  }
  return troupe::error{why, "the peer refused the link"};
}

tcp_link::trouble tcp_link::answer_challenge(std::size_t lane) {
  auto& half = halves_[lane];
  const auto ours =
      encode({.invitation = prove_invitation(peer_offer_->secret, half.greeting, half.reply),
              .proof = prove_lane(link_role::initiator, key_, half.greeting, half.reply)});
  half.proof = prove_lane(link_role::acceptor, key_, half.greeting, half.reply);
  const auto sent = ::send(half.fd.get(), ours.data(), ours.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(ours.size())) {
    return redial_later(lane, "send: " + what_errno(errno));
  }
  half.now = dial_state::proving;
  return std::nullopt;
}

tcp_link::trouble tcp_link::on_verdict(std::size_t lane, const lane_proof& shown) {
  auto& half = halves_[lane];
  if (!same_proof(half.proof, shown)) {
    return troupe::error{errc::unauthorized,
                         "whoever answered did not prove that it has both offers"};
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

std::optional<troupe::error> tcp_link::accept_lane(owned_fd& fd, const lane_claim& claim) {
  trouble why;
  {
    const std::lock_guard lock{state_mutex_};
    if (auto wrong = check_claim(claim)) return wrong;
    const auto& said = claim.said;
    halves_.resize(said.lanes);
    auto& half = halves_[said.lane];
    half.fd = std::move(fd);
    half.now = dial_state::proving;
    half.greeting = claim.greeting;
    half.reply = claim.challenge;
    half.proof = claim.shown.proof;
    tune_lane(half.fd.get(), context_.options.peer_silence);
    if (state_.load() == state::connecting) {
      prepare_verdict(half);
      why = complete_acceptor();
    }
  }
  after_handshake(std::move(why));
  return std::nullopt;
}

tcp_link::trouble tcp_link::check_claim(const lane_claim& claim) {
  const auto now = state_.load();
  if (now != state::idle && now != state::connecting) {
    return troupe::error{errc::link_broken, "the link takes no lanes any more"};
  }
  const auto invitation = prove_invitation(secret_, claim.greeting, claim.challenge);
  const auto proof = prove_lane(link_role::initiator, key_, claim.greeting, claim.challenge);
  // Without the dialer's offer there is no key yet; `check_held_lanes` checks the proof later.
  const bool right = same_proof(claim.shown.invitation, invitation) &&
                     (now == state::idle || same_proof(claim.shown.proof, proof));
  if (!right) {
    return troupe::error{errc::unauthorized,
                         "it did not prove that it has the offer of a link that waits"};
  }
  const auto& said = claim.said;
  if (said.to != context_.options.self || said.from != options_.peer) {
    return troupe::error{errc::stale_incarnation,
                         "the dialer addresses, or is, another life of a node"};
  }
  if (said.lanes == 0 || said.lanes > options_.lanes || said.lane >= said.lanes ||
      (!halves_.empty() && halves_.size() != said.lanes)) {
    return troupe::error{errc::invalid_config, "the dialer's lane numbers make no sense"};
  }
  // A proved lane is kept, unless its connection has ended.
  if (!halves_.empty() && halves_[said.lane].fd && !has_ended(halves_[said.lane].fd)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return troupe::error{errc::already_exists, "a second connection for lane " +
                                                   std::to_string(said.lane) +
                                                   " of a link, which is proved already"};
  }
  return std::nullopt;
}

void tcp_link::prepare_verdict(half_lane& half) const noexcept {
  half.reply =
      encode(hello_reply{.kind = reply_kind::verdict,
                         .status = 0,
                         .body = prove_lane(link_role::acceptor, key_, half.greeting, half.reply)});
  half.now = dial_state::ready;
}

// Checks the lanes that arrived before the dialer's offer. A wrong proof ends its connection, not
// the link.
tcp_link::trouble tcp_link::check_held_lanes() {
  for (auto& half : halves_) {
    if (half.now != dial_state::proving) continue;
    if (same_proof(half.proof, prove_lane(link_role::initiator, key_, half.greeting, half.reply))) {
      prepare_verdict(half);
      continue;
    }
    leave_half(half, errc::unauthorized);
    drop_half(half);
  }
  return complete_acceptor();
}

tcp_link::trouble tcp_link::complete_acceptor() {
  // Drop lanes whose connection has ended; the dialer dials them again.
  for (auto& half : halves_) {
    if (half.fd && has_ended(half.fd)) drop_half(half);
  }
  // The number of lanes came from the dropped connections, too, so forget it.
  if (std::ranges::none_of(halves_, [](const auto& half) { return bool{half.fd}; })) {
    halves_.clear();
    return std::nullopt;
  }
  for (const auto& half : halves_) {
    if (half.now != dial_state::ready) return std::nullopt;
  }
  for (std::size_t i = 0; i < halves_.size(); ++i) {
    auto& half = halves_[i];
    if (::send(half.fd.get(), half.reply.data(), reply_size, MSG_NOSIGNAL | MSG_DONTWAIT) !=
        static_cast<ssize_t>(reply_size)) {
      return troupe::error{errc::link_broken,
                           "the connection of lane " + std::to_string(i) +
                               " ended during the handshake: " + what_errno(errno)};
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
  // Before anyone may post: a post that fills a socket asks for EPOLLOUT.
  for (const auto& lane : lanes_) engine_.rearm(lane->watch(), EPOLLIN);
  state_.store(state::up, std::memory_order_release);
  engine_.add_poller(shared_from_this());
  return std::nullopt;
}

}  // namespace troupe::transport::tcp
