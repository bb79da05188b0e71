#include "session_simulation.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/transfer/receive_session.hpp"
#include "troupe/actors/transfer/send_session.hpp"

#include "simulation_judge.hpp"
#include "simulation_scenario.hpp"

namespace troupe::actors::simulation {
namespace {

constexpr transfer_id the_transfer{77};

struct posted_batch {
  post_slice what;
  side by;
  bool landed{false};
  std::optional<error> failure;
  std::uint32_t link{0};  ///< the link over which it was posted
  bool shut_out{false};   ///< refused because the peer's end of the link has broken
};

struct sent_frame {
  session_message message;
  std::uint32_t link{0};
};

time_point at(std::uint32_t ms) {
  return time_point{} + std::chrono::milliseconds{ms};
}

/// The two engines, the two shells around the machines under test, and the wire between them.
class world {
 public:
  world(std::uint64_t seed, std::string* trace)
      : dice_{seed}, scenario_{draw(dice_, timeline_)}, trace_{trace} {}

  report run() {
    report_.faults = scenario_.faults;
    while (!timeline_.empty() && judge_.violation().empty()) {
      const auto next = timeline_.take();
      now_ = next.time;
      if (++report_.events > 5000) judge_.violate("the run does not come to its end");
      if (trace_) {
        note(std::string{next.where == decode ? "decode  " : "prefill "} +
             kind_names[static_cast<std::size_t>(next.what)] + " " + std::to_string(next.index));
      }
      handle(next);
    }
    if (judge_.violation().empty()) check_end();
    report_.violation = judge_.violation();
    return report_;
  }

 private:
  // -- time

  void schedule(std::uint32_t time, kind what, side where, std::uint32_t index) {
    timeline_.schedule(time, what, where, index);
  }
  std::uint32_t soon() { return now_ + dice_.upto(scenario_.latency); }

  void handle(const event& e) {
    switch (e.what) {
      case kind::start: return begin_decode();
      case kind::frame: return deliver(e.where, e.index);
      case kind::source_ready: return engine_ready(scenario_.chunks[e.index]);
      case kind::seal: return engine_seals();
      case kind::land: return land(e.index);
      case kind::ghost: return ghost(e.index);
      case kind::notice: return give_notice(e.index);
      case kind::complete: return complete(e.where, e.index);
      case kind::fence_effective: sides_[e.where].fence_effective = true; return;
      case kind::quiescent: return give_quiescent(e.where);
      case kind::whole: return carry_out(decode, receiver().received_whole());
      case kind::engine_abort: return abort_session(e.where);
      case kind::link_breaks:
        course_.broken = true;
        schedule(soon(), kind::link_told, decode, 0);
        schedule(soon(), kind::link_told, prefill, 0);
        return;
      case kind::link_told: return tell_link_lost(e.where);
      case kind::link_swaps: return swap_link();
      case kind::end_breaks: return break_end(e.where, e.index);
      case kind::link_back: return tell_link_back(e.where, e.index);
      case kind::expire: return expire(e.where);
    }
  }

  // -- the engines and the shells

  receive_session& receiver() {
    if (!receiver_) {
      transfer_request request;
      request.transfer = the_transfer;
      request.request = "r";
      request.mode = scenario_.mode;
      request.token_begin = scenario_.prefix;
      request.token_end = scenario_.tokens;
      request.expect = scenario_.expect;
      receiver_.emplace(receive_session::options{scenario_.layers, scenario_.layers_per_batch,
                                                 scenario_.max_in_flight, scenario_.has_state,
                                                 at(scenario_.deadlines[decode])},
                        request);
      sides_[decode].exists = true;
    }
    return *receiver_;
  }

  void begin_decode() { carry_out(decode, receiver().start()); }

