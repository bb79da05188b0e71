#pragma once

/// Calls of an engine that must be refused, each with its error code.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"

#include "scenario.hpp"
#include "tally.hpp"

namespace troupe::engine_fuzz {

/// A live send that is certainly not sealed.
struct live_send {
  operation_id operation;
  std::string request;
  std::uint32_t room{0};  ///< tokens that all of its blocks together hold
  bool grows{false};
};

class wrong_calls {
 public:
  wrong_calls(const scenario& s, std::uint32_t node, engine& e, finder found, tally& counts,
              dice& d)
      : s_{s},
        node_{node},
        its_{s.side_of(node)},
        engine_{e},
        found_{std::move(found)},
        counts_{counts},
        dice_{d} {}

  /// Makes call number `which`: one of `wrong_call_count`, or, numbered after them, one of
  /// `wrong_group_call_count`. Skips calls that do not suit the node.
  void make(std::uint32_t which, const std::optional<live_send>& live);

 private:
  /// Arguments that are valid except for the one under test: the ranks of a replica, and a block of
  /// each group of layers, for as many tokens as the smallest of them holds.
  [[nodiscard]] std::vector<std::string> some_sources() const;
  [[nodiscard]] receive_spec a_receive() const;
  [[nodiscard]] send_spec a_send() const;
  template <class Spec>
  void name_blocks(Spec& spec) const;
  /// The table of some group, or the table of all layers.
  template <class Spec>
  [[nodiscard]] std::vector<block_id>& some_blocks(Spec& spec);

  void receive(std::uint32_t which);
  void other(std::uint32_t which, const std::optional<live_send>& live);
  void call_over_no_edge();
  void call_values_of(const std::string& peer);
  void speak_of(const live_send& live);
  void name_groups_wrongly(std::uint32_t which);
  void expect_no_receive_into_one_block_twice();
  void expect_no_receive_that_a_group_is_short_of();
  [[nodiscard]] bool may_receive() const { return !s_.is_prefill(node_) || s_.is_mutual(); }
  template <class Value>
  void expect_refused(const std::string& call, const result<Value>& answer, errc code);

  const scenario& s_;
  std::uint32_t node_;
  const side& its_;
  engine& engine_;
  finder found_;
  tally& counts_;
  dice& dice_;
};

}  // namespace troupe::engine_fuzz
