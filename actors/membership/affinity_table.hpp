#pragma once

/// Maps an affinity (a session, a conversation) to the replica of each stage that its requests go
/// to. A plain class of the `router`, without threads, I/O or a clock. It remembers a bounded
/// number of keys; the key that has not been used for longest is forgotten first, in all its stages
/// together.

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace troupe::actors {

/// A replica in one life. A rank that restarts begins the replica's next life, with an empty cache.
struct affinity_binding {
  std::size_t replica{0};  ///< index in its stage
  std::uint64_t life{0};

  friend bool operator==(const affinity_binding&, const affinity_binding&) = default;
};

class affinity_table {
 public:
  explicit affinity_table(std::size_t max_keys) : max_keys_{max_keys} {}
  // The index points into the entries, which may be moved but not copied.
  affinity_table(const affinity_table&) = delete;
  affinity_table& operator=(const affinity_table&) = delete;
  affinity_table(affinity_table&&) = default;
  affinity_table& operator=(affinity_table&&) = default;
  ~affinity_table() = default;

  /// The binding of `key` in that stage, if there is one. The key counts as used.
  [[nodiscard]] std::optional<affinity_binding> find(std::string_view key, std::size_t stage);
  /// Binds `key` in that stage from now on. The key counts as used.
  void bind(std::string_view key, std::size_t stage, affinity_binding where);

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }

 private:
  struct stage_binding {
    std::size_t stage{0};
    affinity_binding where;
  };
  struct entry {
    std::string key;
    std::vector<stage_binding> stages;
  };

  /// Moves the entry of `key` to the front; null if the key is unknown.
  [[nodiscard]] entry* use(std::string_view key);

  std::size_t max_keys_;
  std::list<entry> entries_;  ///< the most recently used first
  std::unordered_map<std::string_view, std::list<entry>::iterator> index_;
};

}  // namespace troupe::actors
