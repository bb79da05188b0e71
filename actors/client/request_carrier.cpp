#include "troupe/actors/request_carrier.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/client/carried_calls.hpp"
#include "troupe/actors/client/request_blame.hpp"
#include "troupe/actors/client/request_watch.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors {

namespace {

using clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Leaves room for the suffix of a source, like "#0123abcd.2", in an id of 256 bytes.
constexpr std::size_t max_carried_id = 240;
/// How often the membership is checked while calls are in progress.
constexpr milliseconds look_every{25};
/// How long decode's answer waits for prefill's, which usually comes first.
constexpr milliseconds follows_within{1000};
/// How long the cluster may not yet know of a node that stops in good order after its calls have
/// ended: the node ends its transfers first, within a second.
constexpr milliseconds news_within{1200};
/// How long the supervisor may take to answer on a busy machine. It is asked again in the remaining
/// time.
constexpr milliseconds answers_within{2000};
constexpr milliseconds shortest_pause{10};
constexpr milliseconds longest_pause{500};

/// A unique id for one carry of a request: nodes remember how the previous carry ended.
std::string carried_id(const std::string& request) {
  std::random_device dice;
  char tag[10];
  (void)std::snprintf(tag, sizeof tag, "#%08x", dice());
  return request + tag;
}

/// Holds the supervisor's answer. A pending answer keeps it alive beyond the request.
struct placement_board {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<result<placement>> placed;
  bool over{false};  ///< the request is over: nobody reads `placed` any more
};

/// One request, from its first placement to its outcome.
class carried_run {
 public:
  carried_run(const carried_request& what, cluster_client& client, request_watch& watch,
              side_threads& threads)
      : what_{what},
        id_{carried_id(what.request)},
        client_{client},
        watch_{watch},
        threads_{threads},
        deadline_{clock::now() + what.deadline},
        calls_{client, threads, what.abort, deadline_} {}

  result<carried_outcome> run() {
    auto outcome = guarded([this] { return attempts(); });
    {
      const std::lock_guard lock{board_->mutex};
      board_->over = true;
    }
    over_.request_stop();
    const auto told = guarded([this]() -> result<carried_outcome> {
      threads_.run([&client = client_, &watch = watch_, id = id_] {
        if (!client.finished(id)) watch.tell_later(id);
      });
      return carried_outcome{};
    });
    if (!told) watch_.tell_later(id_);
    (void)guarded([this]() -> result<carried_outcome> {
      calls_.give_up_all();
      return carried_outcome{};
    });
    return outcome;
  }

 private:
  /// Turns exceptions of callbacks, and of the system out of threads, into an error of the request.
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
    return {errc::deadline, "request " + in_quotes(what_.request) + " had " +
                                time_text(what_.deadline) + ", which have passed" +
                                (last_ ? "; what failed last: " + to_string(*last_) : "")};
  }

  /// Why the request is over, whatever its nodes do: it was given up or its deadline has passed.
  [[nodiscard]] std::optional<troupe::error> is_over() const {
    if (what_.stop.stop_requested()) {
      return troupe::error{errc::aborted, "request " + in_quotes(what_.request) + " was given up"};
    }
    if (left().count() <= 0) return overdue();
    return std::nullopt;
  }