  void begin_prefill(const transfer_request& request) {
    if (sender_ && request.progress) return asked_again(request);
    if (sender_) return judge_.violate("a second request was sent");
    sender_.emplace(send_session::options{scenario_.layers, scenario_.layers_per_batch,
                                          scenario_.max_in_flight, scenario_.has_state,
                                          at(scenario_.deadlines[prefill])});
    sides_[prefill].exists = true;
    std::vector<std::uint32_t> ready(course_.ready.begin(),
                                     course_.ready.begin() + scenario_.layers);
    const auto sealed = course_.sealed ? std::optional{scenario_.seal_tokens} : std::nullopt;
    carry_out(prefill, sender_->start(request, ready, sealed,
                                      course_.sealed ? scenario_.aux : std::vector<std::byte>{}));
    if (sides_[prefill].engine_aborted) {
      carry_out(prefill, sender_->local_abort({errc::aborted, "the engine gave up before"}));
    }
    if (now_ >= scenario_.deadlines[prefill]) expire(prefill);
  }

  void engine_ready(const chunk& c) {
    if (course_.sealed) return;
    for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
      course_.ready[layer] = std::max(course_.ready[layer], c.token_end);
    }
    if (sender_) carry_out(prefill, sender_->source_ready(c.layer_begin, c.layer_end, c.token_end));
  }

  void engine_seals() {
    course_.sealed = true;
    if (!sender_) return;
    carry_out(prefill, sender_->sealed(scenario_.seal_tokens, scenario_.aux));
    if (dice_.one_in(4)) carry_out(prefill, sender_->sealed(scenario_.seal_tokens, scenario_.aux));
  }

  void abort_session(side s) {
    sides_[s].engine_aborted = true;
    const error why{errc::aborted, "the engine gave up"};
    if (s == decode) return carry_out(s, receiver().local_abort(why));
    if (sender_) carry_out(s, sender_->local_abort(why));
  }

  void tell_link_lost(side s) {
    sides_[s].knows_link_is_lost = true;
    const error why{errc::peer_lost, "the peer is gone"};
    if (s == decode) return carry_out(s, receiver().link_lost(why));
    if (sender_) carry_out(s, sender_->link_lost(why));
  }

  // -- replacing a link, as the link actors do it

  /// Replaces the wire. Everything in flight on the old one is lost, except for bytes that may
  /// still move until the old link's fence holds at both sides. Each end notices at its own time;
  /// the next link comes once both have.
  void swap_link() {
    if (course_.broken) return;
    ++course_.link;
    course_.old_until = now_ + dice_.upto(20);
    const auto apart = dice_.one_in(3) ? 0 : dice_.upto(40);
    const auto first = dice_.one_in(2) ? decode : prefill;
    const auto seen = now_ + dice_.upto(10);
    schedule(seen, kind::end_breaks, first, course_.link);
    schedule(seen + apart, kind::end_breaks, other(first), course_.link);
    const auto up = seen + apart + dice_.upto(15);
    schedule(up + dice_.upto(6), kind::link_back, decode, course_.link);
    schedule(up + dice_.upto(6), kind::link_back, prefill, course_.link);
  }

  /// From now on this end posts, sends and receives nothing, and refuses the peer's operations.
  void break_end(side s, std::uint32_t next) {
    if (sides_[s].knows_link < next) sides_[s].link_gone = true;
  }

  void tell_link_back(side s, std::uint32_t which) {
    auto& w = sides_[s];
    if (which != course_.link || w.knows_link == which || course_.broken) return;
    judge_.link_is_back(s);
    last_delivery_[s] = now_;
    for (const auto& word : last_words_[s]) transmit(s, word);
    if (w.unpinned) return;
    if (s == decode) return carry_out(s, receiver().link_back());
    if (sender_) carry_out(s, sender_->link_back());
  }

  void asked_again(const transfer_request& request) {
    if (!last_words_[prefill].empty()) {
      for (const auto& word : last_words_[prefill]) transmit(prefill, word);
      return;
    }
    if (sides_[prefill].unpinned)
      return judge_.violate("it ended without a word to the other side");
    carry_out(prefill, sender_->asked_again(request));
    if (dice_.one_in(8)) carry_out(prefill, sender_->asked_again(request));
  }

