#pragma once

/// Calls of an engine that it must refuse, each with the error of its name.

#include <cstdint>
#include <optional>
#include <string>

#include "troupe/actors/engine.hpp"

#include "scenario.hpp"
#include "tally.hpp"

namespace troupe::engine_fuzz {

/// A send that lives for certain and is not sealed.
struct live_send {
  operation_id operation;
  std::string request;
  std::uint32_t blocks{0};
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

  /// One of `wrong_call_count`; those that do not suit the node are left out.
  void make(std::uint32_t which, const std::optional<live_send>& live);

 private:
  void receive(std::uint32_t which);
  void other(std::uint32_t which, const std::optional<live_send>& live);
  void call_over_no_edge();
  void call_values_of(const std::string& peer);
  void speak_of(const live_send& live);
  template <class Value>
  void expect_refused(const char* call, const result<Value>& answer, errc code);

  const scenario& s_;
  std::uint32_t node_;
  const side& its_;
  engine& engine_;
  finder found_;
  tally& counts_;
  dice& dice_;
};

}  // namespace troupe::engine_fuzz
