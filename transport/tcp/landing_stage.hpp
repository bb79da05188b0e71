#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::tcp {

struct landing;

/// Chunks through which one lane lands data in GPU memory: the socket fills a chunk, and a GPU
/// empties it while the next one is filled. Used by one receiving thread at a time.
class landing_stage {
 public:
  explicit landing_stage(staging::staged_copies& copies) : copies_{copies} {}

  /// The place for the next bytes. Empty while every chunk is being emptied, so the peer waits.
  /// Fails if there is no chunk at all.
  [[nodiscard]] result<std::span<std::byte>> room();
  /// Records `bytes` put there and launches the chunk if it is full. Returns false if the memory
  /// was withdrawn.
  [[nodiscard]] bool filled(landing& where, std::size_t bytes);
  /// Starts copying the filled bytes to their place. Returns false if the memory was withdrawn.
  [[nodiscard]] bool launch(landing& where);
  /// Discards the filled bytes.
  void drop() noexcept;

 private:
  staging::staged_copies& copies_;
  const std::shared_ptr<staging::chunk_quota> quota_{std::make_shared<staging::chunk_quota>()};
  staging::staging_chunk chunk_;
  std::size_t used_{0};
};

}  // namespace troupe::transport::tcp
