// `troupe certs` as an operator uses it.
#include <chrono>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/actors/door/certificates.hpp"

#include "command.hpp"
#include "text_of.hpp"

namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using troupe::testing::run;
using troupe::testing::text_of;

class certs : public ::testing::Test {
 protected:
  std::string dir() const { return folder_.path() + "/certs"; }
  troupe::testing::scratch_folder folder_;
};

TEST_F(certs, what_init_prints_makes_a_deployment_file_that_may_leave_this_host) {
  const auto made = run({"certs", "init", dir(), "--cluster", "kv-1", "--days", "30"});
  ASSERT_EQ(made.code, 0) << made.err;
  const auto file = folder_.path() + "/deployment.yaml";
  std::ofstream{file} << "cluster: kv-1\nsupervisor: {host: 192.0.2.1, port: 7400}\n"
                         "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, "
                         "block_tokens: 16}\n"
                         "stages:\n  - {name: store, role: store, pool: {size: 1MiB}}\n"
                      << made.out;
  const auto checked = run({"check", file});
  EXPECT_EQ(checked.code, 0) << checked.err;
  EXPECT_THAT(checked.out, HasSubstr("certificate: \"" + dir() + "/node.crt\""));
}

TEST_F(certs, init_overwrites_nothing_and_renew_replaces_the_nodes_part) {
  ASSERT_EQ(run({"certs", "init", dir(), "--cluster", "kv-1"}).code, 0);
  const auto ca = text_of(dir() + "/ca.crt");
  const auto secret = text_of(dir() + "/cluster.secret");
  const auto node = text_of(dir() + "/node.crt");
  const auto again = run({"certs", "init", dir(), "--cluster", "kv-1"});
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err, HasSubstr("troupe certs renew"));
  EXPECT_EQ(text_of(dir() + "/ca.crt"), ca);
  EXPECT_EQ(text_of(dir() + "/node.crt"), node);
  const auto renewed = run({"certs", "renew", dir(), "--days", "10"});
  EXPECT_EQ(renewed.code, 0) << renewed.err;
  EXPECT_THAT(renewed.out, HasSubstr("valid until"));
  EXPECT_EQ(text_of(dir() + "/ca.crt"), ca);
  EXPECT_EQ(text_of(dir() + "/cluster.secret"), secret);
  EXPECT_NE(text_of(dir() + "/node.crt"), node);
  const auto shown = run({"certs", "show", dir()});
  EXPECT_EQ(shown.code, 0) << shown.err;
  EXPECT_THAT(shown.out, HasSubstr("kv-1"));
}

TEST_F(certs, init_says_how_a_service_of_another_user_comes_to_read_its_files) {
  const auto made = run({"certs", "init", dir(), "--cluster", "kv-1"});
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_THAT(made.out, HasSubstr("chown -R USER " + dir()));
}

TEST_F(certs, renew_says_when_an_authority_cuts_the_life_of_a_certificate) {
  ASSERT_EQ(run({"certs", "init", dir(), "--cluster", "kv-1"}).code, 0);
  const auto whole = run({"certs", "renew", dir(), "--days", "3650"});
  EXPECT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.out, Not(HasSubstr("authority")));

  const auto now = std::chrono::system_clock::now();
  const auto brief = troupe::actors::make_authority("kv-1", {now, now + std::chrono::hours{48}});
  ASSERT_TRUE(brief);
  std::ofstream{dir() + "/ca.crt"} << brief->certificate;
  std::ofstream{dir() + "/ca.key"} << brief->key;
  const auto cut = run({"certs", "renew", dir(), "--days", "30"});
  EXPECT_EQ(cut.code, 0) << cut.err;
  EXPECT_THAT(cut.out, HasSubstr("instead of 30 days, because their authority expires then"));
  EXPECT_THAT(cut.out, HasSubstr("security.ca"));
}

TEST_F(certs, wrong_arguments_are_refused) {
  EXPECT_EQ(run({"certs"}).code, 2);
  EXPECT_EQ(run({"certs", "init", dir()}).code, 2);
  EXPECT_EQ(run({"certs", "init", dir(), "--cluster", "Not A Name"}).code, 2);
  EXPECT_EQ(run({"certs", "init", dir(), "--cluster", "kv", "--days", "0"}).code, 2);
  EXPECT_EQ(run({"certs", "renew", dir()}).code, 1);
  EXPECT_EQ(run({"certs", "show", dir()}).code, 1);
  EXPECT_FALSE(std::filesystem::exists(dir()));
}

}  // namespace
