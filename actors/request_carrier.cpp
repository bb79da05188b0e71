#include "troupe/actors/request_carrier.hpp"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership.hpp"
#include "troupe/actors/phrases.hpp"
#include "troupe/actors/request_blame.hpp"

namespace troupe::actors {

namespace {

using clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t max_carried_id = 240;  // what is added for a new source fits an id
/// How often the membership is looked at while calls are under way.
constexpr milliseconds look{25};
/// So long a failure waits for others that explain it.
constexpr milliseconds explained_within{150};
/// So long a prefill that has failed waits for decode to say whether it needed it.
constexpr milliseconds missed_within{300};
/// So long decode's answer waits for prefill's, which comes before it as a rule.
constexpr milliseconds follows_within{1000};
/// So long decode on the same replica waits until what was there before is given up.
constexpr milliseconds given_up_within{500};
/// So long a node that somebody misses has to show that it is there.
constexpr milliseconds answers_within{300};
constexpr milliseconds shortest_pause{10};
constexpr milliseconds longest_pause{500};

std::uint32_t whole_ms(milliseconds time) {
  return static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(time.count(), 1, std::numeric_limits<std::uint32_t>::max()));
}

/// Where calls leave their answers. Outlives the request for calls that were given up.
struct answer_board {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, call_outcome> answers;  ///< by call, not looked at yet
  std::uint32_t aborts{0};                        ///< under way
  std::optional<result<placement>> placed;
  bool over{false};  ///< nobody looks at this any more
};

/// One request, from its first placement to its outcome.
class carried_run {
 public:
  carried_run(const carried_request& what, cluster_client& client, request_watch& watch,
              side_threads& threads)
      : what_{what},
        client_{client},
        watch_{watch},
        threads_{threads},
        deadline_{clock::now() + what.deadline} {}

  result<carried_outcome> run() {
    auto outcome = guarded([this] { return attempts(); });
    {
      const std::lock_guard lock{board_->mutex};
      board_->over = true;
    }
    (void)guarded([this]() -> result<carried_outcome> {
      threads_.run([&client = client_, &watch = watch_, id = what_.request] {
        if (!client.finished(id)) watch.tell_later(id);
      });
      for (const auto& call : calls_) give_up(call);
      return carried_outcome{};
    });
    return outcome;
  }

 private:
  struct live_call {
    std::uint64_t id{0};
    carried_side side{carried_side::prefill};
    node_info node;
    carried_attempt attempt;
    std::optional<call_outcome> ended;
    clock::time_point ended_at{};

    [[nodiscard]] bool failed() const { return ended && !ended->answer; }
    [[nodiscard]] bool done() const { return ended && ended->answer; }
  };

  /// What callbacks throw, or the system for want of threads, ends the request.
  template <class Work>
  static result<carried_outcome> guarded(Work work) {
    try {
      return work();
    } catch (const std::exception& thrown) {
      return fail(errc::internal, std::string{"what carries a request threw: "} + thrown.what());
    }
  }

  [[nodiscard]] milliseconds left() const {
    return std::chrono::duration_cast<milliseconds>(deadline_ - clock::now());
  }
  [[nodiscard]] troupe::error overdue() const {
    return {errc::deadline, "request " + quoted(what_.request) + " had " +
                                time_text(what_.deadline) + ", which have passed" +
                                (last_ ? "; what failed last: " + to_string(*last_) : "")};
  }

  /// Why it is over whatever its nodes do.
  [[nodiscard]] std::optional<troupe::error> is_over() const {
    if (what_.stop.stop_requested()) {
      return troupe::error{errc::aborted, "request " + quoted(what_.request) + " was given up"};
    }
    if (left().count() <= 0) return overdue();
    return std::nullopt;
  }

