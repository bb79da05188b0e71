#pragma once

/// The calls of a carried request to engines: started on threads of their own, followed until they have
/// answered or failed, given up. For `request_carrier`, which says when.

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
  bool repeated{false};         ///< since it was lost
  bool runs{false};             ///< as its engine says; its answer is lost, and it has not failed
  std::stop_source given_up{};  ///< nobody looks for its answer any more

  [[nodiscard]] bool failed() const { return ended && !ended->answer && !runs; }
  [[nodiscard]] bool done() const { return ended && ended->answer; }
  [[nodiscard]] bool has_ended() const { return ended.has_value(); }
};

class carried_calls {
 public:
  /// `abort` gives a call up; empty: nobody is told. All three must outlive it, and the client what it
  /// has the threads do. Nothing here waits past the deadline.
  carried_calls(cluster_client& client, side_threads& threads, const carried_call& abort,
                std::chrono::steady_clock::time_point deadline);

  // -- what is done

  void start(carried_side side, const carried_attempt& now, const std::vector<node_info>& nodes,
             const carried_call& make);
  /// Calls of prefill that were lost, of nodes that the cluster has not: the node may have read them, or
  /// not. Such a one is made again, with the same words, until its engine says that it has it.
  void repeat_lost(const membership& members, const placement& where, const carried_call& make,
                   std::chrono::milliseconds left);
  void give_up_all();
  /// Decode is called again in any case; prefill too, unless it is kept.
  void drop_losers(const std::vector<std::string>& lost, bool keep_prefill);
  void take_answers(std::chrono::milliseconds patience);
  /// Asks the nodes whether they are there.
  [[nodiscard]] bool all_are_there(const std::vector<node_info>& nodes);
  /// In the order of the calls; empty of those that have none.
  [[nodiscard]] std::vector<std::vector<std::uint8_t>> take_answers_of(carried_side side);

  // -- what is known

  template <class Predicate>
  [[nodiscard]] bool all(carried_side side, Predicate predicate) const {
    return std::ranges::all_of(live_, [&](const live_call& call) {
      return call.side != side || std::invoke(predicate, call);
    });
  }
  /// The attempt has failed: `failures` says of what.
  [[nodiscard]] bool have_failed(const membership& members, const placement& where) const;
  [[nodiscard]] std::vector<failed_call> failures(const membership& members,
                                                  const placement& where) const;
  [[nodiscard]] bool none_failed_within(std::chrono::milliseconds time) const;

 private:
  struct answer_board;

  /// On a thread of its own, under a new id of the call.
  void make_call(live_call& call, call_request request);
  /// Its answer is not waited for; the engine is told, unless it has answered or was never asked.
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