  void expire(side s) {
    if (s == prefill && !sender_) return;
    carry_out(s, s == decode ? receiver().expire(at(now_)) : sender_->expire(at(now_)));
    if (now_ >= scenario_.deadlines[s] && sides_[s].concluded != 1) {
      judge_.violate("the deadline passed without an outcome");
    }
  }

  void give_quiescent(side s) {
    sides_[s].fence_effective = true;
    sides_[s].quiescent_given = true;
    carry_out(s, s == decode ? receiver().quiescent() : sender_->quiescent());
  }

  void send(side from, const session_message& message) {
    judge_.sends(from, message, the_transfer);
    if (is_final_message(message)) last_words_[from].push_back(message);
    transmit(from, message);
  }

  void transmit(side from, const session_message& message) {
    if (sides_[from].link_gone) return;
    // Frames stay in order.
    auto& last = last_delivery_[from];
    last = std::max(last, soon());
    schedule(last, kind::frame, other(from), static_cast<std::uint32_t>(frames_.size()));
    frames_.push_back({message, sides_[from].knows_link});
  }

  void deliver(side to, std::uint32_t index) {
    if (course_.broken || !arrives(to, frames_[index].link)) return;
    auto message = frames_[index].message;
    if (index % 16 == 0) message = through_the_codec(message);
    if (const auto* m = std::get_if<transfer_request>(&message)) return begin_prefill(*m);
    // The request was lost with the former link, so the node answers messages of an unknown
    // transfer.
    if (to == prefill && !sender_) return;
    if (const auto* m = std::get_if<transfer_abort>(&message)) {
      if (!sides_[to].unpinned) sides_[to].got_abort = true;
      if (sides_[to].concluded == 0) sides_[to].must_fail = true;
      const error why{m->code, m->reason};
      if (to == decode) {
        return carry_out(to,
                         m->refused ? receiver().peer_refused(why) : receiver().peer_aborted(why));
      }
      return carry_out(to, m->refused ? sender_->peer_refused(why) : sender_->peer_aborted(why));
    }
    if (std::holds_alternative<transfer_release>(message)) {
      carry_out(to, sender_->peer_released());
      if (dice_.one_in(8)) carry_out(to, sender_->peer_released());
      return;
    }
    if (const auto* m = std::get_if<transfer_sealed>(&message))
      return carry_out(to, receiver().sealed(*m));
    if (const auto* m = std::get_if<transfer_offer>(&message))
      return carry_out(to, receiver().offered(*m));
  }

  /// Whether a frame arrives. A frame of the current link implies that the link is back; a frame of
  /// the former one may still be read until this end has seen the break.
  bool arrives(side to, std::uint32_t link) {
    if (link == course_.link) {
      tell_link_back(to, link);
      return true;
    }
    const auto& w = sides_[to];
    return link == w.knows_link && !w.link_gone && now_ <= course_.old_until && dice_.one_in(2);
  }

  session_message through_the_codec(const session_message& message) {
    const auto frame = encode(message);
    if (!frame) return judge_.violate(frame.error().message), message;
    auto back = decode_frame(*frame);
    if (!back) return judge_.violate(back.error().message), message;
    return *std::move(back);
  }
  template <class Message>
  Message through_the_codec_as(const Message& message) {
    const auto back = through_the_codec(message);
    const auto* same = std::get_if<Message>(&back);
    return same != nullptr ? *same : message;
  }
  static result<session_message> decode_frame(std::span<const std::byte> frame) {
    return troupe::actors::decode(frame);
  }

  // -- the data plane

  void post(side by, const post_slice& what) {
    judge_.posts(by, what);
    const auto index = static_cast<std::uint32_t>(batches_.size());
    batches_.push_back({what, by, false, std::nullopt, sides_[by].knows_link});
    if (sides_[by].link_gone) return;
    if (scenario_.refuse_post > 0 && index + 1 == scenario_.refuse_post) {
      course_.refused = true;
      batches_.back().failure = error{errc::overloaded, "too many batches"};
      schedule(now_, kind::complete, by, index);
      return;
    }
    if (shut_out(batches_.back())) {
      schedule(now_, kind::complete, by, index);
      return;
    }
    schedule(soon() + (dice_.one_in(6) ? dice_.upto(30) : 0), kind::land, by, index);
  }