  result<carried_outcome> attempts() {
    placement_request ask;
    ask.request = what_.request;
    ask.from = what_.from;
    ask.to = what_.to;
    ask.affinity = what_.affinity;
    for (;;) {
      auto where = place(ask);
      if (!where) return fail(where.error());
      begin(std::move(*where), ask.keep_source != 0);
      auto verdict = follow();
      if (!verdict) return success();
      look_again(*verdict);
      if (verdict->lost.empty()) return fail(verdict->why);
      last_ = verdict->why;
      ask.failed = verdict->lost;
      ask.keep_source = keeps_source(verdict->lost) ? 1 : 0;
      logger("carrier")->info("request {}, attempt {}: lost {} ({}); it goes on {}", what_.request,
                              now_.where.attempt, ask.failed.front(), to_string(*last_),
                              ask.keep_source != 0 ? "from the cache that is there" : "elsewhere");
      drop_losers(verdict->lost, ask.keep_source != 0);
    }
  }

  // -- placing

  result<placement> place(placement_request& ask) {
    auto pause = shortest_pause;
    for (;; pause = std::min(2 * pause, longest_pause)) {
      if (auto why = is_over()) return fail(std::move(*why));
      auto asked = ask_supervisor(ask);
      if (!asked) continue;  // it is over
      auto& where = *asked;
      if (where && where->failed == 0) return std::move(*where);
      if (where) {
        const auto code =
            is_errc(where->failed) ? static_cast<errc>(where->failed) : errc::internal;
        troupe::error why{code, where->sentence};
        // A supervisor that ends says `aborted`, and the next one is asked.
        if (code != errc::overloaded && code != errc::aborted) {
          if (last_) why.message += "; what failed last: " + to_string(*last_);
          return fail(std::move(why));
        }
        last_ = std::move(why);
      } else {
        const auto code = where.error().code;
        if (code == errc::version_mismatch || code == errc::unauthorized ||
            code == errc::invalid_config) {
          return fail(where.error());
        }
        last_ = where.error();
      }
      rest(pause);
    }
  }

  /// Empty when the request was over before the answer came. A place that is given later is given back.
  std::optional<result<placement>> ask_supervisor(placement_request& ask) {
    const auto time = left();
    ask.timeout_ms = whole_ms(time);
    threads_.run([board = board_, &client = client_, &watch = watch_, ask, time] {
      auto where = client.ask_placement(ask, time);
      std::unique_lock lock{board->mutex};
      const bool late = board->over;
      if (!late) {
        board->placed = std::move(where);
        board->changed.notify_all();
        return;
      }
      lock.unlock();
      if (!client.finished(ask.request)) watch.tell_later(ask.request);
    });
    std::unique_lock lock{board_->mutex};
    while (!board_->placed && !is_over()) board_->changed.wait_for(lock, look);
    return std::exchange(board_->placed, std::nullopt);
  }

  void rest(milliseconds pause) {
    std::this_thread::sleep_for(std::clamp(left(), milliseconds{0}, pause));
  }

  // -- calls

  void begin(placement where, bool asked_to_keep) {
    const bool kept = asked_to_keep && where.same_source != 0;
    if (!kept) {
      for (const auto& call : calls_) give_up(call);
      calls_.clear();
      ++prefills_;
    }
    now_.source = prefills_ == 1 ? what_.request : what_.request + "#" + std::to_string(prefills_);
    now_.where = std::move(where);
    placed_at_ = clock::now();
    kept_ = kept;
    now_.left = left();
    // Copies: a started call is remembered with the attempt that it was made for.
    if (!kept) start(carried_side::prefill, now_.where.prefill, what_.prefill);
    start(carried_side::decode, now_.where.decode, what_.decode);
  }

  void start(carried_side side, const std::vector<node_info>& nodes, const carried_call& make) {
    for (const auto& node : nodes) {
      live_call call;
      call.id = ++last_call_;
      call.side = side;
      call.node = node;
      call.attempt = now_;
      auto request = make(now_, node);
      request.timeout_ms = whole_ms(now_.left);
      calls_.push_back(std::move(call));
      threads_.run(
          [board = board_, &client = client_, id = last_call_, node, request = std::move(request)] {
            auto outcome = client.call_outcome_of(node, request);
            const std::lock_guard lock{board->mutex};
            board->answers.emplace(id, std::move(outcome));
            board->changed.notify_all();
          });
    }
  }

