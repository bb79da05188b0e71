#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/operations/cache_leases.hpp"
#include "troupe/actors/operations/compute_line.hpp"
#include "troupe/actors/operations/source.hpp"
#include "troupe/kvcache/plan.hpp"

namespace troupe::actors {

/// A `receive` of the engine: one transfer from each rank of the prefill replica, one outcome.
struct receiving {
  enum class phase : std::uint8_t { in_line, linking, moving, concluded };
  struct from_rank {
    std::string peer;
    std::optional<transfer_id> transfer;  ///< once its receiver is spawned
    session_actor receiver;
    bool done{false};
    /// Per layer of this node, the first token that is not there yet; all tokens are of a layer that this
    /// source does not hold.
    std::vector<std::uint32_t> landed;
  };

  receive_spec spec;
  phase now{phase::linking};
  std::vector<from_rank> ranks;
  std::vector<std::uint32_t> told;       ///< per layer, what the engine was told of
  std::vector<open_when_complete> held;  ///< streams that wait for layers
  std::uint32_t live{0};                 ///< receivers that have not unpinned
  bool pinned{false};
  time_point began{std::chrono::steady_clock::now()};
  time_point deadline;
  std::uint64_t bytes{0};
  seen_movement moved;
  std::vector<std::byte> aux;
};

/// A request of a decode rank that came before its source.
struct parked_request {
  link_handle link;
  transfer_request request;
  time_point deadline;
  time_point until;  ///< the deadline, or sooner where the request says so
};

/// A `release` or a `hold` of the engine: a word to each source of a request, one outcome.
struct words_to_sources {
  struct to_source {
    std::string peer;
    std::uint64_t life{0};                ///< that is meant; 0: whichever lives
    std::optional<transfer_id> transfer;  ///< once its actor is spawned
    bool ended{false};
  };
  source_verb verb{source_verb::release};
  std::string request;
  std::vector<to_source> sources;
  time_point deadline;
  std::optional<troupe::error> failure;  ///< the first of a release
};

/// A decode node holds a source of ours, and will ask for it.
struct source_hold {
  operation_id source;
  link_handle link;
  time_point since;
};

/// An actor that works for an operation, until its last message.
struct live_session {
  operation_id operation;  ///< 0: of a peer, on a keyed value of ours
  session_actor actor;
  caf::actor_id link{0};  ///< of the link's actor
  transfer_report report;
  time_point deadline;
  bool served{false};   ///< a peer has asked for it, and its share of what is served counts
  bool crashed{false};  ///< it, or its link: nobody is left to end it
  time_point started{std::chrono::steady_clock::now()};
};

/// Who waits for the link with one peer. Stays, also when nobody waits any more, until the node has
/// answered: it is asked once.
struct link_line {
  std::set<operation_id> waiting;
  std::uint64_t ask{0};  ///< of the question
};

/// An operation on a keyed value of another node, before it has a link.
struct waiting_value {
  start_value order;
  time_point deadline;
};

struct engine_port_state {
  /// What a deadline ends.
  enum class timer : std::uint8_t { operation, session, parked, leases };
  using deadline_entry = std::tuple<time_point, timer, std::uint64_t>;

  context_ptr context;
  caf::typed_actor<caf::reacts_to<node_command>> node;
  caf::typed_actor<caf::reacts_to<pool_command>> pool;
  std::map<operation_id, source> sources;
  std::unordered_map<operation_id, compute_line> compute;   ///< of sources, held back
  std::unordered_map<std::string, operation_id> source_of;  ///< by request, not concluded
  ended_requests ended;
  ended_requests given_back;  ///< before they were sent
  std::map<operation_id, receiving> receives;
  std::unordered_map<transfer_id, live_session> sessions;  ///< both sides, and values
  std::size_t crashed_sessions{0};                         ///< of them; nobody waits for their end
  std::unordered_map<std::string, link_handle> links;      ///< by peer name, up
  /// Links whose end is told to their sessions; whether their peer has left.
  std::unordered_map<caf::actor_id, bool> watched_links;
  std::unordered_map<std::string, link_line> waiting_for_link;  ///< by peer name
  std::unordered_map<std::string, std::uint64_t> former_lives;  ///< by peer name, ended last
  std::unordered_map<std::string, std::vector<parked_request>> parked;  ///< by request
  std::uint64_t asks{0};                                                ///< for links, so far
  std::unordered_multimap<transfer_id, std::string> parked_as;  ///< their requests by transfer
  std::uint32_t parked_count{0};
  std::map<std::string, std::uint32_t> parked_of;  ///< by peer name
  std::size_t parked_bytes{0};                     ///< of their lists
  std::uint32_t served_count{0};                   ///< of the sessions
  std::set<deadline_entry> deadlines;
  cache_leases leases;                   ///< of sources and receives that are not concluded
  std::optional<time_point> lease_beat;  ///< the next one; empty: nothing is held
  std::unordered_map<incarnation, std::shared_ptr<const kvcache::transfer_geometry>> send_geometry;
  std::unordered_map<incarnation, std::shared_ptr<const kvcache::transfer_geometry>>
      receive_geometry;
  std::map<operation_id, words_to_sources> words;         ///< not concluded
  std::unordered_map<std::string, operation_id> hold_of;  ///< of the words, by request
  std::unordered_map<transfer_id, source_hold> holds;     ///< of peers
  std::map<operation_id, waiting_value> values;           ///< that wait for a link
  std::unordered_map<operation_id, transfer_id> value_clients;
  std::unordered_set<operation_id> copying;  ///< large puts to this node itself
  /// Blocks of the pool that values are put from, until nobody can read them.
  std::unordered_map<operation_id, std::vector<block_id>> value_pins;
  std::shared_ptr<const membership> members{std::make_shared<membership>()};  ///< newest seen
  std::mt19937_64 random{std::random_device{}()};
  bool ticking{false};
  bool stopping{false};
  static inline const char* name = "engine_port";
};

[[nodiscard]] engine_port_actor::behavior_type engine_port(
    engine_port_actor::stateful_pointer<engine_port_state> self, context_ptr context);

}  // namespace troupe::actors
