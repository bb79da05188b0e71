#include "troupe/actors/client/carried_calls.hpp"

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"

namespace troupe::actors {

namespace {

using clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// How long a failure waits for others that explain it.
constexpr milliseconds explained_within{150};
/// How long a failed prefill waits for decode to say whether it still needed that prefill.
constexpr milliseconds missed_within{300};
/// How long a new decode on the same replica waits until the former one is aborted.
constexpr milliseconds given_up_within{500};
/// How long a node that its peer reports lost has to answer.
constexpr milliseconds answers_within{300};

/// Applies the answer to a repeated call to the first call: if that runs, or the node could not be
/// asked, it is as lost as before.
void compare_with_first(live_call& call) {
  auto& ended = *call.ended;
  if (ended.answer) return;
  call.runs =
      ended.reach == call_reach::answered && ended.answer.error().code == errc::already_exists;
  if (call.runs || ended.reach == call_reach::unreachable) ended.reach = call_reach::lost;
}

/// Whether the engine may be working on the call: there is no answer, or the call was lost.
bool may_run(const live_call& call) {
  return !call.ended || call.ended->reach == call_reach::lost;
}

}  // namespace

/// Collects the answers of calls. Calls that were given up keep it alive beyond the request.
struct carried_calls::answer_board {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, call_outcome> answers;  ///< by call id, not yet taken
  std::uint32_t aborts{0};                        ///< in progress
};

carried_calls::carried_calls(cluster_client& client, side_threads& threads,
                             const carried_call& abort, clock::time_point deadline)
    : client_{client},
      threads_{threads},
      abort_{abort},
      deadline_{deadline},
      board_{std::make_shared<answer_board>()} {}

// -- actions

void carried_calls::start(carried_side side, const carried_attempt& now,
                          const std::vector<node_info>& nodes, const carried_call& make) {
  for (const auto& node : nodes) {
    live_call call;
    call.side = side;
    call.node = node;
    call.attempt = now;  // a copy: the call is remembered with the attempt that it was made for
    auto request = make(now, node);
    live_.push_back(std::move(call));
    make_call(live_.back(), std::move(request));
  }
}

void carried_calls::make_call(live_call& call, call_request request) {
  call.id = ++last_id_;
  request.timeout_ms = whole_ms(call.attempt.left);
  threads_.run([board = board_, &client = client_, id = call.id, node = call.node,
                request = std::move(request), given_up = call.given_up.get_token()] {
    auto outcome = client.call_outcome_of(node, request, given_up);
    const std::lock_guard lock{board->mutex};
    board->answers.emplace(id, std::move(outcome));
    board->changed.notify_all();
  });
}

void carried_calls::repeat_lost(const membership& members, const placement& where,
                                const carried_call& make, milliseconds left) {
  const auto time = clock::now();
  for (auto& call : live_) {
    const bool lost = call.ended && call.ended->reach == call_reach::lost && !call.runs;
    if (!lost || call.side != carried_side::prefill || time - call.ended_at < missed_within ||
        is_lost(members, where, call.node)) {
      continue;
    }
    call.ended.reset();
    call.repeated = true;
    call.attempt.left = left;
    make_call(call, make(call.attempt, call.node));
  }
}

void carried_calls::give_up(live_call& call) {
  call.given_up.request_stop();
  if (!may_run(call) || !abort_) return;
  auto request = abort_(call.attempt, call.node);
  if (request.timeout_ms == 0) request.timeout_ms = 2000;
  {
    const std::lock_guard lock{board_->mutex};
    ++board_->aborts;
  }
  threads_.run([board = board_, &client = client_, node = call.node, request = std::move(request)] {
    (void)client.call_outcome_of(node, request);
    const std::lock_guard lock{board->mutex};
    --board->aborts;
    board->changed.notify_all();
  });
}

void carried_calls::give_up_all() {
  // First, because `give_up` throws if no thread can be started: at least nobody waits then.
  for (auto& call : live_) call.given_up.request_stop();
  for (auto& call : live_) give_up(call);
  live_.clear();
}

void carried_calls::drop_losers(const std::vector<std::string>& lost, bool keep_prefill) {
  bool waits = false;
  std::erase_if(live_, [&](live_call& call) {
    if (keep_prefill && call.side == carried_side::prefill) return false;
    const bool lives = std::ranges::find(lost, call.node.name) == lost.end();
    waits = waits || (keep_prefill && may_run(call) && (lives || call.ended));
    give_up(call);
    return true;
  });
  if (!waits) return;
  // The next decode has the same id, perhaps on ranks that still run the former one.
  std::unique_lock lock{board_->mutex};
  board_->changed.wait_until(lock, within(given_up_within), [&] { return board_->aborts == 0; });
}

void carried_calls::take_answers(milliseconds patience) {
  std::unique_lock lock{board_->mutex};
  board_->changed.wait_for(lock, patience, [&] { return !board_->answers.empty(); });
  for (auto& [id, outcome] : board_->answers) {
    const auto call = std::ranges::find(live_, id, &live_call::id);
    if (call == live_.end()) continue;
    call->ended = std::move(outcome);
    call->ended_at = clock::now();
    if (call->repeated) compare_with_first(*call);
  }
  board_->answers.clear();
}

bool carried_calls::all_are_there(const std::vector<node_info>& nodes) {
  auto answered = std::make_shared<std::size_t>(0);  // guarded by the board
  for (const auto& node : nodes) {
    threads_.run([board = board_, &client = client_, node, answered] {
      if (!client.report(node)) return;
      const std::lock_guard lock{board->mutex};
      ++*answered;
      board->changed.notify_all();
    });
  }
  std::unique_lock lock{board_->mutex};
  return board_->changed.wait_until(lock, within(answers_within),
                                    [&] { return *answered == nodes.size(); });
}

// -- state

bool carried_calls::have_failed(const membership& members, const placement& where) const {
  const auto time = clock::now();
  const bool all_ended = std::ranges::all_of(live_, &live_call::has_ended);
  return std::ranges::any_of(live_, [&](const live_call& call) {
    const bool decode = call.side == carried_side::decode;
    if (!call.ended) return decode && is_lost(members, where, call.node);
    if (call.ended->answer) return false;
    const bool lost = call.ended->reach == call_reach::lost;
    if (decode) return lost || all_ended || time - call.ended_at >= explained_within;
    // For a lost prefill, decode itself says whether it has received everything.
    return !lost && time - call.ended_at >= missed_within;
  });
}

bool carried_calls::none_failed_within(milliseconds time) const {
  const auto since = clock::now() - time;
  return std::ranges::none_of(
      live_, [&](const live_call& call) { return call.failed() && call.ended_at > since; });
}

std::vector<failed_call> carried_calls::failures(const membership& members,
                                                 const placement& where) const {
  std::vector<failed_call> failed;
  for (const auto& call : live_) {
    if (call.failed()) {
      failed.push_back({call.side, call.node.name, call.ended->reach, call.ended->answer.error()});
    } else if (!call.ended && is_lost(members, where, call.node)) {
      failed.push_back({call.side,
                        call.node.name,
                        call_reach::lost,
                        {errc::peer_lost, "the cluster has lost " + call.node.name}});
    }
  }
  return failed;
}

std::vector<std::vector<std::uint8_t>> carried_calls::take_answers_of(carried_side side) {
  std::vector<std::vector<std::uint8_t>> answers;
  for (auto& call : live_) {
    if (call.side != side) continue;
    answers.push_back(call.done() ? std::move(*call.ended->answer) : std::vector<std::uint8_t>{});
  }
  return answers;
}

clock::time_point carried_calls::within(milliseconds time) const {
  return std::min(deadline_, clock::now() + time);
}

}  // namespace troupe::actors
