#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "troupe/kvcache/ids.hpp"

namespace troupe::kvcache {

inline std::vector<block_id> ids(std::initializer_list<std::uint32_t> numbers) {
  std::vector<block_id> blocks;
  for (const auto n : numbers) blocks.push_back(block_id{n});
  return blocks;
}

}  // namespace troupe::kvcache
