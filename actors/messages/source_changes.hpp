#pragma once

/// Progress of a send that the engine reports while it computes, for the actors that serve it.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "troupe/kvcache/ids.hpp"

namespace troupe::actors {

/// runner -> sender: the source grew.
struct source_progress {
  std::uint32_t layer_begin{0}, layer_end{0}, token_end{0};
};
/// runner -> sender: the source has more blocks.
struct source_blocks {
  std::vector<block_id> blocks;
  std::uint32_t group{0};
};
/// runner -> sender: the source is complete.
struct source_sealed {
  std::uint32_t tokens{0};
  std::vector<std::byte> aux;
};

}  // namespace troupe::actors
