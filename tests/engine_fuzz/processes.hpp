#pragma once

#include <cstdint>
#include <memory>

#include "node.hpp"

namespace troupe::engine_fuzz {

/// A node in a process of its own. Create all of them before this process has threads.
[[nodiscard]] std::unique_ptr<fuzz_node> make_remote_node(const scenario& s, std::uint32_t node);

/// The supervisor of a scenario; it ends with the object.
class fuzz_supervisor {
 public:
  virtual ~fuzz_supervisor() = default;
  [[nodiscard]] virtual int port() const = 0;  ///< 0 if it did not start
};
[[nodiscard]] std::unique_ptr<fuzz_supervisor> start_supervisor(const scenario& s);

}  // namespace troupe::engine_fuzz
