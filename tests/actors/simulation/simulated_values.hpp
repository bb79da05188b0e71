#pragma once

/// Keyed values above simulated nodes: what the engines put and ask for, and what may be stored
/// where by all that they were told. Each value says itself which one it is.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine_node.hpp"

namespace troupe::actors::engine_simulation {

using simulation::dice;

/// Which bytes a value has; 0: none at all.
using content_id = std::uint64_t;

/// A put, and what is known of its value.
struct put_value {
  content_id content{0};
  std::uint64_t size{0};
  bool lasts{true};  ///< it has no time to live
  /// Lives of the store; it is stored in one of them at most.
  std::uint32_t first_life{0}, last_life{UINT32_MAX};
  bool failed{false};                     ///< for certain: it never is stored
  bool seen{false};                       ///< it was stored
  bool may_be_gone{false};                ///< it may have been removed, or its time may be over
  std::optional<moment> there{}, gone{};  ///< by when it was stored for certain, and was no longer
};
using put_ptr = std::shared_ptr<put_value>;

/// An operation on a key of a store.
struct value_question {
  value_verb verb{value_verb::get};
  std::string by{}, store{}, key{};
  put_ptr put{};
  moment begun{};
  std::uint32_t first_life{0}, last_life{UINT32_MAX};  ///< of the store, from the call on
};
using question_ptr = std::shared_ptr<value_question>;

/// What may be stored, by what all engines of a run were told. Outlives the engines.
class value_ledger {
 public:
  [[nodiscard]] content_id new_content() { return ++contents_; }
  void store_begins(const std::string& store) { ++lives_[store]; }
  /// Every value there that has a time to live is dropped.
  void expires(const std::string& store);
  [[nodiscard]] bool was_put(const std::string& store, const std::string& key,
                             content_id content) const;

  // -- an operation begins, and its outcome comes

  void begins(const question_ptr& q);
  void is_done(const question_ptr& q);
  void has_failed(const question_ptr& q, bool for_certain);
  void finds_nothing(const question_ptr& q);
  void finds(const question_ptr& q, content_id content, std::uint64_t size);
  void hears_of(const question_ptr& q, std::uint64_t size, bool lasts);

  /// A store has these bytes under a key now; empty: of no value.
  void holds(const std::string& store, const std::string& key, std::optional<content_id> content,
             std::uint64_t size) const;
  void wrong(const value_question& q, const std::string& what) const;

  std::map<std::string, std::uint64_t> counts;
  std::function<moment()> now;
  std::function<void(const std::string&)> violate, note;

 private:
  struct history {
    std::vector<put_ptr> puts;
    std::vector<question_ptr> removals;  ///< that may still remove something
  };

  [[nodiscard]] bool ends(const question_ptr& q);
  [[nodiscard]] static put_ptr find(const history& of, content_id content, std::uint64_t size);
  [[nodiscard]] static bool may_find(const value_question& q, const put_value& put);
  void shows(const value_question& q, const put_ptr& there);

  content_id contents_{0};
  std::map<std::string, std::uint32_t> lives_;
  std::map<std::pair<std::string, std::string>, history> keys_;
};

/// The keyed values of one engine.
class simulated_values {
 public:
  /// `wrote`: the engine has written so much at the start of its first region.
  simulated_values(engine_node& at, value_ledger& in, std::function<void(std::uint64_t)> wrote);

  /// Before the first block of the cache: a value that begins there ends in that block.
  static constexpr std::uint32_t room_before_blocks = 40U << 10U;
  static constexpr std::uint32_t keys = 4;
  [[nodiscard]] static std::string key(std::uint32_t i) { return "k" + std::to_string(i); }

  /// Takes memory for the node's store.
  static void furnish(engine_node& at, dice& chance);

  /// Begins a random operation on the key, and aborts it sometimes.
  void ask(const std::string& store, const std::string& key);
  void remove(const std::string& store, const std::string& key);
  /// A put, then a get, then a removal, which must all be done.
  void begin_trial(const std::string& store, const std::string& key, bool large);
  /// Drops what has a time to live.
  void expire();
  void stop() { stopped_ = true; }

  /// Whether the event is of a value.
  bool take(event& told);
  /// Whether only values are touched there.
  [[nodiscard]] bool lie_at(const link_simulation::touch& what) const;
  void touched(transfer_id transfer, const link_simulation::touch& what);

  [[nodiscard]] std::size_t open() const noexcept { return open_.size(); }
  /// Whether all that is stored or held is what may be.
  void check() const;
  /// What is left of ended operations; drops what is stored. Empty: nothing.
  [[nodiscard]] std::string leftovers();

 private:
  /// Memory of the engine, lent to the puts of one content.
  struct slot {
    std::vector<std::byte> bytes{};
    content_id content{0};
    std::uint32_t users{0};
  };
  struct held_view {
    value_view view{};
    content_id content{0};
  };
  using lent_bytes = std::span<const std::byte>;
  struct operation {
    question_ptr asked{};
    content_id content{0};  ///< of a put
    slot* memory{nullptr};  ///< of a put, or:
    kvcache::allocation block{};
    bool in_block{false};
    std::shared_ptr<const void> view{};
    bool lent{false};  ///< a peer may read memory that the outcome gives back
    bool trial{false};
    moment due{};
  };

  [[nodiscard]] operation on(value_verb verb, const std::string& store,
                             const std::string& key) const;
  [[nodiscard]] std::uint64_t small_size() const;
  [[nodiscard]] std::uint64_t large_size() const;
  void put(operation of, std::uint64_t size);
  [[nodiscard]] lent_bytes lend_copy(operation& of, start_value& order, std::uint64_t size);
  [[nodiscard]] std::optional<lent_bytes> lend_view(operation& of);
  [[nodiscard]] std::optional<lent_bytes> lend_block(operation& of);
  [[nodiscard]] std::optional<lent_bytes> lend_slot(operation& of, std::uint64_t size);
  void begin(operation of, start_value order);
  void abort(operation_id which);
  void watch(operation_id id);
  void has_failed(const operation& of, const troupe::error& why);
  void next_of_trial(const value_question& q, const event_failed* failed);
  void keep(held_view got);
  void give_back(operation& of);
  void give_back(kvcache::allocation& block);
  void reuse_block();
  void count(const value_question& of, const std::string& how,
             std::optional<std::uint64_t> size = {});
  [[nodiscard]] dice& chance() const { return at_.world().transports().chance; }

  engine_node& at_;
  value_ledger& ledger_;
  std::function<void(std::uint64_t)> wrote_;
  std::vector<slot> slots_;
  std::map<operation_id, operation> open_;
  std::map<std::uint64_t, held_view> views_;  ///< got, and not given back yet
  std::uint64_t last_view_{0};
  std::uint32_t trials_{0};  ///< operations of them that are not done
  bool stopped_{false};
};

}  // namespace troupe::actors::engine_simulation
