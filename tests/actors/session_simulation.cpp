#include "session_simulation.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/receive_session.hpp"
#include "troupe/actors/send_session.hpp"

namespace troupe::actors::simulation {
namespace {

constexpr std::uint32_t most_layers = 5;
constexpr std::uint32_t most_tokens = 12;
constexpr transfer_id the_transfer{77};

class dice {
 public:
  explicit dice(std::uint64_t seed) : state_{seed * 0x9E3779B97F4A7C15u + 0x1234567u} {}
  std::uint64_t next() {
    auto z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30u)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27u)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31u);
  }
  /// 0 to `most`, both included.
  std::uint32_t upto(std::uint32_t most) {
    return static_cast<std::uint32_t>(next() % (most + 1ull));
  }
  bool one_in(std::uint32_t n) { return next() % n == 0; }

 private:
  std::uint64_t state_;
};

enum side : std::uint8_t { decode = 0, prefill = 1 };
side other(side s) {
  return s == decode ? prefill : decode;
}

enum class kind : std::uint8_t {
  start,
  frame,
  source_ready,
  seal,
  land,
  ghost,
  notice,
  complete,
  fence_effective,
  quiescent,
  engine_abort,
  link_breaks,
  link_told,
  expire
};
constexpr std::array<const char*, 14> kind_names{
    "start",     "frame",    "source_ready",    "seal",      "land",         "ghost",
    "notice",    "complete", "fence_effective", "quiescent", "engine_abort", "link_breaks",
    "link_told", "expire"};

struct event {
  std::uint32_t time;
  std::uint32_t order;
  kind what;
  side where;
  std::uint32_t index;  ///< of a frame, a chunk or a batch
  friend bool operator<(const event& a, const event& b) {
    return std::pair{a.time, a.order} > std::pair{b.time, b.order};
  }
};

struct chunk {
  std::uint32_t layer_begin, layer_end, token_end;
};

struct posted_batch {
  post_slice what;
  side by;
  bool landed{false};
  std::optional<error> failure;
};

/// What is watched of one side.
struct watched {
  bool exists{false};
  bool fence_called{false};
  bool fence_effective{false};
  bool quiescent_given{false};
  bool unpinned{false};
  bool knows_link_is_lost{false};
  bool engine_aborted{false};
  bool got_abort{false};
  bool must_fail{false};  ///< the peer's abort came before the outcome
  std::uint32_t concluded{0};
  std::uint32_t answers{0};  ///< transfer_quiescent sent
  std::uint32_t in_flight{0};
  std::uint32_t posts{0};
  std::uint32_t deadline{1'000'000};
  std::optional<error> failure;
};

time_point at(std::uint32_t ms) {
  return time_point{} + std::chrono::milliseconds{ms};
}

class world {
 public:
  world(std::uint64_t seed, std::string* trace) : dice_{seed}, trace_{trace} { draw(); }

  report run() {
    while (!queue_.empty() && report_.violation.empty()) {
      std::pop_heap(queue_.begin(), queue_.end());
      const auto next = queue_.back();
      queue_.pop_back();
      now_ = next.time;
      if (++report_.events > 5000) violate("the run does not come to its end");
      if (trace_) {
        note(std::string{next.where == decode ? "decode  " : "prefill "} +
             kind_names[static_cast<std::size_t>(next.what)] + " " + std::to_string(next.index));
      }
      handle(next);
    }
    if (report_.violation.empty()) check_end();
    return report_;
  }

 private:
  // -- the scenario

