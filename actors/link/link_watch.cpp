#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/keep_alive.hpp"

namespace troupe::actors::links {

namespace {

/// How many polls read the link when the watch itself reads it.
constexpr std::size_t polls_per_watch = 256;

}  // namespace

bool peer_link::is_up() const {
  return phase_ == phase::up;
}

/// Whether something waits for the peer.
bool peer_link::in_flight() const {
  return !sessions_.empty() || !fencing_.empty();
}

bool peer_link::worth_watching() const {
  switch (phase_) {
    case phase::up: return !peer_leaves_ && in_flight();
    case phase::dialling:
    case phase::connecting: return broke_ && in_flight();
    case phase::ending: return false;
  }
  return false;
}

/// Whether, since the last look, the link carried anything that only a living peer can have sent or
/// let through.
bool peer_link::moved() {
  const auto signs = ear_->signs.load(std::memory_order_relaxed);
  if (std::exchange(signs_seen_, signs) != signs) return true;
  switch (choice_.kind) {
    case transport::backend_kind::tcp: {
      // A slow wire needs long for the bytes queued before our question. The kernel of a peer that
      // stands still takes some megabytes, and then no more.
      const auto stats = link_->stats();
      const auto bytes = stats.bytes_in + stats.bytes_out;
      return std::exchange(bytes_seen_, bytes) != bytes;
    }
    case transport::backend_kind::rdma:
      // The question waits in the queue pair behind these batches. The NIC reports a dead wire.
      return std::ranges::any_of(batches_,
                                 [this](const auto& batch) { return batch.first < asked_before_; });
    case transport::backend_kind::shm:
    case transport::backend_kind::xgmi: return false;  // the bytes are our own copies
  }
  return false;
}

void peer_link::ask_over_link() {
  if (!is_up()) return;
  asked_before_ = next_batch_;
  // A link that takes no frames is silent as well.
  (void)link_->send_frame(encode(keep_alive{keep_alive::word::question, context_->polled}));
}

/// Asks the actor of the other end. An answer shows that its process lives, whatever has become of
/// the link.
void peer_link::ask_process() {
  if (!other_end_) return;
  around_.ask_whether_alive(other_end_, [this] { on_process_answered(); });
}

std::string peer_link::silent_for() const {
  return "silent for " + std::to_string(pulse_.silence(around_.now()).count()) + " ms";
}

void peer_link::lose_peer() {
  std::string sentence = peer_.name + " has been " + silent_for() +
                         " and answers on no path: it is frozen, or is cut off";
  if (broke_) sentence += "; the link to it broke before (" + last_break_ + ")";
  logger("link")->warn("link to {} ({:016x}) over {}: {}", peer_.name, peer_.incarnation,
                       transport::to_string(choice_.kind), sentence);
  end_link({errc::peer_lost, std::move(sentence)});
}

void peer_link::judge_peer() {
  switch (pulse_.look(around_.now())) {
    case peer_liveness::advice::nothing: return;
    case peer_liveness::advice::ask:
      ask_over_link();
      if (!is_up()) ask_process();
      return;
    case peer_liveness::advice::ask_both_ways:
      ask_over_link();
      ask_process();
      return;
    case peer_liveness::advice::link_is_silent:
      // An engine that polls may compute for longer, and its link is read only afterwards.
      if (!is_up() || context_->polled || ear_->peer_polls.load(std::memory_order_relaxed)) {
        pulse_.sign(around_.now());
        return;
      }
      break_link({errc::link_broken, peer_.name + " was " + silent_for()});
      return;
    case peer_liveness::advice::peer_is_silent:
      // What the peer sent may still be unread.
      if (is_up() && context_->polled) around_.read(*link_, polls_per_watch);
      if (is_up() && moved()) {
        pulse_.sign(around_.now());
        return;
      }
      lose_peer();
      return;
  }
}

void peer_link::introduce() const {
  if (!context_->polled) return;
  (void)link_->send_frame(encode(keep_alive{keep_alive::word::answer, true}));
}

void peer_link::on_process_answered() {
  pulse_.word(around_.now());
  // While no link is up to carry a sign of life, this counts as one over the link.
  if (!is_up()) pulse_.sign(around_.now());
}

void peer_link::watch() {
  if (watching_ || !worth_watching()) return;
  watching_ = true;
  pulse_.begin(around_.now());
  around_.later(pulse_.period(), {check_peer_alive{}});
}

void peer_link::on_check_peer_alive() {
  watching_ = false;
  if (!worth_watching()) return;
  if (is_up()) {
    // Our own threads may not have read what has arrived. An engine that polls reads it itself.
    const bool doubtful = pulse_.silence(around_.now()) >= context_->settings.peer_silence / 2;
    if (doubtful && !context_->polled) around_.read(*link_, polls_per_watch);
    if (moved()) pulse_.sign(around_.now());
  }
  judge_peer();
  if (watching_ || !worth_watching()) return;
  watching_ = true;
  around_.later(pulse_.period(), {check_peer_alive{}});
}

}  // namespace troupe::actors::links
