#pragma once

/// The sends and receives of one node: what its engine does for them, and the events that come of
/// them, compared with the model.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "troupe/actors/engine.hpp"

#include "blocks.hpp"
#include "cache_model.hpp"
#include "node.hpp"
#include "scenario.hpp"
#include "tally.hpp"
#include "verdict.hpp"
#include "wrong_calls.hpp"

namespace troupe::engine_fuzz {

class node_transfers {
 public:
  node_transfers(const scenario& s, std::uint32_t node, engine& e, cache_model& model,
                 cache_blocks& blocks, outcomes& ended, finder found, tally& counts);

  void begin_round(std::uint32_t index);

  // -- what the engine does

  void send(std::uint32_t request);
  void compute(const act& one);
  void seal(std::uint32_t request);
  void receive(std::uint32_t request, part what);
  void receive_again(std::uint32_t request);
  void abort(std::uint32_t request, part what);
  /// `part::hold` or `part::release`: sources that this node would receive from.
  void tell_sources(std::uint32_t request, part what);

  /// Takes an event. An event of an operation that has ended is a finding.
  void take(event& e);

  [[nodiscard]] bool empty() const { return live_.empty(); }
  /// Whether all operations have their outcome.
  [[nodiscard]] bool settled() const;
  [[nodiscard]] std::optional<live_send> some_live_send() const;
  [[nodiscard]] std::string open() const;

 private:
  struct transfer {
    part what{part::send};
    std::uint32_t request{0};
    held_blocks blocks;  ///< none yet if the pool chooses them
    std::uint32_t slot{0};
    token_span tokens;
    std::vector<std::uint32_t> told;  ///< receive: per layer, the token up to which it is ready
    int outcomes{0};
    bool sealed{false};
    std::vector<std::size_t> named;  ///< of a growing send: blocks named so far of each table
  };

  [[nodiscard]] std::string words(const transfer& t) const;
  void wrong(const transfer& t, const std::string& what) { found_(words(t) + ": " + what); }
  void check(const transfer& t, const std::string& what) {
    if (!what.empty()) wrong(t, what);
  }

  [[nodiscard]] const request_plan& plan(std::uint32_t request) const;
  [[nodiscard]] content content_of(const request_plan& r) const;
  [[nodiscard]] std::string name(std::uint32_t request) const;
  [[nodiscard]] std::vector<std::string> sources_of(const request_plan& r) const;
  [[nodiscard]] verdict verdict_of(const transfer& t) const;
  [[nodiscard]] std::pair<const std::uint64_t, transfer>* find(std::uint32_t request, part what);
  [[nodiscard]] std::optional<std::uint32_t> slot_of(const transfer& t) const;

  /// The tokens of each group of layers, from the transfer's first one up to `end`.
  [[nodiscard]] std::vector<token_span> tokens_of(const transfer& t, std::uint32_t end) const;
  template <class Spec>
  void name_tables(Spec& spec, block_tables tables) const;

  void compute(const transfer& t, layer_span layers, token_span tokens);
  void name_blocks(std::uint64_t operation, transfer& t, std::optional<std::uint32_t> tokens);
  void expect_not_ready(std::uint64_t operation, const transfer& t, std::uint32_t tokens);
  void take_end(transfer& t, const event& e);
  void take_wanted(const transfer& t, const event_wanted& who);
  void expect_taken(const transfer& t, const result<void>& said);
  void give_back(transfer& t);

  void take_layers(transfer& t, const actors::cache_slice& slice);
  void count(transfer& t, const std::string& how);
  void take_done(transfer& t, const event_done& d);
  void take_failed(transfer& t, const troupe::error& why);
  void take_unpinned(transfer& t);

  const scenario& s_;
  std::uint32_t node_;
  const side& its_;
  engine& engine_;
  cache_model& model_;
  cache_blocks& blocks_;
  outcomes& ended_;
  finder found_;
  tally& counts_;
  const round* round_{nullptr};
  std::uint32_t round_index_{0};
  std::map<std::uint64_t, transfer> live_;
};

}  // namespace troupe::engine_fuzz