  /// Whether its engine may be at work for it: it has not answered, though the call may have been lost.
  [[nodiscard]] static bool may_run(const live_call& call) {
    return !call.ended || call.ended->reach == call_reach::lost;
  }

  /// Tells the engine, unless it has answered or was never asked.
  void give_up(const live_call& call) {
    if (!may_run(call) || !what_.abort) return;
    auto request = what_.abort(call.attempt, call.node);
    if (request.timeout_ms == 0) request.timeout_ms = 2000;
    {
      const std::lock_guard lock{board_->mutex};
      ++board_->aborts;
    }
    threads_.run(
        [board = board_, &client = client_, node = call.node, request = std::move(request)] {
          (void)client.call_outcome_of(node, request);
          const std::lock_guard lock{board->mutex};
          --board->aborts;
          board->changed.notify_all();
        });
  }

  /// Decode is called anew in any case; prefill too, unless it is kept.
  void drop_losers(const std::vector<std::string>& lost, bool keep_prefill) {
    bool waits = false;
    std::erase_if(calls_, [&](const live_call& call) {
      if (keep_prefill && call.side == carried_side::prefill) return false;
      const bool lives = std::ranges::find(lost, call.node.name) == lost.end();
      waits = waits || (keep_prefill && may_run(call) && (lives || call.ended));
      give_up(call);
      return true;
    });
    if (!waits) return;
    // The next decode has the same id, maybe on ranks that have not lost anybody.
    std::unique_lock lock{board_->mutex};
    board_->changed.wait_for(lock, std::clamp(left(), milliseconds{0}, given_up_within),
                             [&] { return board_->aborts == 0; });
  }

  // -- following them

  template <class Predicate>
  [[nodiscard]] bool all(carried_side side, Predicate predicate) const {
    return std::ranges::all_of(calls_, [&](const live_call& call) {
      return call.side != side || std::invoke(predicate, call);
    });
  }

  void take_answers(milliseconds patience) {
    std::unique_lock lock{board_->mutex};
    board_->changed.wait_for(lock, patience, [&] { return !board_->answers.empty(); });
    for (auto& [id, outcome] : board_->answers) {
      const auto call = std::ranges::find(calls_, id, &live_call::id);
      if (call == calls_.end()) continue;
      call->ended = std::move(outcome);
      call->ended_at = clock::now();
    }
    board_->answers.clear();
  }

  /// Until all of decode is done (no verdict), or the attempt is over.
  std::optional<attempt_verdict> follow() {
    for (;;) {
      take_answers(std::clamp(left(), milliseconds{0}, look));
      if (all(carried_side::decode, &live_call::done)) return std::nullopt;
      if (auto why = is_over()) return attempt_verdict{std::move(*why), {}};
      const auto members = watch_.asked_after(placed_at_);
      if (has_failed(*members)) return judge(*members, now_.where, failures(*members));
    }
  }

  [[nodiscard]] bool has_failed(const membership& members) const {
    const auto time = clock::now();
    const bool all_ended =
        std::ranges::all_of(calls_, [](const live_call& c) { return c.ended.has_value(); });
    return std::ranges::any_of(calls_, [&](const live_call& call) {
      const bool decode = call.side == carried_side::decode;
      if (!call.ended) return decode && is_lost(members, now_.where, call.node);
      if (call.ended->answer) return false;
      const bool lost = call.ended->reach == call_reach::lost;
      if (decode) return lost || all_ended || time - call.ended_at >= explained_within;
      // Decode says by itself whether it had got everything of a prefill that is lost.
      return !lost && time - call.ended_at >= missed_within;
    });
  }

  [[nodiscard]] std::vector<failed_call> failures(const membership& members) const {
    std::vector<failed_call> failed;
    for (const auto& call : calls_) {
      if (call.failed()) {
        failed.push_back(
            {call.side, call.node.name, call.ended->reach, call.ended->answer.error()});
      } else if (!call.ended && is_lost(members, now_.where, call.node)) {
        failed.push_back({call.side,
                          call.node.name,
                          call_reach::lost,
                          {errc::peer_lost, "the cluster has lost " + call.node.name}});
      }
    }
    return failed;
  }

