#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/port/engine_port_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::port {

namespace {

using lapse = cache_leases::lapse;

/// What became of the holder.
std::string fate(const lapse& over, std::chrono::milliseconds length) {
  switch (over.why) {
    case cache_leases::cause::down:
      return " is down" + (over.reason.empty() ? "" : " (" + over.reason + ")");
    case cache_leases::cause::replaced: return " was restarted";
    case cache_leases::cause::unheard: return " was not heard of for " + time_text(length);
    case cache_leases::cause::unread: break;
  }
  return {};
}

/// Sealed, and nobody has come who lives.
void reclaim(self_pointer self, operation_id operation, source& src, const lapse& over) {
  auto& st = self->state;
  // While it waits for another decode rank, the window bounds that.
  if (src.lost()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(over.waited);
  const troupe::error why{errc::lease_expired,
                          "request `" + src.spec().request +
                              "` is sealed and no decode rank has asked for it for " +
                              time_text(waited) +
                              "; ask sooner, name the decode nodes in `held_for`, or raise "
                              "limits.source_lease (" +
                              time_text(st.context->settings.source_lease) + ")"};
  logger("port")->warn("reclaims {} of request {}, which nobody has asked for in {}",
                       count_of(src.block_count(), "block"), src.spec().request, time_text(waited));
  conclude_source(self, operation, why, session_event{abort_session{why}});
}

void source_lapses(self_pointer self, operation_id operation, source& src, const lapse& over) {
  if (src.concluded) return;
  if (over.why == cache_leases::cause::unread) {
    reclaim(self, operation, src, over);
    return;
  }
  const troupe::error why{errc::peer_lost,
                          over.peer + fate(over, self->state.context->settings.source_lease) +
                              " and had not asked for request `" + src.spec().request +
                              "`, which is held for it"};
  logger("port")->info("request {}: {}", src.spec().request, why.message);
  src.lost_unasked(over.peer, replica_of(self->state, over.peer));
  place_lost(self, operation, src, why);
}

}  // namespace

void lapsed(self_pointer self, const std::vector<cache_leases::lapse>& lapses) {
  auto& st = self->state;
  for (const auto& over : lapses) {
    const auto& length = st.context->settings.source_lease;
    if (over.met != transfer_id{}) {
      end_hold(st, over.met);
      tell_session(st, over.met,
                   session_event{link_is_lost{{errc::peer_lost, over.peer + fate(over, length)}}});
    } else if (const auto src = st.sources.find(over.operation); src != st.sources.end()) {
      source_lapses(self, over.operation, src->second, over);
    } else if (st.receives.contains(over.operation)) {
      fail_receive(self, over.operation, {errc::peer_lost, over.peer + fate(over, length)});
    }
  }
}

void watch_leases(engine_port_state& st) {
  if (st.lease_beat || st.leases.empty()) return;
  st.lease_beat = now() + st.leases.beat_period(st.context->settings.heartbeat_interval);
  st.deadlines.emplace(*st.lease_beat, timer::leases, 0);
}

void lease_beat(self_pointer self) {
  auto& st = self->state;
  st.lease_beat.reset();
  const bool supervised = !st.context->registration.why_not();
  lapsed(self,
         st.leases.beat(now(), supervised ? cache_leases::news::current : cache_leases::news::old));
  watch_leases(st);
}

void on_membership_changed(self_pointer self, membership_changed& news) {
  auto& st = self->state;
  st.members = std::move(news.members);
  // A life that is no member asks for no link any more.
  if (st.members->collecting == 0) {
    std::erase_if(st.former_lives, [&](const auto& former) {
      return find_member(*st.members, former.first) == nullptr;
    });
  }
  lapsed(self, st.leases.see(st.members, now()));
  place_ranks(self);
}

void on_heartbeat_answered(self_pointer self, heartbeat_answered& news) {
  lapsed(self,
         self->state.leases.answered({news.supervisor_incarnation, news.epoch}, news.asked, now()));
}

}  // namespace troupe::actors::port
