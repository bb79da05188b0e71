#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "child_process.hpp"
#include "hexadecimal.hpp"

namespace troupe::io {

/// An agent in a process of its own (`peer_process.cpp`), which never outlives this object.
class peer_child : public testing::child_process {
 public:
  peer_child(const std::string& name, std::string_view backend, std::uint16_t port,
             const std::string& what)
      : child_process{{std::getenv("TROUPE_IO_PEER"), name, std::string{backend},
                       std::to_string(port), what}} {}

  [[nodiscard]] std::vector<std::byte> descriptor() { return testing::from_hexadecimal(line()); }
  void tell(std::span<const std::byte> descriptor) const {
    say(testing::hexadecimal(descriptor) + "\n");
  }
};

}  // namespace troupe::io