  void draw() {
    layers_ = 1 + dice_.upto(most_layers - 1);
    tokens_ = dice_.upto(most_tokens);
    prefix_ = dice_.one_in(3) ? dice_.upto(tokens_) : 0;
    source_tokens_ = tokens_ + (dice_.one_in(4) ? dice_.upto(3) : 0);
    mode_ = dice_.one_in(3) ? transfer_mode::read : transfer_mode::write;
    layers_per_batch_ = dice_.upto(3);
    max_in_flight_ = 1 + dice_.upto(3);
    has_state_ = dice_.one_in(3);
    sync_fence_ = dice_.one_in(3);
    slow_fence_ = dice_.one_in(8);
    latency_ = 1 + dice_.upto(12);
    aux_.assign(dice_.upto(3), std::byte{0xA5});
    draw_faults();

    schedule(dice_.upto(20), kind::start, decode, 0);
    std::uint32_t last = draw_chunks();
    if ((report_.faults & never_seals) == 0) schedule(last + dice_.upto(5), kind::seal, prefill, 0);
    if ((report_.faults & decode_abort) != 0)
      schedule(dice_.upto(90), kind::engine_abort, decode, 0);
    if ((report_.faults & prefill_abort) != 0)
      schedule(dice_.upto(90), kind::engine_abort, prefill, 0);
    if ((report_.faults & link_loss) != 0) schedule(dice_.upto(90), kind::link_breaks, decode, 0);
    draw_deadline(decode, (report_.faults & decode_deadline) != 0);
    draw_deadline(prefill, (report_.faults & prefill_deadline) != 0);
    if ((report_.faults & post_refused) != 0) refuse_post_ = 1 + dice_.upto(3);
  }

  void draw_faults() {
    if (!dice_.one_in(3)) report_.faults |= 1u << dice_.upto(8);
    if (dice_.one_in(4)) report_.faults |= 1u << dice_.upto(5);
    if ((report_.faults & never_seals) != 0) {
      report_.faults |= dice_.one_in(2) ? decode_deadline : prefill_deadline;
    }
    if ((report_.faults & short_seal) != 0 && tokens_ == 0) report_.faults &= ~short_seal;
    if ((report_.faults & unready_seal) != 0 && source_tokens_ == 0)
      report_.faults &= ~unready_seal;
  }

  void draw_deadline(side s, bool may_pass) {
    if (!may_pass) {
      if (dice_.one_in(4))
        schedule(dice_.upto(60), kind::expire, s, 0);  // too early: means nothing
      return;
    }
    const auto deadline = dice_.upto(120);
    sides_[s].deadline = deadline;
    if (deadline > 0) schedule(deadline - 1, kind::expire, s, 0);
    schedule(deadline, kind::expire, s, 0);
    schedule(deadline + 20, kind::expire, s, 0);
  }

  /// The engine's layers, chunk by chunk, each chunk in random groups of layers. The time of the
  /// last.
  std::uint32_t draw_chunks() {
    std::uint32_t time = dice_.upto(15);
    std::uint32_t token = 0;
    auto end_of_all = source_tokens_;
    if ((report_.faults & short_seal) != 0) end_of_all = dice_.upto(tokens_ - 1);
    seal_tokens_ = end_of_all;
    const auto skipped = (report_.faults & unready_seal) != 0 ? dice_.upto(layers_ - 1) : layers_;
    if ((report_.faults & unready_seal) != 0 && end_of_all == 0) report_.faults &= ~unready_seal;
    while (token < end_of_all) {
      const bool whole = dice_.one_in(3);
      token = whole ? end_of_all : token + 1 + dice_.upto(end_of_all - token - 1);
      for (std::uint32_t layer = 0; layer < layers_;) {
        const auto end = layer + 1 + dice_.upto(layers_ - layer - 1);
        time += dice_.upto(6);
        // The skipped layer never gets to its last token.
        const bool hole = token == end_of_all && layer <= skipped && skipped < end;
        if (!hole) {
          schedule(time, kind::source_ready, prefill, static_cast<std::uint32_t>(chunks_.size()));
          chunks_.push_back({layer, end, token});
        }
        layer = end;
      }
    }
    return time;
  }

  // -- time

  void schedule(std::uint32_t time, kind what, side where, std::uint32_t index) {
    queue_.push_back({time, order_++, what, where, index});
    std::push_heap(queue_.begin(), queue_.end());
  }
  std::uint32_t soon() { return now_ + dice_.upto(latency_); }

  void handle(const event& e) {
    switch (e.what) {
      case kind::start: return begin_decode();
      case kind::frame: return deliver(e.where, e.index);
      case kind::source_ready: return engine_ready(chunks_[e.index]);
      case kind::seal: return engine_seals();
      case kind::land: return land(e.index);
      case kind::ghost: return ghost(e.index);
      case kind::notice: return give_notice(e.index);
      case kind::complete: return complete(e.where, e.index);
      case kind::fence_effective: sides_[e.where].fence_effective = true; return;
      case kind::quiescent: return give_quiescent(e.where);
      case kind::engine_abort: return engine_aborts(e.where);
      case kind::link_breaks:
        broken_ = true;
        schedule(soon(), kind::link_told, decode, 0);
        schedule(soon(), kind::link_told, prefill, 0);
        return;
      case kind::link_told: return tell_link_lost(e.where);
      case kind::expire: return expire(e.where);
    }
  }

