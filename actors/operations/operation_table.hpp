#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

enum class operation_kind : std::uint8_t { send, receive, value, place, release, hold };

/// The operations of the engine that have not had their outcome yet: what its calls are checked
/// against at once, before they become messages. What is bounded are the open ones: those, and the
/// ended ones whose last event the engine has not taken, so that events which nobody takes cannot
/// pile up. Of the latest receives it also says how they ended. Thread-safe.
class operation_table {
 public:
  explicit operation_table(std::uint32_t bound) : bound_{bound} {}

  struct entry {
    operation_kind kind{operation_kind::value};
    std::string request;              ///< send, receive, hold; else empty
    std::uint32_t token_capacity{0};  ///< send: what its blocks hold; receive: what it asks for
    bool sealed{false};
    bool grows{false};  ///< send
    /// send: what the blocks of each group of layers reach to, the least of which is `token_capacity`; empty
    /// where the layout has no groups.
    std::vector<std::uint32_t> by_group{};
  };
  struct ended_receive {
    std::uint32_t token_capacity{0};  ///< as `entry::token_capacity`
    std::optional<troupe::error> failure;
  };

  /// Token positions have 32 bits.
  [[nodiscard]] static std::uint32_t room_of(std::uint64_t tokens) noexcept;
  /// `overloaded` at the bound; `already_exists` when a send (or a receive, or a hold) of that request
  /// is live; `aborted` after `close`.
  [[nodiscard]] result<operation_id> begin(entry what);
  /// `not_found` when it ended.
  [[nodiscard]] result<entry> find(operation_id id) const;
  /// A send that grows has room for so many tokens more of one group. `not_found`, `already_exists` (sealed),
  /// `invalid_config` (it does not grow).
  [[nodiscard]] result<void> grow(operation_id send, std::uint64_t tokens, std::uint32_t group = 0);
  /// `not_found`, or `already_exists` when it was sealed before.
  [[nodiscard]] result<void> seal(operation_id id);
  /// True: it was live and is not any more; the caller may tell the outcome. False: told already.
  bool end(operation_id id);
  /// The same; how a receive ended is remembered. Empty: it succeeded.
  bool end(operation_id id, const std::optional<troupe::error>& failure);
  /// How one of the latest receives ended, whether or not its events were taken. Empty: it is live, is no
  /// receive, or was forgotten.
  [[nodiscard]] std::optional<ended_receive> ended(operation_id receive) const;
  /// The engine has taken the last event of these: they are open no more.
  void last_event_taken(const std::vector<operation_id>& operations);
  /// Whether it is live, or has ended and its last event was not taken.
  [[nodiscard]] bool is_open(operation_id id) const;
  [[nodiscard]] std::size_t open() const;
  /// Nothing begins any more. What is still live, for its outcome.
  [[nodiscard]] std::vector<operation_id> close();

 private:
  static constexpr std::size_t receives_kept = 4096;

  [[nodiscard]] static std::string key_of(const entry& what);
  [[nodiscard]] bool end_locked(operation_id id);

  mutable std::mutex mutex_;
  std::uint64_t next_{1};
  std::uint32_t bound_;
  bool closed_{false};
  std::unordered_map<operation_id, entry> live_;
  std::unordered_set<operation_id> ended_;  ///< but not had their last event taken
  std::unordered_map<std::string, operation_id> by_request_;
  std::unordered_map<operation_id, ended_receive> endings_;
  std::deque<operation_id> ending_order_;  ///< of those, oldest first
};

}  // namespace troupe::actors
