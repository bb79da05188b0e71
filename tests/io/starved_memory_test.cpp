// Memory of an agent in a process whose allocations fail: it is registered completely, or nothing
// changes.

#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/io/agent.hpp"

#include "starving.hpp"

namespace troupe::io {
namespace {

using transport::access;
using troupe::testing::starve;

/// The number of mapped memory files.
std::size_t files_mapped() {
  std::ifstream maps{"/proc/self/maps"};
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:") != std::string::npos ? 1U : 0U;
  }
  return count;
}

class starved_agent : public ::testing::Test {
 protected:
  const std::unique_ptr<agent> self = [] {
    agent_options options;
    options.name = "starved";
    return agent::create(std::move(options)).value();
  }();

  /// The result of `call` once none of its allocations fails.
  template <class Call>
  result<memory_id> unless_starved(Call&& call) {
    std::optional<result<memory_id>> got;
    starve(
        [&] {
          got.emplace(call());
          if (!*got && got->error().code == errc::pool_exhausted) throw std::bad_alloc{};
        },
        [] {});
    return *got;
  }
};

TEST_F(starved_agent, registers_memory_that_it_could_not_register_before) {
  std::vector<std::byte> memory(4096);
  const auto added = unless_starved([&] {
    return self->register_memory(memory, "memory whose name is no short string", access::read);
  });
  ASSERT_TRUE(added) << to_string(added.error());
  EXPECT_TRUE(self->deregister(*added, std::chrono::seconds{1}));
  EXPECT_TRUE(self->register_memory(memory, "once more", access::read));
}

TEST_F(starved_agent, allocates_memory_that_it_gives_back) {
  const auto before = files_mapped();
  const auto added = unless_starved(
      [&] { return self->allocate(4096, "memory whose name is no short string", access::read); });
  ASSERT_TRUE(added) << to_string(added.error());
  EXPECT_TRUE(self->deregister(*added, std::chrono::seconds{1}));
  EXPECT_EQ(files_mapped(), before) << "what was allocated for a try that failed";
}

}  // namespace
}  // namespace troupe::io
