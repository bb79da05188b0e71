#pragma once

/// The part of a membership that must survive the supervisor: which life of each node is in use or
/// was replaced, and which epochs may have been used. Plain data, and its text.
///
/// The text is a line that names the format, its version and the checksum (XXH3, 64 bits) of the rest,
/// then JSON:
///
///     troupe-membership 1 0123456789abcdef
///     {"cluster": "demo", "epoch_limit": 10012, "nodes": [{"name": "decode-0", ...}, ...]}

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct membership_record {
  struct node {
    std::string name;
    node_state state{node_state::down};
    std::uint64_t incarnation{0};
    std::string host;
    std::uint16_t port{0};
    std::uint32_t pid{0};
    std::vector<std::uint64_t> former;  ///< incarnations that were replaced, newest last
    /// `member::registered`; 0: not recorded, as by earlier releases.
    std::uint64_t registered{0};
    // Only for a node that joined an open stage:
    std::uint32_t ranks{0};  ///< of its replica; 0: a file names the node
    kvcache::layout_fingerprint fingerprint{};
    std::vector<node_label> labels{};
    friend bool operator==(const node&, const node&) = default;
  };

  std::string cluster;
  std::uint64_t epoch_limit{0};  ///< no epoch above it was ever used
  std::vector<node> nodes;
  std::vector<std::uint64_t> over{};  ///< lives of joined nodes that are refused for good
  friend bool operator==(const membership_record&, const membership_record&) = default;
};

/// The version of the text; a file of a later version is not read.
inline constexpr std::uint32_t record_version = 1;
/// Epochs that may be used before the next record is written: many times the changes of a write.
inline constexpr std::uint64_t epoch_reserve = 10'000;
/// Former incarnations that a node's entry keeps.
inline constexpr std::size_t max_replaced = 16;
/// The longest text of a record, in bytes: some 100,000 nodes.
inline constexpr std::size_t max_record_text = std::size_t{64} << 20;

[[nodiscard]] std::string to_text(const membership_record& record);
/// Whether the text has the signature of a record, damaged or not.
[[nodiscard]] bool is_of_record(std::string_view text) noexcept;
/// Errors: `version_mismatch` (a later format), `invalid_config` (damaged, or something else).
[[nodiscard]] result<membership_record> parse_record(std::string_view text);

}  // namespace troupe::actors