  /// Whether the next decode can take what is there.
  [[nodiscard]] bool keeps_source(const std::vector<std::string>& lost) const {
    return what_.source_is_kept && all(carried_side::prefill, [&](const live_call& call) {
             return !call.ended && std::ranges::find(lost, call.node.name) == lost.end();
           });
  }

  /// What judging could not know.
  void look_again(attempt_verdict& verdict) {
    const auto names = [](const std::vector<node_info>& nodes) {
      std::vector<std::string> all;
      for (const auto& node : nodes) all.push_back(node.name);
      return all;
    };
    const auto code = verdict.why.code;
    // The source did not wait, or is with a decode whose answer was lost.
    const bool source_gone = code == errc::not_found || code == errc::aborted;
    if (verdict.lost.empty() && kept_ && source_gone && !is_over()) {
      verdict.lost = names(now_.where.prefill);
      return;
    }
    // A decode that stood still misses its prefill, which was there all the time.
    const bool decode_guesses = verdict.guessed && what_.source_is_kept &&
                                verdict.lost == names(now_.where.prefill) && keeps_source({});
    if (decode_guesses && prefill_answers()) verdict.lost = names(now_.where.decode);
  }

  /// Asks all of its nodes whether they are there.
  bool prefill_answers() {
    auto answered = std::make_shared<std::size_t>(0);  // guarded by the board
    for (const auto& node : now_.where.prefill) {
      threads_.run([board = board_, &client = client_, node, answered] {
        if (!client.report(node)) return;
        const std::lock_guard lock{board->mutex};
        ++*answered;
        board->changed.notify_all();
      });
    }
    std::unique_lock lock{board_->mutex};
    return board_->changed.wait_for(lock, std::clamp(left(), milliseconds{0}, answers_within),
                                    [&] { return *answered == now_.where.prefill.size(); });
  }

  // -- the end

  carried_outcome success() {
    const auto until = std::min(deadline_, clock::now() + follows_within);
    while (!all(carried_side::prefill, [](const live_call& c) { return c.ended.has_value(); }) &&
           clock::now() < until) {
      take_answers(look);
    }
    carried_outcome out;
    out.attempts = now_.where.attempt;
    out.prefills = prefills_;
    for (auto& call : calls_) {
      auto& answers = call.side == carried_side::prefill ? out.prefill : out.decode;
      answers.push_back(call.done() ? std::move(*call.ended->answer) : std::vector<std::uint8_t>{});
    }
    out.where = now_.where;
    return out;
  }

  const carried_request& what_;
  cluster_client& client_;
  request_watch& watch_;
  side_threads& threads_;
  clock::time_point deadline_;
  std::shared_ptr<answer_board> board_{std::make_shared<answer_board>()};
  carried_attempt now_;
  clock::time_point placed_at_{};
  bool kept_{false};  ///< this attempt goes on from the source of the one before
  std::vector<live_call> calls_;
  std::uint64_t last_call_{0};
  std::uint32_t prefills_{0};
  std::optional<troupe::error> last_;
};

}  // namespace

result<carried_outcome> request_carrier::carry(const carried_request& what) {
  if (what.request.empty() || what.request.size() > max_carried_id) {
    return fail(errc::invalid_config, "the id of a carried request has 1 to " +
                                          std::to_string(max_carried_id) + " bytes, this has " +
                                          std::to_string(what.request.size()));
  }
  if (!what.prefill || !what.decode) {
    return fail(errc::invalid_config, "request " + quoted(what.request) +
                                          " says of one side not what to call it with; set "
                                          "carried_request::prefill and decode");
  }
  watch_.begin();
  auto outcome = carried_run{what, client_, watch_, threads_}.run();
  watch_.end();
  return outcome;
}

}  // namespace troupe::actors
