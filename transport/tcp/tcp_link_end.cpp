#include <array>
#include <utility>

#include <sys/socket.h>

#include "troupe/transport/tcp/tcp_link.hpp"

// How a link ends.
namespace troupe::transport::tcp {

namespace {

/// How long a link whose peer is gone still reads the peer's last session frames.
constexpr std::chrono::milliseconds longest_end{2000};

}  // namespace

/// Called when a lane shows that the peer is gone. The peer's last session frames may still be in
/// the socket of lane 0, or on their way there, and must be delivered, whichever lane is read
/// first. The engine's rounds read them without sleeping. A peer that said goodbye says it on lane
/// 0 as well, after its frames; from a peer that vanished, lane 0 is read until it is empty. The
/// time limit is for a peer that keeps sending, or that says goodbye on one lane only.
void tcp_link::end_after_frames(troupe::error why, bool said_goodbye) {
  {
    const std::lock_guard lock{state_mutex_};
    if (why_ending_ || !is_up()) return;
    why_ending_ = std::move(why);
    ending_until_ = std::chrono::steady_clock::now() + longest_end;
    ending_.store(said_goodbye ? ending::until_goodbye : ending::until_empty,
                  std::memory_order_release);
  }
  engine_.wake();
}

void tcp_link::end_now() {
  std::optional<troupe::error> why;
  {
    const std::lock_guard lock{state_mutex_};
    why = why_ending_;
  }
  if (why) break_link(std::move(*why));
}

/// Whether the time for the peer's last frames is over.
bool tcp_link::heard_out(steady_time now) {
  const std::lock_guard lock{state_mutex_};
  return now >= ending_until_;
}

void tcp_link::break_link(troupe::error why) {
  if (!end(state::broken, why)) return;
  sink_.deliver(broken_event{std::move(why)});
}

void tcp_link::close() {
  sink_.mute_broken();
  static_cast<void>(end(state::closed, {errc::aborted, "the link was closed"}));
}

// Returns true for the one call that ended the link.
bool tcp_link::end(state final_state, const troupe::error& why) {
  state before{};
  {
    const std::lock_guard lock{state_mutex_};
    before = state_.load(std::memory_order_acquire);
    if (before == state::broken || before == state::closed) return false;
    state_.store(final_state, std::memory_order_release);
    for (auto& half : halves_) {
      leave_half(half, final_state == state::closed ? errc::link_broken : why.code);
      drop_half(half);
    }
    for (const auto timer : redial_timers_) engine_.cancel(timer);
    if (connect_timer_) engine_.cancel(*connect_timer_);
  }
  door_->forget(number_);
  if (before == state::up) {
    if (!copies_.any()) engine_.remove_poller(this);  // otherwise `on_poll` removes it
    std::array<std::byte, header_size> goodbye{};
    encode(frame_header{.type = frame_type::goodbye}, goodbye.data());
    for (const auto& lane : lanes_) {
      if (final_state == state::closed) {
        lane->tx().push_control(goodbye);
        static_cast<void>(lane->tx().flush());
      }
      engine_.unwatch(lane->watch());
      ::shutdown(lane->fd(), SHUT_RDWR);
    }
  }
  fail_all(why);
  if (before == state::up) release_chunks();
  return true;
}

void tcp_link::fail_all(const troupe::error& why) {
  decltype(batches_) ended;
  {
    const std::lock_guard lock{batch_mutex_};
    ended.swap(batches_);
    for (const auto& [wire, batch] : ended) {
      batch->failure = why;
      close_books(*batch);
    }
  }
  for (const auto& [wire, batch] : ended) sink_.deliver(batch->outcome());
}

}  // namespace troupe::transport::tcp