  // -- the engines and the shells

  receive_session& receiver() {
    if (!receiver_) {
      transfer_request request;
      request.transfer = the_transfer;
      request.request = "r";
      request.mode = mode_;
      request.token_begin = prefix_;
      request.token_end = tokens_;
      receiver_.emplace(receive_session::options{layers_, layers_per_batch_, max_in_flight_,
                                                 has_state_, at(sides_[decode].deadline)},
                        request);
      sides_[decode].exists = true;
    }
    return *receiver_;
  }

  void begin_decode() { carry_out(decode, receiver().start()); }

  void begin_prefill(const transfer_request& request) {
    if (sender_) return violate("a second request was sent");
    sender_.emplace(send_session::options{layers_, layers_per_batch_, max_in_flight_, has_state_,
                                          at(sides_[prefill].deadline)});
    sides_[prefill].exists = true;
    std::vector<std::uint32_t> ready(ready_.begin(), ready_.begin() + layers_);
    const auto sealed = sealed_ ? std::optional{seal_tokens_} : std::nullopt;
    carry_out(prefill,
              sender_->start(request, ready, sealed, sealed_ ? aux_ : std::vector<std::byte>{}));
    if (sides_[prefill].engine_aborted) {
      carry_out(prefill, sender_->local_abort({errc::aborted, "the engine gave up before"}));
    }
    if (now_ >= sides_[prefill].deadline) expire(prefill);
  }