  /// Whether the peer's end, which has found the link broken, refuses the batch and the refusal is
  /// noticed: at once in mapped memory, seldom over a wire.
  bool shut_out(posted_batch& b) {
    const auto& peer = sides_[other(b.by)];
    const bool left = peer.knows_link_is_lost || peer.link_gone || peer.knows_link > b.link;
    if (!left || !dice_.one_in(2)) return false;
    b.failure = error{errc::grant_revoked, "the peer's end of the link has broken"};
    b.shut_out = true;
    return true;
  }

  /// Whether bytes can move now; if not, the batch fails.
  bool moves(posted_batch& b) {
    if (shut_out(b)) return false;
    if (course_.broken || (b.link != course_.link && now_ >= course_.old_until)) {
      b.failure = error{errc::link_broken, "the link broke"};
    } else if (sides_[b.by].fence_effective) {
      b.failure = error{errc::aborted, "cancelled by the fence"};
    } else if (sides_[other(b.by)].fence_effective) {
      b.failure = error{errc::grant_revoked, "the peer fenced the transfer"};
    } else {
      return true;
    }
    return false;
  }

  void land(std::uint32_t index) {
    auto& b = batches_[index];
    if (moves(b)) {
      judge_.lands(b.what.slice, b.what.state);
      b.landed = true;
      if (scenario_.mode == transfer_mode::write) {
        schedule(soon(), kind::notice, decode, index);
        if (dice_.one_in(4)) schedule(soon() + dice_.upto(20), kind::ghost, b.by, index);
      }
    }
    schedule(soon() + (dice_.one_in(6) ? dice_.upto(40) : 0), kind::complete, b.by, index);
  }

  /// The wire delivers landed bytes a second time, as a retransmission may until the fence.
  void ghost(std::uint32_t index) {
    auto copy = batches_[index];
    if (moves(copy)) judge_.touches_memory();
  }

  void give_notice(std::uint32_t index) {
    const auto& b = batches_[index];
    if (course_.broken || !arrives(decode, b.link)) return;
    carry_out(decode, receiver().landed(through_the_codec_as<layers_landed>(
                          {the_transfer, b.what.slice, b.what.state, b.what.seal})));
  }

  void complete(side by, std::uint32_t index) {
    auto& b = batches_[index];
    if (b.landed && course_.broken && dice_.one_in(2))
      b.failure = error{errc::link_broken, "the link broke"};
    auto& w = sides_[by];
    if (b.link != w.knows_link || w.link_gone) return;
    if (b.link != course_.link) {
      // A failed post is one way to find out that the link is broken.
      if (b.failure && b.failure->code == errc::link_broken) return break_end(by, course_.link);
      if (!b.failure && dice_.one_in(2)) return;
    }
    if (b.failure) judge_.fails(by, *b.failure);
    if (trace_ && b.failure) note("    " + to_string(*b.failure));
    if (b.shut_out && !course_.broken && !w.fence_called) report_.shut_out = scenario_.mode;
    --w.in_flight;
    if (by == decode) return carry_out(by, receiver().batch_completed(b.what.id, b.failure));
    carry_out(by, sender_->batch_completed(b.what.id, b.failure));
  }

  void fence(side s) {
    judge_.fences(s);
    auto& w = sides_[s];
    const bool old_may_move = now_ < course_.old_until;
    if (scenario_.sync_fence && !old_may_move) {
      w.fence_effective = true;
      w.quiescent_given = true;
      return carry_out(s, s == decode ? receiver().quiescent() : sender_->quiescent());
    }
    const auto effective = std::max(soon(), course_.old_until);
    const auto quiet =
        effective + dice_.upto(scenario_.latency) + (scenario_.slow_fence ? dice_.upto(150) : 0);
    schedule(effective, kind::fence_effective, s, 0);
    schedule(quiet, kind::quiescent, s, 0);
    if (dice_.one_in(8)) schedule(quiet + 1, kind::quiescent, s, 0);
  }

