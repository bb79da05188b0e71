#pragma once

#include <utility>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors::links {

/// Counts one link in the node's heartbeats for as long as this object lives, so that the link of a
/// crashed actor is no longer counted.
class link_count {
 public:
  explicit link_count(context_ptr context) : context_{std::move(context)} {}
  link_count(const link_count&) = delete;
  link_count& operator=(const link_count&) = delete;
  ~link_count() { ends(); }

  void is_up() { becomes(state::up); }
  /// The link broke and is being rebuilt.
  void broke() { becomes(state::broken); }
  void ends() { becomes(state::none); }

 private:
  enum class state { none, up, broken };

  void becomes(state next) {
    auto& counters = context_->counters;
    if (now_ == state::up) counters.links_up.fetch_sub(1);
    if (now_ == state::broken) counters.links_broken.fetch_sub(1);
    now_ = next;
    if (now_ == state::up) counters.links_up.fetch_add(1);
    if (now_ == state::broken) counters.links_broken.fetch_add(1);
  }

  const context_ptr context_;
  state now_{state::none};
};

}  // namespace troupe::actors::links
