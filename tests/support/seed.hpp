#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>

namespace troupe::testing {

inline std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// The seed of a test: `TROUPE_SEED`, else `TROUPE_COMMIT_SEED`, which `tests/run` derives from the
/// commit, else 1. A verdict then belongs to a commit, not to a day or a machine.
inline std::uint64_t seed() {
  static const auto drawn =
      number_from_environment("TROUPE_SEED", number_from_environment("TROUPE_COMMIT_SEED", 1));
  return drawn;
}

/// Like `seed()`, and prints it, for tests whose timing is random as well.
inline std::uint64_t printed_seed() {
  std::cout << "TROUPE_SEED=" << seed() << std::endl;
  return seed();
}

}  // namespace troupe::testing