  // -- actions

  void carry_out(side s, const session_actions& actions) {
    if (sides_[s].unpinned && !actions.empty()) {
      return judge_.violate("something was done after the unpin");
    }
    for (std::size_t i = 0; i < actions.size() && judge_.violation().empty(); ++i) {
      const auto& action = actions[i];
      const bool last = i + 1 == actions.size();
      if (trace_) note_action(s, action);
      if (const auto* a = std::get_if<post_slice>(&action)) {
        post(s, *a);
      } else if (const auto* m = std::get_if<send_message>(&action)) {
        send(s, m->message);
      } else if (const auto* o = std::get_if<send_offer>(&action)) {
        offer(s, *o);
      } else if (std::holds_alternative<fence_transfer>(action)) {
        if (!last) judge_.violate("the fence is not the last of its list");
        fence(s);
      } else if (const auto* t = std::get_if<tell_layers>(&action)) {
        judge_.tells(s, t->slice);
      } else if (const auto* c = std::get_if<conclude>(&action)) {
        judge_.concludes(s, *c);
        if (s == decode && !c->failure) schedule(soon(), kind::whole, decode, 0);
      } else {
        if (!last) judge_.violate("the unpin is not the last of its list");
        judge_.unpins(s);
      }
    }
  }

  void offer(side s, const send_offer& o) {
    judge_.offers(s, o);
    if (!judge_.violation().empty()) return;
    transfer_offer message;
    message.transfer = the_transfer;
    message.token_end = dice_.one_in(2) ? scenario_.source_tokens : scenario_.tokens;
    message.aux = o.aux;
    send(s, message);
  }

  // -- the end

  void check_end() {
    judge_.comes_to_its_end({receiver_ && receiver_->current() == receive_session::state::finished,
                             sender_ && sender_->current() == send_session::state::finished});
    if (judge_.violation().empty()) judge_.agreement(report_);
  }

  void note(const std::string& line) { *trace_ += std::to_string(now_) + " " + line + "\n"; }

  void note_action(side s, const session_action& action) {
    static constexpr std::array<const char*, 7> names{
        "post_slice", "send", "send_offer", "fence_transfer", "tell_layers", "conclude", "unpin"};
    auto line =
        std::string{"    "} + (s == decode ? "decode  " : "prefill ") + names[action.index()];
    if (const auto* m = std::get_if<send_message>(&action))
      line += std::string{" "} + std::string{type_name(m->message)};
    if (const auto* c = std::get_if<conclude>(&action)) {
      line += c->failure ? " " + to_string(*c->failure) : std::string{" done"};
    }
    const auto* p = std::get_if<post_slice>(&action);
    const auto* t = std::get_if<tell_layers>(&action);
    if (p || t) {
      const auto& c = p ? p->slice : t->slice;
      line += " layers " + std::to_string(c.layer_begin) + ".." + std::to_string(c.layer_end) +
              " tokens " + std::to_string(c.token_begin) + ".." + std::to_string(c.token_end);
      if (p) line += " id " + std::to_string(p->id.value) + (p->state ? " state" : "");
    }
    note(line);
  }

  dice dice_;
  timeline timeline_;
  const scenario scenario_;
  course course_;
  judge judge_{scenario_, course_};
  std::array<watched, 2>& sides_{course_.sides};
  std::uint32_t& now_{course_.now};
  std::string* trace_;
  report report_;
  std::vector<sent_frame> frames_;
  std::array<std::vector<session_message>, 2> last_words_;
  std::vector<posted_batch> batches_;
  std::array<std::uint32_t, 2> last_delivery_{};
  std::optional<receive_session> receiver_;
  std::optional<send_session> sender_;
};

}  // namespace

report run(std::uint64_t seed, std::string* trace) {
  return world{seed, trace}.run();
}

}  // namespace troupe::actors::simulation
