#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace troupe::engine_fuzz {

/// Takes a description of what is wrong.
using finder = std::function<void(const std::string&)>;

struct tally {
  std::uint64_t transfers{0};    ///< sends, receives, holds and releases that had an outcome
  std::uint64_t arrived{0};      ///< receives that were done, every byte compared
  std::uint64_t failed{0};       ///< failures that are allowed
  std::uint64_t wrong_calls{0};  ///< refused with the right code
  std::uint64_t values{0};       ///< puts that were followed to their end
  std::uint64_t bytes{0};        ///< compared

  tally& operator+=(const tally& other) {
    transfers += other.transfers;
    arrived += other.arrived;
    failed += other.failed;
    wrong_calls += other.wrong_calls;
    values += other.values;
    bytes += other.bytes;
    return *this;
  }
};

}  // namespace troupe::engine_fuzz
