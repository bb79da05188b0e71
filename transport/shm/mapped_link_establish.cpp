#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/shm/mapped_link.hpp"
#include "troupe/transport/shm/tracing.hpp"

// How a link between processes of one host comes up: offers, the handshake over the socket, and the
// later messages on that socket.

namespace troupe::transport::shm {

namespace {

constexpr std::chrono::milliseconds dial_again{5};
constexpr int messages_a_turn = 512;

/// Whether a peer that has closed its socket said bye first.
bool said_bye(int socket) {
  auto last = receive_message(socket, fds_allowed::no);
  const auto* said = last ? std::get_if<received>(&*last) : nullptr;
  return said != nullptr && std::holds_alternative<bye_message>(said->body);
}

owned_fd new_doorbell() {
  return owned_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
}

}  // namespace

// -- offers

void mapped_link::expect_dialer() {
  if (options_.role == link_role::acceptor) listener_->expect(secret_, weak_from_this());
}

link_offer mapped_link::offer() const {
  shm_offer said;
  said.secret = secret_;
  said.pid = static_cast<std::uint32_t>(::getpid());
  const auto& address = listener_->address();
  std::copy_n(address.begin(), std::min(address.size(), said.address.size() - 1),
              said.address.begin());
  return {.kind = kind_, .owner = self_, .payload = said.encode()};
}

result<void> mapped_link::connect(const link_offer& peer) {
  if (auto ok = check_offer(kind_, options_.peer, peer); !ok) return ok;
  auto decoded = shm_offer::decode(peer.payload);
  if (!decoded) return fail(std::move(decoded).error());
  std::optional<dial_in> parked;
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::closed || state_ == link_phase::broken)
      return not_up(kind_, state_, why_broken_);
    if (state_ != link_phase::opened) {
      return fail(errc::already_exists,
                  "the " + std::string{to_string(kind_)} + " link was told to connect before");
    }
    state_ = link_phase::connecting;
    peer_offer_ = *decoded;
    deadline_ = engine_.call_at(std::chrono::steady_clock::now() + options_.connect_timeout,
                                shared_from_this(), deadline_timer);
    parked = std::exchange(parked_, std::nullopt);
  }
  if (options_.role == link_role::initiator) {
    dial();
  } else if (parked) {
    accept(std::move(*parked));
  }
  return {};
}

result<void> mapped_link::check_credentials(const peer_credentials& from) const {
  if (from.uid != our_uid_ || from.pid != peer_offer_->pid) {
    return fail(errc::unauthorized, peer_name() + " is process " + std::to_string(from.pid) +
                                        " of user " + std::to_string(from.uid) +
                                        ", its offer was made by process " +
                                        std::to_string(peer_offer_->pid) + ", and we are user " +
                                        std::to_string(our_uid_));
  }
  return {};
}

// -- dialer

void mapped_link::dial() {
  if (auto dialed = try_dial(); !dialed) break_link(std::move(dialed).error(), false);
}

result<void> mapped_link::try_dial() {
  const std::lock_guard control_lock{control_mutex_};
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::connecting || socket_) return {};
  auto socket = connect_to(peer_offer_->address.data());
  if (!socket) {
    if (socket.error().code != errc::overloaded) return fail(std::move(socket).error());
    engine_.call_at(std::chrono::steady_clock::now() + dial_again, shared_from_this(), dial_timer);
    return {};
  }
  auto from = credentials_of(socket->get());
  if (!from) return fail(std::move(from).error());
  if (auto ok = check_credentials(*from); !ok) return ok;
  peer_process_ = peer_process::open(from->pid);
  show_memory_to(*from);
  hello_message hello;
  hello.acceptor_token = peer_offer_->secret;
  hello.dialer = self_.value;
  hello.acceptor = options_.peer.value;
  hello.probe = {reinterpret_cast<std::uintptr_t>(&probe_value_), probe_value_};
  hello.owns_memory = we_own_memory_ ? 1 : 0;
  if (auto ok = send_message(socket->get(), hello); !ok) return ok;
  return watch_socket(std::move(*socket));
}

/// Under both locks.
result<void> mapped_link::watch_socket(owned_fd socket) {
  auto watch = engine_.watch(socket.get(), EPOLLIN, shared_from_this(), socket_key);
  if (!watch) return fail(std::move(watch).error());
  socket_ = std::move(socket);
  socket_watch_ = *watch;
  return {};
}

