#include "tcp_work.hpp"

#include <algorithm>
#include <random>

namespace troupe::bench {

std::vector<std::uint64_t> scattered(std::size_t block) {
  std::vector<std::uint64_t> offsets(region_size / block);
  for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] = i * block;
  std::shuffle(offsets.begin(), offsets.end(), std::mt19937_64{7});
  return offsets;
}

}  // namespace troupe::bench
