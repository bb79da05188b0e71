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

/// The engine's operations that have not had their outcome yet: its calls are checked against them
/// at once, before they become messages. The bound is on open operations: these, and the ended ones
/// whose last event the engine has not taken, so that events that are not taken cannot pile up.
/// Also remembers how the latest receives ended. Thread-safe.
class operation_table {
 public:
  explicit operation_table(std::uint32_t bound) : bound_{bound} {}

  struct entry {
    operation_kind kind{operation_kind::value};
    std::string request;              ///< send, receive, hold; else empty
    std::uint32_t token_capacity{0};  ///< send: what its blocks hold; receive: what it asks for
    bool sealed{false};
    bool grows{false};  ///< send
    /// send: how far the blocks of each group of layers reach (`token_capacity` is the least of
    /// them); empty if the layout has no groups.
    std::vector<std::uint32_t> by_group{};
  };
  struct ended_receive {
    std::uint32_t token_capacity{0};  ///< as `entry::token_capacity`
    std::optional<troupe::error> failure;
  };

  /// `tokens`, capped to 32 bits as token positions are.
  [[nodiscard]] static std::uint32_t room_of(std::uint64_t tokens) noexcept;
  /// `overloaded` at the bound; `already_exists` if a send (or a receive, or a hold) of that
  /// request is live; `aborted` after `close`.
  [[nodiscard]] result<operation_id> begin(entry what);
  /// Takes back an operation that nobody was told of yet.
  void take_back(operation_id id) noexcept;
  /// `not_found` if it has ended.
  [[nodiscard]] result<entry> find(operation_id id) const;
  /// Adds room for `tokens` more tokens in one group of a send that grows. `not_found`,
  /// `already_exists` (sealed), `invalid_config` (it does not grow).
  [[nodiscard]] result<void> grow(operation_id send, std::uint64_t tokens, std::uint32_t group = 0);
  /// `not_found`, or `already_exists` if it was sealed before.
  [[nodiscard]] result<void> seal(operation_id id);
  /// Takes a seal back that nobody was told of yet.
  void unseal(operation_id id) noexcept;
  /// Ends an operation. Returns whether it was live, so that the caller may tell the outcome; false
  /// if the outcome was told already.
  bool end(operation_id id);
  /// Same, and remembers how a receive ended; empty `failure`: it succeeded.
  bool end(operation_id id, const std::optional<troupe::error>& failure);
  /// How one of the latest receives ended, whether or not its events were taken. Empty if it is
  /// live, is no receive, or was forgotten.
  [[nodiscard]] std::optional<ended_receive> ended(operation_id receive) const;
  /// The engine has taken the last event of these operations: they are no longer open.
  void last_event_taken(const std::vector<operation_id>& operations) noexcept;
  /// Whether it is live, or has ended but its last event was not taken.
  [[nodiscard]] bool is_open(operation_id id) const;
  [[nodiscard]] std::size_t open() const;
  /// Refuses new operations from here on.
  void close() noexcept;
  /// The operations that have not had their outcome, oldest first.
  [[nodiscard]] std::vector<operation_id> live() const;

 private:
  static constexpr std::size_t receives_kept = 4096;

  [[nodiscard]] static std::string key_of(const entry& what);
  [[nodiscard]] bool end_locked(operation_id id);

  mutable std::mutex mutex_;
  std::uint64_t next_{1};
  std::uint32_t bound_;
  bool closed_{false};
  std::unordered_map<operation_id, entry> live_;
  std::unordered_set<operation_id> ended_;  ///< whose last event was not taken
  std::unordered_map<std::string, operation_id> by_request_;
  std::unordered_map<operation_id, ended_receive> endings_;
  std::deque<operation_id> ending_order_;  ///< keys of `endings_`, oldest first
};

}  // namespace troupe::actors
