#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"

namespace {

using ::testing::HasSubstr;
using troupe::testing::run;

TEST(info, names_every_backend_and_gives_the_reason_of_each) {
  const auto ended = run({"info", "--json"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto info = nlohmann::json::parse(ended.out);
  std::map<std::string, bool> usable;
  for (const auto& backend : info.at("backends")) {
    usable[backend.at("name")] = backend.at("usable");
    EXPECT_NE(backend.at("reason"), "") << backend;
  }
  EXPECT_EQ(usable.count("shm"), 1u);
  EXPECT_EQ(usable.count("rdma"), 1u);
  EXPECT_EQ(usable.count("xgmi"), 1u);
  EXPECT_TRUE(usable["tcp"]);
}

TEST(info, says_for_people_what_it_says_as_json) {
  const auto text = run({"info"});
  const auto info = nlohmann::json::parse(run({"info", "--json"}).out);
  ASSERT_EQ(text.code, 0);
  for (const auto* key : {"version", "compiler", "CAF", "build type"})
    EXPECT_THAT(text.out, HasSubstr(info.at("troupe").at(key).get<std::string>()));
  for (const auto* key : {"kernel", "processor", "cores"})
    EXPECT_THAT(text.out, HasSubstr(info.at("machine").at(key).get<std::string>()));
}

}  // namespace