/// Under both locks.
result<void> mapped_link::on_welcome(received& in) {
  const auto& said = std::get<welcome_message>(in.body);
  if (options_.role != link_role::initiator || state_ != link_phase::connecting) {
    return fail(errc::unauthorized, peer_name() + " sent a welcome out of turn");
  }
  if (said.dialer_token != secret_ || said.dialer != self_.value ||
      said.acceptor != options_.peer.value || in.fds.size() != 3) {
    return fail(errc::unauthorized,
                peer_name() + "'s welcome does not prove that it has our offer");
  }
  auto control = control_mapping::map(std::move(in.fds[0]));
  if (!control) return fail(std::move(control).error());
  our_doorbell_ = std::move(in.fds[1]);
  peer_doorbell_ = std::move(in.fds[2]);
  use_control(std::move(*control));
  we_reach_peer_memory_ = peer_process_.shows(said.probe);
  peer_reaches_our_memory_ = said.reaches_dialer_memory == 1;
  peer_owns_memory_ = said.owns_memory == 1;
  ready_message ready;
  ready.reaches_acceptor_memory = we_reach_peer_memory_ ? 1 : 0;
  if (auto ok = send_message(socket_.get(), ready); !ok) return ok;
  if (auto ok = check_reach(); !ok) return ok;
  return become_up();
}

// -- acceptor

void mapped_link::accept(dial_in caller) {
  auto answered = answer_dialer(caller);
  // A wrong or late caller must not conclude that we are dead.
  if (caller.socket) static_cast<void>(send_message(caller.socket.get(), bye_message{}));
  if (!answered) break_link(std::move(answered).error(), false);
}

/// An error ends the link; a caller that is merely the wrong one is turned away without an error.
result<void> mapped_link::answer_dialer(dial_in& caller) {
  const std::lock_guard control_lock{control_mutex_};
  const std::lock_guard lock{mutex_};
  if (state_ == link_phase::opened) {
    parked_ = std::move(caller);
    return {};
  }
  if (state_ != link_phase::connecting || socket_) return {};
  if (caller.hello.dialer != options_.peer.value || caller.hello.acceptor != self_.value) {
    return fail(errc::stale_incarnation, "the dialer is incarnation " +
                                             std::to_string(caller.hello.dialer) + ", expected " +
                                             std::to_string(options_.peer.value));
  }
  if (auto ok = check_credentials(caller.from); !ok) return ok;
  auto control = control_mapping::create();
  if (!control) return fail(std::move(control).error());
  auto dialers_bell = new_doorbell();
  our_doorbell_ = new_doorbell();
  if (!dialers_bell || !our_doorbell_) {
    return fail(errc::overloaded,
                "eventfd: " + what_errno(errno) + "; raise the limit of open files");
  }
  peer_process_ = peer_process::open(caller.from.pid);
  show_memory_to(caller.from);
  welcome_message welcome;
  welcome.dialer_token = peer_offer_->secret;
  welcome.dialer = options_.peer.value;
  welcome.acceptor = self_.value;
  welcome.probe = {reinterpret_cast<std::uintptr_t>(&probe_value_), probe_value_};
  we_reach_peer_memory_ = peer_process_.shows(caller.hello.probe);
  peer_owns_memory_ = caller.hello.owns_memory == 1;
  welcome.reaches_dialer_memory = we_reach_peer_memory_ ? 1 : 0;
  welcome.owns_memory = we_own_memory_ ? 1 : 0;
  const std::array fds{control->fd(), dialers_bell.get(), our_doorbell_.get()};
  if (auto ok = send_message(caller.socket.get(), welcome, fds); !ok) {
    if (said_bye(caller.socket.get())) return fail(errc::link_broken, "the peer closed the link");
    return ok;
  }
  peer_doorbell_ = std::move(dialers_bell);
  use_control(std::move(*control));
  return watch_socket(std::move(caller.socket));
}

/// Under both locks.
result<void> mapped_link::on_ready_message(const ready_message& in) {
  if (options_.role != link_role::acceptor || state_ != link_phase::connecting || !control_) {
    return fail(errc::unauthorized, peer_name() + " sent a ready out of turn");
  }
  peer_reaches_our_memory_ = in.reaches_acceptor_memory == 1;
  if (auto ok = check_reach(); !ok) return ok;
  return become_up();
}

// -- memory of the engine

/// Under both locks. Not for `xgmi`, which is not for host memory.
void mapped_link::show_memory_to(const peer_credentials& peer) {
  we_own_memory_ = kind_ == backend_kind::shm && regions_.has_engine_memory();
  if (we_own_memory_) let_trace(peer.pid);
}

/// Only the handshake can probe, and it is over: if the peer still cannot access the memory, its
/// transfers fail with `backend_unavailable`.
bool mapped_link::show_memory_late() {
  if (we_own_memory_ || !let_trace(peer_process_.pid())) return false;
  peer_reaches_our_memory_ = true;
  return true;
}