  result<carried_outcome> attempts() {
    placement_request ask;
    ask.request = id_;
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
      logger("carrier")->info("request {}, attempt {}: lost {} ({}); it goes on {}", id_,
                              now_.where.attempt, ask.failed.front(), to_string(*last_),
                              ask.keep_source != 0 ? "from the cache that is there" : "elsewhere");
      calls_.drop_losers(verdict->lost, ask.keep_source != 0);
    }
  }

  // -- placing

  result<placement> place(placement_request& ask) {
    auto pause = shortest_pause;
    bool knows_what_is_missing = false;
    for (;; pause = std::min(2 * pause, longest_pause)) {
      if (auto why = is_over()) return fail(std::move(*why));
      auto asked = ask_supervisor(ask);
      if (!asked) continue;  // the request is over
      auto& where = *asked;
      if (where && where->failed == 0) return std::move(*where);
      if (where) {
        auto why = refusal(*where);
        // A supervisor that ends answers `aborted`; the next one is asked. One that waited in vain
        // answers `deadline` and names what is missing; our own deadline may not have passed yet.
        if (why.code != errc::overloaded && why.code != errc::aborted &&
            why.code != errc::deadline) {
          if (last_) why.message += "; what failed last: " + to_string(*last_);
          return fail(std::move(why));
        }
        knows_what_is_missing = why.code == errc::deadline;
        last_ = std::move(why);
      } else {
        const auto code = where.error().code;
        if (code == errc::version_mismatch || code == errc::unauthorized ||
            code == errc::invalid_config) {
          return fail(where.error());
        }
        // A timeout in the remaining time tells less than the earlier refusal: keep the refusal.
        if (!knows_what_is_missing || code != errc::deadline) last_ = where.error();
      }
      rest(pause);
    }
  }

  /// Empty if the request is over before the answer comes. A placement that comes later is given
  /// back.
  std::optional<result<placement>> ask_supervisor(placement_request& ask) {
    const auto time = left();
    // The supervisor knows what is missing: its refusal should arrive before our time is over.
    ask.timeout_ms = whole_ms(time - std::min(answers_within, time / 4));
    threads_.run(
        [board = board_, &client = client_, &watch = watch_, ask, time, over = over_.get_token()] {
          auto where = client.ask_placement(ask, time, over);
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
    while (!board_->placed && !is_over()) board_->changed.wait_for(lock, look_every);
    return std::exchange(board_->placed, std::nullopt);
  }

  void rest(milliseconds pause) {
    std::this_thread::sleep_for(std::clamp(left(), milliseconds{0}, pause));
  }

  // -- calls

  void begin(placement where, bool asked_to_keep) {
    const bool kept = asked_to_keep && where.same_source != 0;
    if (!kept) {
      calls_.give_up_all();
      ++prefills_;
    }
    now_.source = id_ + "." + std::to_string(prefills_);
    now_.where = std::move(where);
    placed_at_ = clock::now();
    kept_ = kept;
    now_.left = left();
    if (!kept) calls_.start(carried_side::prefill, now_, now_.where.prefill, what_.prefill);
    calls_.start(carried_side::decode, now_, now_.where.decode, what_.decode);
  }

  // -- following them

  /// Waits until all of decode is done (no verdict) or the attempt has failed.
  std::optional<attempt_verdict> follow() {
    for (;;) {
      calls_.take_answers(std::clamp(left(), milliseconds{0}, look_every));
      if (calls_.all(carried_side::decode, &live_call::done)) return std::nullopt;
      if (auto why = is_over()) return attempt_verdict{std::move(*why), {}};
      const auto members = watch_.asked_after(placed_at_);
      if (calls_.have_failed(*members, now_.where)) {
        auto verdict = judge(*members, now_.where, calls_.failures(*members, now_.where));
        if (!waits_for_news(verdict)) return verdict;
      }
      calls_.repeat_lost(*members, now_.where, what_.prefill, left());
    }
  }

  /// Whether to wait for news: no node is known to be lost, but one may be, because a stopping node
  /// ends its calls before it leaves the cluster. If a kept source is gone, there is nothing to
  /// wait for.
  [[nodiscard]] bool waits_for_news(const attempt_verdict& verdict) const {
    const auto code = verdict.why.code;
    return verdict.lost.empty() && may_follow_from_a_loss(code) &&
           !(kept_ && code == errc::not_found) && !calls_.none_failed_within(news_within);
  }

  /// Whether the next decode can use the existing prefill.
  [[nodiscard]] bool keeps_source(const std::vector<std::string>& lost) const {
    return what_.source_is_kept && calls_.all(carried_side::prefill, [&](const live_call& call) {
      return !call.ended && std::ranges::find(lost, call.node.name) == lost.end();
    });
  }

  /// Corrects the verdict with facts that `judge` does not have.
  void look_again(attempt_verdict& verdict) {
    const auto names = [](const std::vector<node_info>& nodes) {
      std::vector<std::string> all;
      for (const auto& node : nodes) all.push_back(node.name);
      return all;
    };
    const auto code = verdict.why.code;
    // The kept source did not wait, or was taken by a decode whose answer was lost.
    const bool source_gone = code == errc::not_found || code == errc::aborted;
    if (verdict.lost.empty() && kept_ && source_gone && !is_over()) {
      verdict.lost = names(now_.where.prefill);
      return;
    }
    // A decode that was suspended reports its prefill lost, although the prefill was there all the
    // time.
    const bool decode_guesses = verdict.guessed && what_.source_is_kept &&
                                verdict.lost == names(now_.where.prefill) && keeps_source({});
    if (decode_guesses && calls_.all_are_there(now_.where.prefill))
      verdict.lost = names(now_.where.decode);
  }

  // -- the end

  carried_outcome success() {
    const auto until = std::min(deadline_, clock::now() + follows_within);
    while (!calls_.all(carried_side::prefill, &live_call::has_ended) && clock::now() < until) {
      calls_.take_answers(look_every);
    }
    carried_outcome out;
    out.attempts = now_.where.attempt;
    out.prefills = prefills_;
    out.prefill = calls_.take_answers_of(carried_side::prefill);
    out.decode = calls_.take_answers_of(carried_side::decode);
    out.where = now_.where;
    return out;
  }

  const carried_request& what_;
  std::string id_;
  cluster_client& client_;
  request_watch& watch_;
  side_threads& threads_;
  clock::time_point deadline_;
  std::shared_ptr<placement_board> board_{std::make_shared<placement_board>()};
  std::stop_source over_;  ///< stops waiting for a placement
  carried_calls calls_;
  carried_attempt now_;
  clock::time_point placed_at_{};
  bool kept_{false};  ///< this attempt continues from the source of the previous one
  std::uint32_t prefills_{0};
  std::optional<troupe::error> last_;
};

}  // namespace

struct request_carrier::helpers {
  explicit helpers(cluster_client& client) : watch{client} {}

  request_watch watch;
  side_threads threads;  ///< declared last: they use `watch` and must end before it
};

request_carrier::request_carrier(cluster_client& client)
    : client_{client}, helpers_{std::make_unique<helpers>(client)} {}

request_carrier::~request_carrier() = default;

result<carried_outcome> request_carrier::carry(const carried_request& what) {
  if (what.request.empty() || what.request.size() > max_carried_id) {
    return fail(errc::invalid_config, "the id of a carried request has 1 to " +
                                          std::to_string(max_carried_id) + " bytes, this has " +
                                          std::to_string(what.request.size()));
  }
  if (!what.prefill || !what.decode) {
    return fail(errc::invalid_config,
                "request " + in_quotes(what.request) +
                    " gives no call for one of its sides; set carried_request::prefill and decode");
  }
  helpers_->watch.begin();
  auto outcome = or_error("the request cannot be carried", [&] {
    return carried_run{what, client_, helpers_->watch, helpers_->threads}.run();
  });
  helpers_->watch.end();
  return outcome;
}

}  // namespace troupe::actors
