#include "troupe/actors/operations/value_store.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;

class values_on_demand : public ::testing::Test {
 protected:
  std::unique_ptr<transport::endpoint> endpoint = [] {
    transport::endpoint_options options;
    options.self = incarnation{7};
    return transport::endpoint::create(options).value();
  }();
  const std::vector<std::byte> bytes = std::vector<std::byte>(100, std::byte{7});
};

TEST_F(values_on_demand, take_their_memory_when_the_first_one_comes) {
  const auto values = value_store::on_demand(*endpoint, 1u << 20);
  pool_report report;
  values->describe(report);
  EXPECT_EQ(report.store_bytes, 1u << 20);
  // None of these needs memory.
  EXPECT_EQ(values->get("k").error().code, errc::not_found);
  EXPECT_EQ(values->query("k").error().code, errc::not_found);
  EXPECT_EQ(values->put("", bytes, 0ms).error().code, errc::invalid_config);
  EXPECT_FALSE(endpoint->bytes(values->region()));

  ASSERT_TRUE(values->put("k", bytes, 0ms));
  const auto region = values->region();
  ASSERT_TRUE(endpoint->bytes(region));
  EXPECT_EQ(endpoint->bytes(region)->size(), 1u << 20);
  ASSERT_TRUE(values->scratch(10));
  EXPECT_EQ(values->region(), region) << "all lie in the same memory";
  const auto got = values->get("k");
  ASSERT_TRUE(got);
  EXPECT_TRUE(std::ranges::equal(got->bytes, bytes));
}

TEST_F(values_on_demand, that_got_no_memory_are_not_there_and_are_tried_again) {
  const auto values = value_store::on_demand(*endpoint, std::uint64_t{1} << 60);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(values->put("k", bytes, 0ms).error().code, errc::pool_exhausted);
    EXPECT_EQ(values->query("k").error().code, errc::not_found);
  }
  EXPECT_EQ(value_store::create(*endpoint, std::uint64_t{1} << 60).error().code,
            errc::pool_exhausted);
}

}  // namespace
}  // namespace troupe::actors
