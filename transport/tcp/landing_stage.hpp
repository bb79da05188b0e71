#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::tcp {

struct landing;

/// Where one lane puts data that are for memory of GPUs: the socket fills a chunk, a GPU empties it
/// while the next one is filled. Used by whoever receives, one thread at a time.
class landing_stage {
 public:
  explicit landing_stage(staging::staged_copies& copies) : copies_{copies} {}

  /// Where the next bytes go. None: every chunk is being emptied; the peer waits. An error: there is
  /// no chunk at all.
  [[nodiscard]] result<std::span<std::byte>> room();
  /// So many were put there. A chunk that is full is sent off at once. False: the memory was
  /// withdrawn.
  [[nodiscard]] bool filled(landing& where, std::size_t bytes);
  /// Sends off what there is; the same.
  [[nodiscard]] bool launch(landing& where);
  /// Forgets what there is.
  void drop() noexcept;

 private:
  staging::staged_copies& copies_;
  const std::shared_ptr<staging::chunk_quota> quota_{std::make_shared<staging::chunk_quota>()};
  staging::staging_chunk chunk_;
  std::size_t used_{0};
};

}  // namespace troupe::transport::tcp
