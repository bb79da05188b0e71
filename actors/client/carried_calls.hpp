#pragma once

/// The calls of a carried request to engines: each is started on its own thread and followed until
/// it has answered, failed, or been given up. `request_carrier` decides when.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "troupe/actors/client/request_blame.hpp"
#include "troupe/actors/client/request_watch.hpp"
#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/request_carrier.hpp"

namespace troupe::actors {

struct live_call {
  std::uint64_t id{0};
  carried_side side{carried_side::prefill};
  node_info node;
  carried_attempt attempt;
  std::optional<call_outcome> ended;
  std::chrono::steady_clock::time_point ended_at{};
  bool repeated{false};         ///< made again after it was lost
  bool runs{false};             ///< its engine says it runs: the answer is lost, not the call
  std::stop_source given_up{};  ///< its answer is no longer wanted

  [[nodiscard]] bool failed() const { return ended && !ended->answer && !runs; }
  [[nodiscard]] bool done() const { return ended && ended->answer; }
  [[nodiscard]] bool has_ended() const { return ended.has_value(); }
};

class carried_calls {
 public:
  /// `abort` makes the request that aborts a call; empty: engines are not told. All three
  /// references must outlive this object, and the client must outlive the work on `threads`. No
  /// function waits past the deadline.
  carried_calls(cluster_client& client, side_threads& threads, const carried_call& abort,
                std::chrono::steady_clock::time_point deadline);

  // -- actions

  void start(carried_side side, const carried_attempt& now, const std::vector<node_info>& nodes,
             const carried_call& make);
  /// Repeats prefill calls that were lost on nodes that are not. The node may or may not have read
  /// such a call: it is repeated unchanged until the engine says that it has it.
  void repeat_lost(const membership& members, const placement& where, const carried_call& make,
                   std::chrono::milliseconds left);
  void give_up_all();
  /// Gives up the calls of a failed attempt: those of decode, and those of prefill unless it is
  /// kept.
  void drop_losers(const std::vector<std::string>& lost, bool keep_prefill);
  void take_answers(std::chrono::milliseconds patience);
  /// Returns whether all nodes answer.
  [[nodiscard]] bool all_are_there(const std::vector<node_info>& nodes);
  /// In the order of the calls; empty for a call without an answer.
  [[nodiscard]] std::vector<std::vector<std::uint8_t>> take_answers_of(carried_side side);

  // -- state

  template <class Predicate>
  [[nodiscard]] bool all(carried_side side, Predicate predicate) const {
    return std::ranges::all_of(live_, [&](const live_call& call) {
      return call.side != side || std::invoke(predicate, call);
    });
  }
  /// Whether the attempt has failed; `failures` says why.
  [[nodiscard]] bool have_failed(const membership& members, const placement& where) const;
  [[nodiscard]] std::vector<failed_call> failures(const membership& members,
                                                  const placement& where) const;
  [[nodiscard]] bool none_failed_within(std::chrono::milliseconds time) const;

 private:
  struct answer_board;

  /// Makes the call on a new thread, under a new id.
  void make_call(live_call& call, call_request request);
  /// Stops waiting for the answer, and tells the engine unless it has answered or was never asked.
  void give_up(live_call& call);
  [[nodiscard]] std::chrono::steady_clock::time_point within(std::chrono::milliseconds time) const;

  cluster_client& client_;
  side_threads& threads_;
  const carried_call& abort_;
  std::chrono::steady_clock::time_point deadline_;
  std::shared_ptr<answer_board> board_;
  std::vector<live_call> live_;
  std::uint64_t last_id_{0};
};

}  // namespace troupe::actors
