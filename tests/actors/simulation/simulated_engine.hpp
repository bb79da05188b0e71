#pragma once

/// An engine above a simulated node. It does what an engine's calls do before and after the runner
/// works for them, gives its blocks bytes that are known, and checks every event and every byte.

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine_node.hpp"
#include "simulated_values.hpp"

namespace troupe::actors::engine_simulation {

/// An attempt to move a request, at one prefill rank.
struct source_attempt {
  std::uint32_t rank{0}, attempt{0};
  friend auto operator<=>(const source_attempt&, const source_attempt&) = default;
};

/// How often a request was sent, and how each time ended. Outlives the engines.
struct request_history {
  std::uint32_t attempts{0};
  /// The decode ranks that were told to have it.
  std::map<source_attempt, std::set<std::uint32_t>> delivered{};
  std::set<source_attempt> done{};   ///< whose source was told done
  std::set<std::uint32_t> failed{};  ///< attempts that a receive named and did not get
  bool given_back{false};            ///< a decode engine said so, some time
};

struct engine_totals {
  std::map<transfer_mode, std::uint64_t> moved;
  std::uint64_t failed{0}, aborted{0}, lapsed{0}, sources_done{0}, words{0}, in_line{0}, again{0};
  std::map<errc, std::uint64_t> reasons;
  // With several ranks:
  std::uint64_t from_two{0};     ///< receives done that had two sources
  std::uint64_t from_parts{0};   ///< of these, whose sources hold different layers
  std::uint64_t for_two{0};      ///< sources done that two ranks took
  std::uint64_t once_more{0};    ///< of these, though a rank had failed to receive them
  std::uint64_t held_by_two{0};  ///< of these, that were held for both ranks
  std::uint64_t words_to_two{0};
};

/// How the model is divided among the ranks of a replica.
struct division {
  std::uint32_t ranks{1};
  bool parts{false};  ///< each rank has some of the layers; else some of the heads of all
};

/// What the engines of a run share.
struct engine_ledger {
  value_ledger values;
  std::array<division, 2> divided;   ///< by side
  std::vector<std::string> sources;  ///< the prefill nodes, by rank
  milliseconds retry_window{};
  std::map<std::string, request_history> requests;
  /// Whose memory a transfer has read, and whose it has written.
  std::map<transfer_id, std::array<std::uint64_t, 2>> between;
  /// Since when a request is being sent, by the prefill rank.
  std::map<std::uint32_t, std::map<std::string, moment>> sent_since;
  engine_totals totals;
  std::function<void(const std::string&)> violate, note;
};

class simulated_engine {
 public:
  simulated_engine(engine_node& at, engine_ledger& in);

  /// Takes memory, a layout and a pool for the node. `seed` gives the same model to all nodes.
  static void furnish(engine_node& at, const division& how, std::uint64_t seed, dice& chance);

  // -- what the engine begins; the id is empty if that is refused

  std::optional<operation_id> send(const std::string& request, std::uint32_t attempt,
                                   std::uint32_t tokens, send_spec terms, bool grows);
  /// `own`: the engine allocates the blocks. `attempt`: what the terms expect; 0: any.
  std::optional<operation_id> receive(receive_spec terms, std::uint32_t attempt, bool own);
  std::optional<operation_id> word(source_verb verb, const std::string& request);
  void abort(operation_id which);
  /// Computes some more of what is sent, or seals it. Returns false if nothing is left to do.
  bool compute(operation_id send, std::uint32_t seal_at);
  void stop();

  // -- what happens to it

  void take_events();
  void touched(transfer_id transfer, const link_simulation::touch& what);

  [[nodiscard]] bool is_open(operation_id which) const { return open_.contains(which); }
  /// Whether it has no outcome yet.
  [[nodiscard]] bool goes_on(operation_id which) const {
    const auto found = open_.find(which);
    return found != open_.end() && !found->second.concluded;
  }
  [[nodiscard]] std::size_t open() const noexcept { return open_.size() + values_.open(); }
  [[nodiscard]] simulated_values& values() noexcept { return values_; }
  [[nodiscard]] bool delivered(operation_id which) const { return delivered_.contains(which); }
  /// What a source is sealed with.
  [[nodiscard]] static std::vector<std::byte> aux_of(std::uint32_t attempt);
  /// Compares all memory with what the engine knows is there.
  void check_memory() const;

