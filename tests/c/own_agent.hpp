#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/io.h"

#include "refused.hpp"

/// Helpers shared by the tests of agents in C.
namespace troupe::testing {

inline constexpr std::uint64_t long_enough = 60'000;
inline constexpr std::uint32_t all_rights = TROUPE_IO_MAY_READ | TROUPE_IO_MAY_WRITE;

[[nodiscard]] inline troupe_io_options agent_options(const char* name) {
  troupe_io_options options{};
  options.size = sizeof options;
  options.name = name;
  options.peer_silence_ms = long_enough;
  options.connect_timeout_ms = long_enough;
  return options;
}

/// An agent with one registered memory.
class own_agent {
 public:
  explicit own_agent(const char* name, std::uint32_t flags = 0) : memory(std::size_t{1} << 20) {
    auto options = agent_options(name);
    options.flags = flags;
    EXPECT_EQ(troupe_io_agent_create(&options, &agent_), TROUPE_OK) << troupe_last_error();
    EXPECT_EQ(troupe_io_register(agent_, memory.data(), memory.size(), "kv", all_rights, &kv),
              TROUPE_OK)
        << troupe_last_error();
  }
  ~own_agent() { troupe_io_agent_free(agent_); }
  own_agent(const own_agent&) = delete;
  own_agent& operator=(const own_agent&) = delete;

  [[nodiscard]] troupe_io_agent* get() const { return agent_; }
  /// Makes this agent's description known to `other`.
  [[nodiscard]] troupe_io_peer known_to(const own_agent& other) const {
    void* bytes = nullptr;
    std::size_t size = 0;
    troupe_io_peer peer = 0;
    EXPECT_EQ(troupe_io_describe(agent_, nullptr, 0, &bytes, &size), TROUPE_OK);
    EXPECT_EQ(troupe_io_add_peer(other.get(), bytes, size, &peer), TROUPE_OK);
    troupe_free(bytes);
    return peer;
  }
  [[nodiscard]] std::uint64_t address() const {
    return reinterpret_cast<std::uintptr_t>(memory.data());
  }
  [[nodiscard]] troupe_io_status ended(troupe_io_transfer transfer) const {
    EXPECT_EQ(troupe_io_wait(agent_, &transfer, 1, TROUPE_IO_ALL, long_enough, nullptr), TROUPE_OK)
        << troupe_last_error();
    troupe_io_status status{};
    status.size = sizeof status;
    EXPECT_EQ(troupe_io_read_status(agent_, transfer, &status, nullptr, 0), TROUPE_OK);
    return status;
  }

  std::vector<unsigned char> memory;
  troupe_io_memory kv{0};

 private:
  troupe_io_agent* agent_{nullptr};
};

}  // namespace troupe::testing
