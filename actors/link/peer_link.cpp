#include "troupe/actors/link/peer_link.hpp"

#include <string>
#include <utility>
#include <variant>

#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors::links {

peer_link::peer_link(link_surroundings& around, setup with)
    : around_{around},
      context_{std::move(with.context)},
      peer_{std::move(with.peer)},
      role_{with.role},
      asked_{with.asked},
      count_{context_},
      pulse_{context_->settings.peer_silence} {}

link_report peer_link::report() const {
  link_report r;
  r.peer = peer_.name;
  r.peer_incarnation = peer_.incarnation;
  if (chose_) r.backend = std::string{transport::to_string(choice_.kind)};
  r.reason = choice_.reason;
  switch (phase_) {
    case phase::dialling:
    case phase::connecting: r.state = broke_ ? "rebuilding" : "connecting"; break;
    case phase::up: r.state = "up"; break;
    case phase::ending: r.state = "broken"; break;
  }
  r.rebuilds = rebuilds_;
  r.last_break = last_break_;
  if (link_) {
    const auto stats = link_->stats();
    r.lanes = stats.lanes;
    r.bytes_out = stats.bytes_out;
    r.bytes_in = stats.bytes_in;
    r.in_flight = stats.in_flight;
    r.refused = stats.refused;
    r.posted = stats.batches_posted;
    r.completed = stats.batches_completed;
    r.failed = stats.batches_failed;
    for (const auto& lane : stats.by_lane) {
      r.by_lane.push_back({lane.device, lane.port, lane.gid_index, lane.gid, lane.requests_posted,
                           lane.requests_completed, lane.bytes,
                           static_cast<std::uint8_t>(lane.port_up ? 1 : 0), lane.port_downs,
                           lane.port_changes,
                           lane.port_retries ? static_cast<std::int64_t>(*lane.port_retries) : -1});
    }
  }
  return r;
}

void peer_link::begin() {
  if (is_dialler()) around_.reach_node();
}

void peer_link::handle(link_command& command) {
  std::visit(overloaded{[this](attach_session& x) { on_attach_session(std::move(x)); },
                        [this](detach_session& x) { on_detach_session(x); },
                        [this](say& x) { on_say(std::move(x)); },
                        [this](post_batch& x) { on_post_batch(std::move(x)); },
                        [this](fence_now& x) { on_fence_now(x); },
                        [this](close_link& x) { on_close_link(std::move(x)); },
                        [this](leave_link& x) { on_leave_link(std::move(x)); },
                        [this](peer_left& x) { on_peer_left(std::move(x)); },
                        [this](read_last_frames& x) { on_read_last_frames(std::move(x)); },
                        [this](dial_again&) { on_dial_again(); },
                        [this](look_for_dialler& x) { on_look_for_dialler(x); },
                        [this](look_for_room&) { on_look_for_room(); },
                        [this](check_peer_alive&) { on_check_peer_alive(); }},
             command.what);
}

void peer_link::handle(link_event& event) {
  if (event.generation != generation_ && !std::holds_alternative<fence_holds>(event.what)) return;
  std::visit(overloaded{[this](link_came_up&) { on_link_came_up(); },
                        [this](session_message& x) { on_session_message(std::move(x)); },
                        [this](transport::completion& x) { on_completion(std::move(x)); },
                        [this](fence_holds& x) { on_fence_holds(x); },
                        [this](link_broke& x) { on_link_broke(std::move(x)); }},
             event.what);
}

// The surroundings no longer report the acceptor of an attempt that failed.
void peer_link::on_end_down(const std::optional<std::string>& crashed) {
  if (!crashed || is_made_for_the_first_time()) {
    other_end_ended(crashed ? "the end of " + peer_.name + " crashed (" + *crashed + ")"
                            : peer_.name + " ended the link",
                    true);
  } else if (leaving_) {
    end_link(*leaving_);
  } else {
    on_node_down();
  }
}

void peer_link::on_node_down() {
  on_peer_left(peer_left{{errc::peer_lost, "the process of " + peer_.name + " is gone"}});
}

}  // namespace troupe::actors::links
