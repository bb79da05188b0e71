#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/keep_alive.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::link_parts {

namespace {

/// Taken from a link in one look by who reads it himself.
constexpr std::size_t frames_per_watch = 256;

bool is_up(const link_state& st) {
  return st.now == link_state::phase::up;
}

/// Something waits for the peer.
bool in_flight(const link_state& st) {
  return !st.sessions.empty() || !st.fencing.empty();
}

bool worth_watching(const link_state& st) {
  switch (st.now) {
    case link_state::phase::up: return !st.peer_leaves && in_flight(st);
    case link_state::phase::dialling:
    case link_state::phase::connecting: return st.broke && in_flight(st);
    case link_state::phase::ending: return false;
  }
  return false;
}

/// What came over the link since the last look that only a living peer can have sent, or let through.
bool moved(link_state& st) {
  const auto signs = st.ear->signs.load(std::memory_order_relaxed);
  if (std::exchange(st.signs_seen, signs) != signs) return true;
  switch (st.choice.kind) {
    case transport::backend_kind::tcp: {
      // A slow wire takes long with what is before our question. Of a peer that stands still the
      // kernel takes some megabytes, and then no more.
      const auto stats = st.link->stats();
      const auto bytes = stats.bytes_in + stats.bytes_out;
      return std::exchange(st.bytes_seen, bytes) != bytes;
    }
    case transport::backend_kind::rdma:
      // The question waits in the queue pair behind these. That the wire is dead, the NIC says.
      return std::ranges::any_of(
          st.batches, [&st](const auto& batch) { return batch.first < st.asked_before; });
    case transport::backend_kind::shm:
    case transport::backend_kind::xgmi: return false;  // the bytes are our own copies
  }
  return false;
}

void ask_link(link_state& st) {
  if (!is_up(st)) return;
  st.asked_before = st.next_batch;
  // A link that takes no frames is silent as well.
  (void)st.link->send_frame(encode(keep_alive{keep_alive::word::question, st.context->polled}));
}

/// The actor of the other end: its process lives, whatever has become of the link.
void ask_process(self_pointer self) {
  auto& st = self->state;
  if (!st.other_end) return;
  self->request(st.other_end, st.context->settings.peer_silence, report_atom::value)
      .then([self](const link_report&) { heard_besides(self->state); }, [](const caf::error&) {});
}

std::string silent_for(const link_state& st) {
  return "silent for " + std::to_string(st.pulse.silence(now()).count()) + " ms";
}

void lose_peer(self_pointer self) {
  const auto& st = self->state;
  std::string sentence = st.peer.name + " has been " + silent_for(st) +
                         " and answers on no way: it stands still, or is cut off";
  if (st.broke) sentence += "; the link to it broke before (" + st.last_break + ")";
  logger("link")->warn("link to {} ({:016x}) over {}: {}", st.peer.name, st.peer.incarnation,
                       transport::to_string(st.choice.kind), sentence);
  end_link(self, {errc::peer_lost, std::move(sentence)});
}

void judge_peer(self_pointer self) {
  auto& st = self->state;
  switch (st.pulse.look(now())) {
    case link_pulse::advice::nothing: return;
    case link_pulse::advice::ask:
      ask_link(st);
      if (!is_up(st)) ask_process(self);
      return;
    case link_pulse::advice::ask_both_ways:
      ask_link(st);
      ask_process(self);
      return;
    case link_pulse::advice::link_is_silent:
      // An engine that polls may compute for longer than that: its link is read afterwards.
      if (!is_up(st) || st.context->polled || st.ear->peer_polls.load(std::memory_order_relaxed)) {
        st.pulse.sign(now());
        return;
      }
      break_link(self, {errc::link_broken, st.peer.name + " was " + silent_for(st)});
      return;
    case link_pulse::advice::peer_is_silent:
      // Nobody else may have read what it said.
      if (is_up(st) && st.context->polled) read_out(st, frames_per_watch);
      if (is_up(st) && moved(st)) {
        st.pulse.sign(now());
        return;
      }
      lose_peer(self);
      return;
  }
}

}  // namespace

void introduce(const link_state& st) {
  if (!st.context->polled) return;
  (void)st.link->send_frame(encode(keep_alive{keep_alive::word::answer, true}));
}

/// A thread of the scheduler that makes progress adopts a unit for that (`engine`), for good: what it
/// made runnable later would wait there for the next progress. So it gets one only meanwhile.
void read_out(link_state& st, std::size_t frames) {
  {
    const inline_executor::scope meanwhile{*st.reader};
    for (std::size_t rounds = 0; rounds < frames && st.link->poll(); ++rounds) {
    }
  }
  const inline_executor::scope hands_over{
      *st.reader};  // what was made runnable before it was adopted
}

void heard_besides(link_state& st) {
  st.pulse.word(now());
  // While there is no link that could say anything, it counts as if that had.
  if (!is_up(st)) st.pulse.sign(now());
}

void watch(self_pointer self) {
  auto& st = self->state;
  if (st.watching || !worth_watching(st)) return;
  st.watching = true;
  st.pulse.begin(now());
  self->delayed_send(self, st.pulse.period(), link_command{check_peer_alive{}});
}

void on_check_peer_alive(self_pointer self) {
  auto& st = self->state;
  st.watching = false;
  if (!worth_watching(st)) return;
  if (is_up(st)) {
    // Our own threads may not have come to read what is here. Where the engine polls they are its.
    const bool doubtful = st.pulse.silence(now()) >= st.context->settings.peer_silence / 2;
    if (doubtful && !st.context->polled) read_out(st, frames_per_watch);
    if (moved(st)) st.pulse.sign(now());
  }
  judge_peer(self);
  if (st.watching || !worth_watching(st)) return;
  st.watching = true;
  self->delayed_send(self, st.pulse.period(), link_command{check_peer_alive{}});
}

}  // namespace troupe::actors::link_parts
