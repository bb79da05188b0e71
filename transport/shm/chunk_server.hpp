#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/shm/chunk_memory.hpp"
#include "troupe/transport/shm/thread_order.hpp"
#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::shm {

/// The target's side of the peer's chunks: takes requests, checks them, has a GPU copy, and
/// answers. For one thread at a time.
///
/// | request | on                                          | becomes            |
/// | ------- | ------------------------------------------- | ------------------ |
/// | asked   | grant and all ranges are valid              | copying            |
/// | asked   | no such grant, wrong range or rights        | answered (refused) |
/// | copying | the GPU is done, or fails                   | answered           |
/// | copying | the same, but the grant was revoked         | answered (refused) |
/// | any     | numbers that no honest initiator writes     | the link ends      |
class chunk_server {
 public:
  chunk_server(staging::staged_copies& copies, grant_table& grants)
      : copies_{copies}, grants_{grants} {}

  struct news {
    bool worked{false};
    bool answered{false};  ///< the peer must be notified
  };
  /// Takes new requests and answers those whose copies have ended. `unauthorized`: the peer wrote
  /// nonsense.
  [[nodiscard]] result<news> serve(chunk_area& area);
  /// Whether there is a new request.
  [[nodiscard]] bool asked(const chunk_area& area) const noexcept;

 private:
  struct served {
    std::uint64_t number{0};  ///< of the last request taken
    std::shared_ptr<staging::staged_copy> copy;
    std::shared_ptr<given_grant> grant;  ///< of the copy
  };
  [[nodiscard]] result<void> take(chunk_area& area, std::size_t index);
  [[nodiscard]] result<void> start(chunk_area& area, std::size_t index, const chunk_request& what);
  void answer(chunk_area& area, std::size_t index, const std::optional<troupe::error>& failure);

  staging::staged_copies& copies_;
  grant_table& grants_;
  std::array<served, chunk_count> served_{};
  std::vector<chunk_run> asked_runs_;
  std::vector<staging::memory_run> runs_;
};

}  // namespace troupe::transport::shm