/// Under both locks. Refuses a link over which every transfer would fail: there are other backends.
result<void> mapped_link::check_reach() const {
  const bool hidden_here = we_own_memory_ && !peer_reaches_our_memory_;
  const bool hidden_there = peer_owns_memory_ && !we_reach_peer_memory_;
  if (!hidden_here && !hidden_there) return {};
  return fail(errc::backend_unavailable,
              std::string{hidden_here ? "the peer may not reach this process's"
                                      : "this process may not reach the peer's"} +
                  " memory, of which a part is the engine's own (process_vm_readv: " +
                  why_not_traced(ptrace_scope()) + ")");
}

// -- up

void mapped_link::use_control(control_mapping control) {
  control_ = std::move(control);
  const auto page = control_.file_number();
  control_.close_fd();
  const bool dialer = options_.role == link_role::initiator;
  outgoing_ = dialer ? &control_->of_dialer : &control_->of_acceptor;
  incoming_ = dialer ? &control_->of_acceptor : &control_->of_dialer;
  // The peer initiates on `incoming_`, so the slots of our grants are there.
  slots_.emplace(std::span{incoming_->slots}, thread_order{page, dialer ? 1u : 0u});
  our_copies_.emplace(page, dialer ? 0u : 1u);
  producer_.emplace(outgoing_->ring, thread_order{page, dialer ? 0u : 1u});
  consumer_.emplace(incoming_->ring, thread_order{page, dialer ? 1u : 0u});
  on_control();
}

/// Under both locks.
result<void> mapped_link::become_up() {
  auto bell = engine_.watch(our_doorbell_.get(), EPOLLIN, shared_from_this(), doorbell_key);
  if (!bell) return fail(std::move(bell).error());
  doorbell_watch_ = *bell;
  // Optional, and not available on every kernel: the socket's end of file says the same, unless a
  // child of the peer holds the socket open.
  if (peer_process_.fd() >= 0) {
    if (auto death = engine_.watch(peer_process_.fd(), EPOLLIN, shared_from_this(), death_key)) {
      death_watch_ = *death;
    }
  }
  listener_->forget(secret_);
  if (deadline_) engine_.cancel(*std::exchange(deadline_, std::nullopt));
  state_ = link_phase::up;
  up_.store(true, std::memory_order_release);
  polled_ = true;
  engine_.add_poller(shared_from_this());
  sink_.put(up_event{});
  return {};
}

// -- messages on the socket

void mapped_link::drain_control(int turns) {
  std::optional<ending> end;
  for (bool more = true; more && !end && turns > 0; --turns) {
    const std::lock_guard control_lock{control_mutex_};
    end = read_socket(more);
  }
  sink_.deliver();
  if (end) end_after_frames(std::move(end->why), end->peer_is_dead);
}

/// Under the control lock.
std::optional<mapped_link::ending> mapped_link::read_socket(bool& more) {
  more = false;
  for (int left = messages_a_turn; socket_; --left) {
    if (left == 0) {
      more = true;
      return std::nullopt;
    }
    auto got = receive_message(socket_.get(), fds_allowed::yes);
    if (!got) return ending{std::move(got).error(), false};
    if (const auto* nothing = std::get_if<socket_state>(&*got)) {
      if (*nothing == socket_state::would_block) return std::nullopt;
      const std::lock_guard lock{mutex_};
      // Level-triggered: an end of file that stays watched would be reported for ever.
      if (socket_watch_) engine_.unwatch(*std::exchange(socket_watch_, std::nullopt));
      const bool dead = socket_end_is_death() || peer_process_.fd() < 0;
      auto said = peer_name() + "'s end of the link is gone; its process has ended";
      return ending{{errc::peer_lost, std::move(said)}, dead};
    }
    auto& in = std::get<received>(*got);
    if (std::holds_alternative<bye_message>(in.body)) {
      return ending{{errc::link_broken, "the peer closed the link"}, false};
    }
    if (auto ok = on_message(std::move(in)); !ok) return ending{std::move(ok).error(), false};
  }
  return std::nullopt;
}

/// Under the control lock.
result<void> mapped_link::on_message(received in) {
  if (std::holds_alternative<region_shared_message>(in.body) ||
      std::holds_alternative<gpu_region_shared_message>(in.body) ||
      std::holds_alternative<chunks_shared_message>(in.body)) {
    return on_shared(std::move(in));
  }
  if (const auto* gone = std::get_if<region_gone_message>(&in.body)) {
    on_gone(region_id{gone->region});
    return {};
  }
  if (const auto* closed = std::get_if<gpu_region_closed_message>(&in.body)) {
    return on_closed(region_id{closed->region});
  }
  const std::lock_guard lock{mutex_};
  if (state_ == link_phase::broken || state_ == link_phase::closed) return {};
  if (std::holds_alternative<welcome_message>(in.body)) return on_welcome(in);
  if (const auto* ready = std::get_if<ready_message>(&in.body)) return on_ready_message(*ready);
  return fail(errc::unauthorized, peer_name() + " sent a hello on a link that is up");
}

}  // namespace troupe::transport::shm