  void engine_ready(const chunk& c) {
    if (sealed_) return;
    for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
      ready_[layer] = std::max(ready_[layer], c.token_end);
    }
    if (sender_) carry_out(prefill, sender_->source_ready(c.layer_begin, c.layer_end, c.token_end));
  }

  void engine_seals() {
    sealed_ = true;
    if (!sender_) return;
    carry_out(prefill, sender_->sealed(seal_tokens_, aux_));
    if (dice_.one_in(4)) carry_out(prefill, sender_->sealed(seal_tokens_, aux_));
  }

  void engine_aborts(side s) {
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

  void expire(side s) {
    if (s == prefill && !sender_) return;
    carry_out(s, s == decode ? receiver().expire(at(now_)) : sender_->expire(at(now_)));
    if (now_ >= sides_[s].deadline && sides_[s].concluded != 1) {
      violate("the deadline passed without an outcome");
    }
  }

  void give_quiescent(side s) {
    sides_[s].fence_effective = true;
    sides_[s].quiescent_given = true;
    carry_out(s, s == decode ? receiver().quiescent() : sender_->quiescent());
  }

  void send(side from, const session_message& message) {
    if (sides_[from].knows_link_is_lost) violate("a message was sent over a link known to be lost");
    if (std::holds_alternative<transfer_quiescent>(message)) ++sides_[from].answers;
    if (std::holds_alternative<transfer_release>(message)) released_ = true;
    if (transfer_of(message) != the_transfer) violate("a message of another transfer");
    // Frames keep their order.
    auto& last = last_delivery_[from];
    last = std::max(last, soon());
    schedule(last, kind::frame, other(from), static_cast<std::uint32_t>(frames_.size()));
    frames_.push_back(message);
  }

  void deliver(side to, std::uint32_t index) {
    if (broken_) return;
    auto message = frames_[index];
    if (index % 16 == 0) message = through_the_codec(message);
    if (const auto* m = std::get_if<transfer_request>(&message)) return begin_prefill(*m);
    if (const auto* m = std::get_if<transfer_abort>(&message)) {
      if (!sides_[to].quiescent_given) sides_[to].got_abort = true;
      if (sides_[to].concluded == 0) sides_[to].must_fail = true;
      const error why{m->code, m->reason};
      return carry_out(to,
                       to == decode ? receiver().peer_aborted(why) : sender_->peer_aborted(why));
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

  session_message through_the_codec(const session_message& message) {
    const auto frame = encode(message);
    if (!frame) return violate(frame.error().message), message;
    auto back = decode_frame(*frame);
    if (!back) return violate(back.error().message), message;
    return *std::move(back);
  }
  static result<session_message> decode_frame(std::span<const std::byte> frame) {
    return troupe::actors::decode(frame);
  }

  // -- the data plane

  void post(side by, const post_slice& what) {
    auto& s = sides_[by];
    if (s.fence_called) violate("a post behind the fence");
    if (++s.posts != what.id.value) violate("batch ids do not count up");
    if (++s.in_flight > max_in_flight_) violate("more batches in flight than allowed");
    if ((mode_ == transfer_mode::write) != (by == prefill)) violate("the wrong side posted");
    check_slice(what);
    const auto index = static_cast<std::uint32_t>(batches_.size());
    batches_.push_back({what, by, false, std::nullopt});
    if (refuse_post_ > 0 && --refuse_post_ == 0) {
      refused_ = true;
      batches_.back().failure = error{errc::overloaded, "too many batches"};
      schedule(now_, kind::complete, by, index);
      return;
    }
    schedule(soon() + (dice_.one_in(6) ? dice_.upto(30) : 0), kind::land, by, index);
  }

  void check_slice(const post_slice& what) {
    const auto& c = what.slice;
    const bool state_only =
        c.layer_begin == c.layer_end && c.token_begin == c.token_end && what.state;
    if (what.state && (!has_state_ || !sealed_)) violate("state was posted before the seal");
    if (state_only) return;
    if (c.layer_begin >= c.layer_end || c.layer_end > layers_ || c.token_begin >= c.token_end ||
        c.token_begin < prefix_ || c.token_end > tokens_) {
      return violate("a slice outside the request was posted");
    }
    if (layers_per_batch_ > 0 && c.layer_end - c.layer_begin > layers_per_batch_) {
      violate("more layers in a batch than allowed");
    }
    for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
      if (ready_[layer] < c.token_end) violate("tokens were posted before they were computed");
    }
  }

  /// Whether bytes can move now; if not, the batch fails.
  bool moves(posted_batch& b) {
    if (broken_) {
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

  void touch_memory() {
    if (sides_[decode].unpinned) violate("bytes landed in blocks that were given back");
    if (sides_[decode].concluded > 0 && !sides_[decode].failure) {
      violate("bytes landed in blocks that the engine was told it owns");
    }
    if (sides_[prefill].unpinned) violate("bytes were read from blocks that were given back");
  }

  void land(std::uint32_t index) {
    auto& b = batches_[index];
    if (moves(b)) {
      touch_memory();
      b.landed = true;
      const auto& c = b.what.slice;
      for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
        for (auto token = c.token_begin; token < c.token_end; ++token) ++landed_[layer][token];
      }
      if (b.what.state) ++state_landed_;
      if (mode_ == transfer_mode::write) {
        schedule(soon(), kind::notice, decode, index);
        if (dice_.one_in(4)) schedule(soon() + dice_.upto(20), kind::ghost, b.by, index);
      }
    }
    schedule(soon() + (dice_.one_in(6) ? dice_.upto(40) : 0), kind::complete, b.by, index);
  }

  /// The wire delivers what has landed a second time, as a retransmission may until the fence.
  void ghost(std::uint32_t index) {
    auto copy = batches_[index];
    if (moves(copy)) touch_memory();
  }

  void give_notice(std::uint32_t index) {
    if (broken_) return;
    const auto& b = batches_[index];
    carry_out(decode, receiver().landed({the_transfer, b.what.slice, b.what.state}));
  }

  void complete(side by, std::uint32_t index) {
    auto& b = batches_[index];
    if (b.landed && broken_ && dice_.one_in(2))
      b.failure = error{errc::link_broken, "the link broke"};
    --sides_[by].in_flight;
    if (by == decode) return carry_out(by, receiver().batch_completed(b.what.id, b.failure));
    carry_out(by, sender_->batch_completed(b.what.id, b.failure));
  }

  void fence(side s) {
    auto& w = sides_[s];
    if (std::exchange(w.fence_called, true)) violate("a second fence");
    if (sync_fence_) {
      w.fence_effective = true;
      w.quiescent_given = true;
      return carry_out(s, s == decode ? receiver().quiescent() : sender_->quiescent());
    }
    const auto effective = soon();
    const auto quiet = effective + dice_.upto(latency_) + (slow_fence_ ? dice_.upto(150) : 0);
    schedule(effective, kind::fence_effective, s, 0);
    schedule(quiet, kind::quiescent, s, 0);
    if (dice_.one_in(8)) schedule(quiet + 1, kind::quiescent, s, 0);
  }

  // -- actions

  void carry_out(side s, const session_actions& actions) {
    auto& w = sides_[s];
    if (w.unpinned && !actions.empty()) return violate("something was done after the unpin");
    for (std::size_t i = 0; i < actions.size() && report_.violation.empty(); ++i) {
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
        if (!last) violate("the fence is not the last of its list");
        fence(s);
      } else if (const auto* t = std::get_if<tell_layers>(&action)) {
        tell(s, t->slice);
      } else if (const auto* c = std::get_if<conclude>(&action)) {
        end(s, *c);
      } else {
        if (!last) violate("the unpin is not the last of its list");
        if (w.concluded != 1) violate("an unpin before the outcome");
        if (w.fence_called ? !w.quiescent_given : w.posts > 0 || s == decode) {
          violate("an unpin before the transfer was quiescent");
        }
        w.unpinned = true;
      }
    }
  }

  void offer(side s, const send_offer& o) {
    if (s != prefill || sides_[s].fence_called || mode_ != transfer_mode::read || offered_) {
      return violate("an offer that has no place");
    }
    if (o.slice != cache_slice{0, layers_, prefix_, tokens_} || o.state != has_state_ || !sealed_) {
      violate("an offer of something else than the request");
    }
    offered_ = true;
    transfer_offer message;
    message.transfer = the_transfer;
    message.token_end = dice_.one_in(2) ? source_tokens_ : tokens_;
    message.aux = o.aux;
    send(s, message);
  }

  void tell(side s, const cache_slice& c) {
    if (s != decode || sides_[s].concluded > 0) violate("layers were told where nobody listens");
    if (c.layer_begin >= c.layer_end || c.layer_end > layers_ || c.token_begin >= c.token_end ||
        c.token_end > tokens_) {
      return violate("layers were told that were not asked for");
    }
    for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
      if (c.token_begin != std::max(told_[layer], prefix_))
        violate("layers were told out of order");
      told_[layer] = c.token_end;
      for (auto token = c.token_begin; token < c.token_end; ++token) {
        if (landed_[layer][token] != 1) violate("a layer was told that is not here");
      }
    }
  }

  void end(side s, const conclude& c) {
    auto& w = sides_[s];
    if (++w.concluded > 1) violate("a second outcome");
    w.failure = c.failure;
    if (c.failure) return;
    if (w.must_fail) violate("done after the peer said that it failed");
    if (s == prefill) {
      if (!released_) violate("the prefill side was done before the release");
      return;
    }
    if (!w.quiescent_given) violate("the decode side was done before the fence");
    if (!released_) violate("the decode side was done and did not release the source");
    const bool empty = prefix_ == tokens_;
    for (std::uint32_t layer = 0; layer < layers_; ++layer) {
      for (std::uint32_t token = 0; token < tokens_; ++token) {
        if (landed_[layer][token] != (token >= prefix_ ? 1u : 0u)) {
          violate("the decode side was done with tokens missing or landed twice");
        }
      }
      if (!empty && told_[layer] != tokens_)
        violate("the decode side was done with layers not told");
    }
    if (state_landed_ != (has_state_ && !empty ? 1u : 0u))
      violate("done without the state, or with two");
    if (!empty && c.aux != aux_)
      violate("what came with the seal is not what the engine sealed with");
  }

  // -- the end

  void check_end() {
    for (const auto s : {decode, prefill}) {
      const auto& w = sides_[s];
      if (!w.exists) continue;
      const bool finished = s == decode ? receiver_->current() == receive_session::state::finished
                                        : sender_->current() == send_session::state::finished;
      if (!finished || w.concluded != 1 || !w.unpinned) {
        violate(std::string{s == decode ? "decode" : "prefill"} + " did not end");
      }
      check_answer(w);
      check_reason(w);
    }
    if (!report_.violation.empty()) return;
    check_agreement();
  }

  void check_answer(const watched& w) {
    if (w.answers > 1) violate("two answers to one abort");
    if (w.answers == 1 && !w.got_abort) violate("an answer to no abort");
    if (w.answers == 0 && w.got_abort && !w.knows_link_is_lost)
      violate("an abort was not answered");
  }

  /// A failure names a fault that happened.
  void check_reason(const watched& w) {
    if (!w.failure) return;
    const auto f = report_.faults;
    const auto any = [f](std::uint32_t of) { return (f & of) != 0; };
    bool known = false;
    switch (w.failure->code) {
      case errc::aborted: known = any(decode_abort | prefill_abort); break;
      case errc::peer_lost:
      case errc::link_broken: known = any(link_loss); break;
      case errc::deadline: known = any(decode_deadline | prefill_deadline); break;
      case errc::overloaded: known = refused_; break;
      case errc::out_of_range: known = any(short_seal); break;
      case errc::invalid_config: known = any(unready_seal); break;
      default: break;
    }
    if (!known) violate("failed for a reason that nobody gave: " + to_string(*w.failure));
  }

  void check_agreement() {
    const auto& d = sides_[decode];
    const auto& p = sides_[prefill];
    if (d.exists && !d.failure) report_.decode_done = true;
    if (d.failure) report_.decode_failure = d.failure->code;
    if (p.exists && !p.failure) report_.prefill_done = true;
    if (p.failure) report_.prefill_failure = p.failure->code;
    if (report_.decode_done && !report_.prefill_done) {
      const bool excused =
          broken_ || (p.failure && p.failure->code == errc::deadline) || p.engine_aborted;
      if (!excused)
        violate("decode is done, prefill failed, and nothing of its own happened to it");
    }
    if (report_.prefill_done && !report_.decode_done) {
      const bool excused = d.engine_aborted || d.failure->code == errc::deadline;
      if (!excused)
        violate("prefill is done, decode failed, and nothing of its own happened to it");
    }
    if (report_.faults == 0 && !(report_.decode_done && report_.prefill_done)) {
      violate("nothing went wrong and yet it failed");
    }
  }

  void violate(const std::string& what) {
    if (report_.violation.empty())
      report_.violation = what + " (at " + std::to_string(now_) + " ms)";
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
  std::string* trace_;
  report report_;
  // the scenario
  std::uint32_t layers_{1}, tokens_{0}, prefix_{0}, source_tokens_{0}, seal_tokens_{0};
  std::uint32_t layers_per_batch_{0}, max_in_flight_{1}, latency_{1}, refuse_post_{0};
  transfer_mode mode_{transfer_mode::write};
  bool has_state_{false}, sync_fence_{false}, slow_fence_{false};
  std::vector<std::byte> aux_;
  std::vector<chunk> chunks_;
  // the run
  std::uint32_t now_{0}, order_{0};
  std::vector<event> queue_;
  std::vector<session_message> frames_;
  std::vector<posted_batch> batches_;
  std::array<watched, 2> sides_;
  std::array<std::uint32_t, 2> last_delivery_{};
  std::optional<receive_session> receiver_;
  std::optional<send_session> sender_;
  std::array<std::uint32_t, most_layers> ready_{};
  std::array<std::uint32_t, most_layers> told_{};
  std::array<std::array<std::uint32_t, most_tokens>, most_layers> landed_{};
  std::uint32_t state_landed_{0};
  bool sealed_{false}, broken_{false}, released_{false}, offered_{false}, refused_{false};
};

}  // namespace

report run(std::uint64_t seed, std::string* trace) {
  return world{seed, trace}.run();
}

std::string describe_faults(std::uint32_t faults) {
  static constexpr std::array<const char*, 9> names{
      "decode_abort", "prefill_abort", "link_loss",  "decode_deadline", "prefill_deadline",
      "post_refused", "never_seals",   "short_seal", "unready_seal"};
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if ((faults & (1u << i)) == 0) continue;
    if (!text.empty()) text += " + ";
    text += names[i];
  }
  return text.empty() ? "no fault" : text;
}

}  // namespace troupe::actors::simulation
