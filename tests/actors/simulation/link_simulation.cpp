#include "link_simulation.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "faulty_nodes.hpp"

namespace troupe::actors::link_simulation {

namespace {

constexpr std::uint32_t most_batches = 6;
/// How long a transfer takes at most until each side has heard of its end, or that the link is lost.
/// None waits for a deadline: a link that moves nothing is made again or lost.
constexpr milliseconds heard_by{30'000};
/// After the last fault: when transfers begin that must succeed, when a last wire breaks, when the
/// cluster is judged, when a node leaves it, and how long it is watched.
constexpr milliseconds trial{30'000}, last_break{40'000}, judged{45'000}, last_leave{46'000},
    calm{50'000};
/// How long a quiet cluster needs to make a link again.
constexpr milliseconds soon{2'000};
/// How long news travel between the actors of a process that is awake.
constexpr milliseconds while_awake{2};

/// One side of a transfer, as the session actors do it: the decode side asks and says when it has
/// everything; the prefill side posts. Both fence before they let go.
struct talker {
  transfer_id transfer;
  side role{decode};
  end_ptr end;
  std::uint64_t epoch{0};
  std::uint32_t batches{0};
  bool must_arrive{false};
  std::set<std::uint32_t> got{};
  bool attached{false};  ///< the link knows it
  bool ending{false}, lost{false}, whole{false}, over{false};
};
using talker_ptr = std::shared_ptr<talker>;

struct runner {
  end_ptr ready;  ///< the link that new transfers use; null: none
  std::uint64_t ready_epoch{0};
  std::map<transfer_id, talker_ptr> talkers;
  std::map<std::uint64_t, std::uint64_t> epochs;  ///< by the link's id: the last one told
  std::set<std::uint64_t> gone;                   ///< ids of links that have been told gone
  std::set<transfer_id> ended;                    ///< whose last word has arrived
};

class world final : public faulty_nodes {
 public:
  explicit world(const options& of) : faulty_nodes{of} {}

  report run();

  // -- end_world

  end_ptr make_acceptor(const node_ptr& at, const link_request& request) override;
  void to_runner(const end_ptr& of, runner_event event) override;
  void to_session(const end_ptr& of, transfer_id transfer, session_event event) override;
  void ended(const end_ptr& of) override;

 private:
  void started(std::size_t which) override;
  void landed(const process& from, const process& to, transfer_id transfer) override;
  void refused() override { ++told_.refused; }
  // -- links
  void dial();
  [[nodiscard]] runner* runner_of(const node_ptr& at) {
    return is_latest(at) ? &runners_[number_of(*at)] : nullptr;
  }
  // -- transfers
  void next_transfer();
  void begin_transfer(bool must_arrive);
  void watch(const talker_ptr& made);
  void order(const talker_ptr& who, link_command what);
  void speak(const talker_ptr& who, session_message what, bool granted = false);
  void ask(const talker_ptr& who, bool again);
  void serve(const talker_ptr& who, const transfer_request& request);
  void hear(const talker_ptr& who, const session_message& message);
  void give_up(const talker_ptr& who, const troupe::error& why);
  void let_go(const talker_ptr& who);
  void conclude(const talker_ptr& who);
  // -- the verdict
  using faulty_nodes::note;
  void note(const talker_ptr& who, const std::string& what) {
    if (!given().traced) return;
    note(who->end->at()->name + ": transfer " + std::to_string(who->transfer.value) + " " + what);
  }
  void check_calm();
  void check_told_of(const end_ptr& of, std::uint64_t epoch);
  void break_unseen();
  void leave_in_peace();

  report told_;
  std::set<std::pair<std::uint64_t, transfer_id>> fenced_;  ///< by the process's incarnation
  std::array<runner, 2> runners_;
  std::uint64_t transfers_{0};
};

void world::started(std::size_t which) {
  runners_[which] = runner{};
  time_.after(wires_.between(milliseconds{1}, milliseconds{500}), [this] { dial(); });
}

void world::landed(const process& from, const process& to, transfer_id transfer) {
  for (const auto* one : {&from, &to}) {
    require(!fenced_.contains({one->incarnation, transfer}),
            "bytes move in the memory of " + one->name + " after the fence");
  }
}

// -- links

void world::dial() {
  const auto at = this->at(decode), peer = this->at(prefill);
  if (!at->alive || !peer->alive || leaves(decode)) return;
  const auto same = [&](const end_ptr& end) {
    return end->peer() == peer && !runners_[decode].gone.contains(end->id());
  };
  if (std::ranges::any_of(at->ends, same)) return;
  faulty_nodes::dial(at, peer, links() + 1);
}

end_ptr world::make_acceptor(const node_ptr& at, const link_request& request) {
  const auto peer = this->at(decode);
  if (request.to_incarnation != at->incarnation || request.from.incarnation != peer->incarnation ||
      leaves(prefill)) {
    return nullptr;
  }
  return make_end(at, peer, transport::link_role::acceptor, 0);
}

void world::to_runner(const end_ptr& of, runner_event event) {
  auto* here = runner_of(of->at());
  if (here == nullptr) return;
  require(!here->gone.contains(of->id()), "a link speaks to the runner after it was told gone");
  if (const auto* ready = std::get_if<link_ready>(&event.what)) {
    auto& last = here->epochs[of->id()];
    note(of->at()->name + ": link " + std::to_string(of->id()) + " is ready, epoch " +
         std::to_string(ready->link.epoch));
    require(ready->link.epoch > last, "the epoch of a link does not grow");
    if (last == 0) {
      ++told_.links;
    } else {
      ++told_.rebuilds;
    }
    last = ready->link.epoch;
    check_told_of(of, last);
    here->ready = of;
    here->ready_epoch = last;
  } else if (std::holds_alternative<link_draining>(event.what)) {
    if (here->ready == of) here->ready = nullptr;
  } else if (const auto* gone = std::get_if<link_gone>(&event.what)) {
    note(of->at()->name + ": link " + std::to_string(of->id()) +
         " is gone: " + to_string(gone->why));
    here->gone.insert(of->id());
    if (here->ready == of) here->ready = nullptr;
    time_.after(wires_.between(milliseconds{20}, milliseconds{1000}), [this] { dial(); });
  } else if (auto* stray = std::get_if<unrouted_message>(&event.what)) {
    if (is_final_message(stray->message)) here->ended.insert(route_of(stray->message));
    // The link does not know every session yet.
    const auto known = here->talkers.find(route_of(stray->message));
    if (known != here->talkers.end() && known->second->end == of) {
      return hear(talker_ptr{known->second}, stray->message);
    }
    const auto* request = std::get_if<transfer_request>(&stray->message);
    if (request == nullptr || leaves(number_of(*of->at()))) return;
    require(!here->ended.contains(request->transfer),
            "a transfer is asked for after its last word");
    const auto made = std::make_shared<talker>();
    made->transfer = request->transfer;
    made->role = prefill;
    made->end = of;
    made->epoch = stray->link.epoch;
    if (!here->talkers.emplace(made->transfer, made).second) return;
    note(made, "is asked for over link " + std::to_string(of->id()));
    order(made, {attach_session{made->transfer, {}, made->epoch}});
    serve(made, *request);
    watch(made);
  }
}

// -- transfers

void world::next_transfer() {
  time_.after(wires_.between(milliseconds{5}, milliseconds{400}), [this] {
    if (time_.now() >= end_of_faults() + trial) return;
    if (asks()) in(at(decode), [this] { begin_transfer(false); });
    next_transfer();
  });
}

void world::begin_transfer(bool must_arrive) {
  auto& here = runners_[decode];
  if (!here.ready) {
    require(!must_arrive, "no link is up long after the last fault");
    return;
  }
  const auto made = std::make_shared<talker>();
  made->transfer = transfer_id{++transfers_};
  made->end = here.ready;
  made->epoch = here.ready_epoch;
  made->batches = 1 + chance_.upto(most_batches - 1);
  made->must_arrive = must_arrive;
  here.talkers.emplace(made->transfer, made);
  order(made, {attach_session{made->transfer, {}, made->epoch}});
  ask(made, false);
  if (must_arrive || !chance_.one_in(5)) return watch(made);
  // Its engine gives it up.
  time_.after(wires_.between(microseconds{0}, milliseconds{60}), [this, made] {
    in(made->end->at(), [this, made] { give_up(made, {errc::aborted, "the engine gave it up"}); });
  });
  watch(made);
}

void world::watch(const talker_ptr& made) {
  time_.after(heard_by, [this, made] {
    if (made->over || !made->end->at()->alive) return;
    violate(made->end->at()->name + ": transfer " + std::to_string(made->transfer.value) +
            " hears of no end");
  });
}

void world::order(const talker_ptr& who, link_command what) {
  const bool fences = std::holds_alternative<fence_now>(what.what);
  const bool attaches = std::holds_alternative<attach_session>(what.what);
  in(who->end->at(), [this, who, fences, attaches, what = std::move(what)] {
    if (!who->end->finished()) {
      return who->end->order(what, [who, attaches] { who->attached |= attaches; });
    }
    if (fences) to_session(who->end, who->transfer, {transfer_fenced{}});
  });
}

/// As the runner does for sessions that the link's actor never knew: nothing was granted for them.
void world::ended(const end_ptr& of) {
  auto* here = runner_of(of->at());
  if (here == nullptr) return;
  for (const auto& [transfer, who] : std::map{here->talkers}) {
    if (who->end != of) continue;
    require(!who->attached, "a link ends that still has a session");
    to_session(of, transfer, {link_is_lost{{errc::peer_lost, "it is gone"}}});
    to_session(of, transfer, {transfer_fenced{}});
  }
}

void world::speak(const talker_ptr& who, session_message what, bool granted) {
  note(who, "says " + std::string{type_name(what)} + " in epoch " + std::to_string(who->epoch));
  say out{std::move(what), {}};
  out.epoch = who->epoch;
  if (granted) out.grants.push_back({region_id{1}, byte_set{{0, 4096}}, transport::access::write});
  order(who, {std::move(out)});
}

void world::ask(const talker_ptr& who, bool again) {
  transfer_request request;
  request.transfer = who->transfer;
  request.request = "r" + std::to_string(who->transfer.value);
  request.token_end = who->batches;
  request.deadline_ms = static_cast<std::uint32_t>(who->epoch);  // the answers name it
  if (again) request.progress.emplace();
  speak(who, std::move(request), true);
}

void world::serve(const talker_ptr& who, const transfer_request& request) {
  for (std::uint32_t i = 1; i <= request.token_end; ++i) {
    transport::batch work;
    work.id = transport::batch_id{i};
    work.transfer = who->transfer;
    work.frame = *encode(transfer_sealed{who->transfer, i, request.deadline_ms, {}});
    order(who, {post_batch{std::move(work), who->epoch}});
  }
}

void world::hear(const talker_ptr& who, const session_message& message) {
  note(who, "hears " + std::string{type_name(message)});
  require(!who->lost, "a session hears its peer after it was told that the link is lost");
  if (is_final_message(message)) runners_[who->role].ended.insert(who->transfer);
  if (who->ending) return;
  if (is_final_message(message)) return let_go(who);
  if (who->role == prefill) {
    if (const auto* request = std::get_if<transfer_request>(&message)) serve(who, *request);
    return;
  }
  const auto* part = std::get_if<transfer_sealed>(&message);
  if (part == nullptr) return;
  require(part->batches == who->epoch, "an answer comes from an epoch that is over");
  who->got.insert(part->token_end);
  if (who->got.size() < who->batches) return;
  who->whole = true;
  speak(who, transfer_release{who->transfer});
  let_go(who);
}

/// Tells the peer that the transfer has failed here, unless it is ending already.
void world::give_up(const talker_ptr& who, const troupe::error& why) {
  if (who->ending) return;
  speak(who, make_abort(who->transfer, why));
  let_go(who);
}

void world::let_go(const talker_ptr& who) {
  if (std::exchange(who->ending, true)) return;
  note(who, "is fenced over link " + std::to_string(who->end->id()));
  order(who, {fence_now{who->transfer}});
}

void world::conclude(const talker_ptr& who) {
  note(who, "is over");
  fenced_.emplace(who->end->at()->incarnation, who->transfer);
  who->over = true;
  order(who, {detach_session{who->transfer}});
  if (auto* here = runner_of(who->end->at())) here->talkers.erase(who->transfer);
  if (who->role == prefill) return;
  ++(who->whole ? told_.moved : told_.given_up);
  require(who->whole || !who->must_arrive,
          "transfer " + std::to_string(who->transfer.value) + " fails long after the last fault");
}

void world::to_session(const end_ptr& of, transfer_id transfer, session_event event) {
  auto* here = runner_of(of->at());
  if (here == nullptr) return;
  const auto found = here->talkers.find(transfer);
  if (found == here->talkers.end() || found->second->end != of) return;
  const auto who = found->second;
  if (const auto* message = std::get_if<session_message>(&event.what)) {
    hear(who, *message);
  } else if (const auto* back = std::get_if<link_is_back>(&event.what)) {
    require(back->epoch > who->epoch, "a session is told of an epoch that is over");
    who->epoch = back->epoch;
    note(who, "hears of epoch " + std::to_string(who->epoch));
    if (who->role == decode && !who->ending) ask(who, true);
  } else if (std::holds_alternative<link_is_lost>(event.what)) {
    who->lost = true;
    let_go(who);
  } else if (std::holds_alternative<transfer_fenced>(event.what)) {
    require(who->ending, "a session is told of a fence that it has not asked for");
    if (who->ending) conclude(who);
  } else if (const auto* done = std::get_if<transport::completion>(&event.what)) {
    if (done->failure) give_up(who, *done->failure);
  } else if (const auto* failed = std::get_if<abort_session>(&event.what)) {
    give_up(who, failed->why);
  }
}

// -- the verdict

void world::check_calm() {
  for (const auto which : {decode, prefill}) {
    const auto& here = runners_[which];
    const auto& node = at(which);
    for (const auto& [transfer, who] : here.talkers) {
      violate("transfer " + std::to_string(transfer.value) + " is live long after its end");
    }
    for (const auto& end : node->ends) {
      require(!here.gone.contains(end->id()), "a link that is gone still has its actor");
      const auto state = end->link().report().state;
      require(state == "up", "a link is " + state + " long after the last fault");
    }
    require(node->ends.size() == 1, "there are " + std::to_string(node->ends.size()) +
                                        " links at " + node->name + " long after the last fault");
    require(node->context->counters.links_up == 1, "the node counts other links than it has");
    require(node->context->counters.links_broken == 0, "the node counts links as broken");
  }
}

/// In a while all transfers of a link that was made again have heard of it.
void world::check_told_of(const end_ptr& of, std::uint64_t epoch) {
  time_.after(while_awake, [this, of, epoch] {
    auto* here = runner_of(of->at());
    if (here == nullptr || !of->at()->alive || of->finished() || here->epochs[of->id()] != epoch) {
      return;
    }
    if (time_.now() < of->at()->frozen_until + while_awake) return check_told_of(of, epoch);
    if (of->link().report().state != "up") return;  // it has broken again
    for (const auto& [transfer, who] : here->talkers) {
      if (who->end != of || who->lost) continue;
      require(who->epoch == epoch, "transfer " + std::to_string(transfer.value) +
                                       " has not heard that its link is back");
    }
  });
}

/// Breaks the idle wire for the end that waits to be dialled: the other one must hear of it.
void world::break_unseen() {
  const auto acceptor = runners_[prefill].ready, dialler = runners_[decode].ready;
  for (const auto& hit : wires_up()) {
    const auto peer = hit->peer();
    if (!peer || hit->role() != transport::link_role::acceptor) continue;
    hit->breaks(microseconds{0});
    peer->breaks(std::nullopt);
  }
  const auto before = told_.rebuilds;
  time_.after(soon, [this, acceptor, dialler, before] {
    require(runners_[prefill].ready == acceptor && runners_[decode].ready == dialler &&
                told_.rebuilds == before + 2,
            "a wire whose break only one end saw is not made again");
  });
}

/// A node that leaves tells its peer, which does not take the link for broken.
void world::leave_in_peace() {
  const auto node = at(prefill);
  for (std::uint32_t i = 1; i < 200; ++i) {
    time_.after(i * milliseconds{5}, [this, node] {
      require(node->context->counters.links_broken == 0,
              "a link is made again though its node leaves");
    });
  }
  time_.after(milliseconds{1500}, [this, node] {
    require(node->ends.empty(), "the link to a node that has left is still there");
  });
  leave(decode);
}

report world::run() {
  start(decode);
  start(prefill);
  next_fault();
  next_transfer();
  for (std::uint32_t i = 0; i < 8; ++i) {
    time_.at(end_of_faults() + trial + i * milliseconds{500},
             [this] { in(at(decode), [this] { begin_transfer(true); }); });
  }
  time_.at(end_of_faults() + last_break, [this] { break_unseen(); });
  time_.at(end_of_faults() + judged, [this] { check_calm(); });
  time_.at(end_of_faults() + last_leave, [this] { leave_in_peace(); });
  run_until(end_of_faults() + calm, [this] { return transfers_; });
  static_cast<fault_report&>(told_) = outcome();
  return told_;
}

}  // namespace

report run(const options& of) {
  return world{of}.run();
}

}  // namespace troupe::actors::link_simulation
