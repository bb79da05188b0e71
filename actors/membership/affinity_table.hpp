#pragma once

/// Which replica of each stage the requests of one affinity (a session, a conversation) go to. A
/// plain class of the `router`, without threads, I/O or a clock. It remembers a bounded number of
/// keys; the one that was not asked for the longest is forgotten first, in all its stages together.

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace troupe::actors {

/// A replica in one life: a rank that starts again begins the next one, with an empty cache.
struct affinity_binding {
  std::size_t replica{0};  ///< index in its stage
  std::uint64_t life{0};

  friend bool operator==(const affinity_binding&, const affinity_binding&) = default;
};

class affinity_table {
 public:
  explicit affinity_table(std::size_t max_keys) : max_keys_{max_keys} {}
  // The index points into the entries: those may move, not be copied.
  affinity_table(const affinity_table&) = delete;
  affinity_table& operator=(const affinity_table&) = delete;
  affinity_table(affinity_table&&) = default;
  affinity_table& operator=(affinity_table&&) = default;
  ~affinity_table() = default;

  /// Where `key` goes in that stage, if it is known. The key counts as used.
  [[nodiscard]] std::optional<affinity_binding> find(std::string_view key, std::size_t stage);
  /// From now on it goes there. The key counts as used.
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

  /// Moves it to the front; null when it is unknown.
  [[nodiscard]] entry* use(std::string_view key);

  std::size_t max_keys_;
  std::list<entry> entries_;  ///< the one used last first
  std::unordered_map<std::string_view, std::list<entry>::iterator> index_;
};

}  // namespace troupe::actors
