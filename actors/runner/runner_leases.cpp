#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/runner/operation_runner.hpp"

namespace troupe::actors::operations {

namespace {

using lapse = cache_leases::lapse;

/// What happened to the holder.
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

}  // namespace

/// Ends a sealed source that no living decode rank has asked for.
void operation_runner::reclaim(operation_id operation, source& src, const lapse& over) {
  // While it waits for another decode rank, the retry window bounds the wait.
  if (src.lost()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(over.waited);
  const troupe::error why{errc::lease_expired,
                          "request `" + src.spec().request +
                              "` is sealed and no decode rank has asked for it for " +
                              time_text(waited) +
                              "; ask sooner, name the decode nodes in `held_for`, or raise "
                              "limits.source_lease (" +
                              time_text(context_->settings.source_lease) + ")"};
  logger("operations")
      ->warn("reclaims {} of request {}, which nobody has asked for in {}",
             count_of(src.block_count(), "block"), src.spec().request, time_text(waited));
  conclude_source(operation, why, session_event{abort_session{why}});
}

void operation_runner::source_lapses(operation_id operation, source& src, const lapse& over) {
  if (src.concluded) return;
  if (over.why == cache_leases::cause::unread) {
    reclaim(operation, src, over);
    return;
  }
  const troupe::error why{errc::peer_lost, over.peer + fate(over, context_->settings.source_lease) +
                                               " and had not asked for request `" +
                                               src.spec().request + "`, which is held for it"};
  logger("operations")->info("request {}: {}", src.spec().request, why.message);
  src.lost_unasked(over.peer, replica_of(over.peer));
  place_lost(operation, src, why);
}

void operation_runner::lapsed(const std::vector<cache_leases::lapse>& lapses) {
  for (const auto& over : lapses) {
    const auto& length = context_->settings.source_lease;
    if (over.met != transfer_id{}) {
      end_hold(over.met);
      tell_session(over.met,
                   session_event{link_is_lost{{errc::peer_lost, over.peer + fate(over, length)}}});
    } else if (const auto src = sources_.find(over.operation); src != sources_.end()) {
      source_lapses(over.operation, src->second, over);
    } else if (receives_.contains(over.operation)) {
      fail_receive(over.operation, {errc::peer_lost, over.peer + fate(over, length)});
    }
  }
}

void operation_runner::watch_leases() {
  if (lease_beat_ || leases_.empty()) return;
  lease_beat_ = around_.now() + leases_.beat_period(context_->settings.heartbeat_interval);
  deadlines_.emplace(*lease_beat_, timer::leases, 0);
}

void operation_runner::lease_beat() {
  lease_beat_.reset();
  const bool supervised = !context_->registration.why_not();
  lapsed(leases_.beat(around_.now(),
                      supervised ? cache_leases::news::current : cache_leases::news::old));
  watch_leases();
}

void operation_runner::on_membership_changed(membership_changed& news) {
  members_ = std::move(news.members);
  // A life that is no member any more asks for no link.
  if (members_->collecting == 0) {
    std::erase_if(former_lives_, [&](const auto& former) {
      return find_member(*members_, former.first) == nullptr;
    });
  }
  lapsed(leases_.see(members_, around_.now()));
  place_ranks();
}

void operation_runner::on_heartbeat_answered(heartbeat_answered& news) {
  lapsed(leases_.answered({news.supervisor_incarnation, news.epoch}, news.asked, around_.now()));
}

}  // namespace troupe::actors::operations