 private:
  struct operation {
    operation_kind kind{operation_kind::value};
    std::string request{};
    std::uint32_t attempt{0}, tokens{0}, prefix{0};
    std::size_t held_for{0};
    transfer_mode mode{transfer_mode::write};
    kvcache::allocation mine{};      ///< to be given back
    std::vector<block_id> blocks{};  ///< in the order of the tokens
    std::vector<block_id> later{};   ///< of a send that grows: not named yet
    std::optional<std::uint32_t> slot{};
    std::vector<std::uint32_t> computed{};  ///< send: tokens, by layer
    bool sealed{false}, concluded{false}, freed{false};
    bool early{false};     ///< the blocks are given back with the outcome
    bool given_up{false};  ///< the engine has aborted it
    std::optional<transfer_id> transfer{};
    moment began{}, due{};
    moment may_fail{};  ///< with a retry window: no decode rank ends the source before
  };
  /// A head of one token, or the state of a request, as it lies in memory and what it is. The
  /// layer is this rank's, the head is the model's. Of a state: its number in the model and the
  /// first byte that this rank holds.
  struct piece {
    std::size_t region;
    std::uint64_t offset, length;
    std::uint32_t layer, plane, head;
    std::uint32_t local_head{0};
  };

  [[nodiscard]] std::byte belongs(const operation& of, std::uint32_t attempt, const piece& where,
                                  std::uint32_t token, std::uint64_t i) const;
  void each_piece(const operation& of, std::uint32_t token_begin, std::uint32_t token_end,
                  const std::function<void(const piece&, std::uint32_t token)>& what) const;
  void each_state(const operation& of, const std::function<void(const piece&)>& what) const;
  void write(const operation& of, const piece& where, std::uint32_t token);
  [[nodiscard]] bool holds(const operation& of, std::uint32_t attempt, const piece& where,
                           std::uint32_t token) const;
  [[nodiscard]] bool unchanged(const piece& where) const;
  void adopt(const piece& where);
  void scribble(const operation& of);
  void opens(operation_id id, const operation& of, std::span<const block_id> blocks);
  void closes(operation_id id);
  void give_back(operation& of);
  operation_id begins(operation_id id, operation what, milliseconds deadline);
  void watch(operation_id id);
  [[nodiscard]] bool overdue(moment since) const;
  void ends(operation_id id, operation& of, const std::optional<troupe::error>& failure,
            std::uint32_t attempt);
  void check_received(const operation& of, std::uint32_t attempt);
  void check_done(const operation& of);
  void check_patience(const operation& of) const;
  void check_given_back(const operation& of) const;
  void check_left(const operation& of);
  void layers_came(const operation& of, const cache_slice& slice);
  void wrong(const operation& of, const std::string& what) const;
  [[nodiscard]] std::uint32_t rounded(std::uint32_t tokens) const;
  [[nodiscard]] std::optional<std::uint32_t> take_slot();

  engine_node& at_;
  engine_ledger& ledger_;
  const kvcache::cache_layout& layout_;
  std::vector<std::vector<std::byte>> shadow_;        ///< of the memory of the node
  std::vector<std::vector<std::uint32_t>> place_of_;  ///< block or state slot of each byte
  std::vector<piece> pieces_;                         ///< of block 0
  std::map<operation_id, operation> open_;            ///< until the last event
  std::map<std::uint32_t, operation_id> user_of_;     ///< of a place, while it is open
  std::map<transfer_id, operation_id> operation_of_;  ///< by what has touched its blocks
  std::set<operation_id> delivered_;
  std::set<std::uint32_t> free_slots_;
  simulated_values values_;
  bool stopped_{false};
};

}  // namespace troupe::actors::engine_simulation
