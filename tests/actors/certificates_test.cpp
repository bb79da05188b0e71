// The files of mode tls: what `troupe certs` makes is what a door takes.
#include "door_tls_fixture.hpp"

namespace troupe::actors {
namespace {

using namespace testing;

std::string text_of(const std::string& path) {
  std::ifstream in{path};
  return {std::istreambuf_iterator<char>{in}, {}};
}

mode_t mode_of(const std::string& path) {
  struct stat about {};
  EXPECT_EQ(::stat(path.c_str(), &about), 0) << path;
  return about.st_mode & 07777;
}

door_options with(const certificate_files& files, const std::string& cluster) {
  door_options made;
  made.security = {door_security::mode::tls, cluster,   files.secret,
                   files.certificate,        files.key, files.ca};
  return made;
}

TEST(certificates, a_new_folder_is_all_that_a_cluster_needs) {
  const scratch place;
  const auto folder = place.path("deep/inside/certs");
  const auto files = init_certificates(folder, "kv-1", 30);
  ASSERT_TRUE(files) << to_string(files.error());
  EXPECT_EQ(mode_of(folder), 0700u);
  for (const auto& path : {files->ca, files->ca_key, files->certificate, files->key, files->secret})
    EXPECT_EQ(mode_of(path), 0600u) << path;
  EXPECT_EQ(text_of(files->secret).size(), 65u);
  const auto facts = facts_of(text_of(files->certificate));
  ASSERT_TRUE(facts);
  EXPECT_EQ(facts->cluster, "kv-1");
  const auto days = std::chrono::duration_cast<std::chrono::hours>(
      facts->life.until - std::chrono::system_clock::now());
  EXPECT_GE(days, 24h * 30 - 1h);
  EXPECT_LE(days, 24h * 30);
  EXPECT_LT(facts->life.from, std::chrono::system_clock::now());

  listening_door at{with(*files, "kv-1")};
  listening_door from{with(*files, "kv-1")};
  EXPECT_TRUE(connect_from(*from.it, at.port));
}

TEST(certificates, nothing_is_overwritten) {
  const scratch place;
  const auto folder = place.path("certs");
  const auto files = init_certificates(folder, "kv", 30);
  ASSERT_TRUE(files);
  const auto before = text_of(files->ca_key);
  for (const auto& kept : {files->ca, files->ca_key, files->secret}) {
    const auto again = init_certificates(folder, "kv", 30);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().code, errc::already_exists);
    EXPECT_NE(again.error().message.find("troupe certs renew " + folder), std::string::npos);
    EXPECT_EQ(text_of(files->ca_key), before);
    (void)kept;
  }
}

TEST(certificates, a_renewed_one_is_taken_over_by_doors_that_are_open) {
  const scratch place;
  const auto folder = place.path("certs");
  const auto files = init_certificates(folder, "kv", 30);
  ASSERT_TRUE(files);
  listening_door at{with(*files, "kv")};
  listening_door from{with(*files, "kv")};
  const auto before = connect_from(*from.it, at.port);
  ASSERT_TRUE(before);
  const auto there = at.admitted();
  const auto old = text_of(files->certificate);
  const auto old_key = text_of(files->key);
  ASSERT_TRUE(renew_certificates(folder, 60));
  EXPECT_NE(text_of(files->certificate), old);
  EXPECT_NE(text_of(files->key), old_key);
  EXPECT_EQ(mode_of(files->key), 0600u);
  EXPECT_FALSE(std::filesystem::exists(files->key + ".new"));
  EXPECT_FALSE(std::filesystem::exists(files->certificate + ".new"));
  std::this_thread::sleep_for(1100ms);
  EXPECT_TRUE(connect_from(*from.it, at.port));
  EXPECT_EQ(at.renewed, 1);
  EXPECT_TRUE(talk(before->get(), there.get()));
}

TEST(certificates, doors_open_and_connect_while_it_is_renewed_again_and_again) {
  const scratch place;
  const auto folder = place.path("certs");
  const auto files = init_certificates(folder, "kv", 30);
  ASSERT_TRUE(files);
  std::atomic<bool> over{false};
  std::thread renewing{[&] {
    while (!over) EXPECT_TRUE(renew_certificates(folder, 30));
  }};
  for (int i = 0; i < 30; ++i) {
    auto made = door::create(with(*files, "kv"));
    EXPECT_TRUE(made) << to_string(made.error());
  }
  over = true;
  renewing.join();
}

TEST(certificates, what_cannot_be_renewed_says_why) {
  const scratch place;
  const auto folder = place.path("certs");
  const auto files = init_certificates(folder, "kv", 30);
  ASSERT_TRUE(files);
  EXPECT_EQ(renew_certificates(folder, 0).error().code, errc::invalid_config);
  EXPECT_EQ(renew_certificates(folder, 3651).error().code, errc::invalid_config);
  ::rename(files->ca_key.c_str(), place.path("elsewhere").c_str());
  const auto keyless = renew_certificates(folder, 30);
  ASSERT_FALSE(keyless);
  EXPECT_EQ(keyless.error().code, errc::not_found);
  place.write("certs/ca.key", authority_of("kv").key);
  const auto other = renew_certificates(folder, 30);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message.find("does not belong"), std::string::npos);
  EXPECT_FALSE(init_certificates(place.path("x"), "a,URI:troupe:b", 30));
  EXPECT_FALSE(init_certificates("/proc/certs", "kv", 30));
}

TEST(certificates, are_made_only_where_nobody_else_can_put_files) {
  const scratch place;
  for (const mode_t mode : {0770, 0707}) {
    const auto folder = place.path("open-" + std::to_string(mode));
    ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
    ASSERT_EQ(::chmod(folder.c_str(), mode), 0);
    const auto refused = init_certificates(folder, "kv", 30);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, errc::invalid_config);
    EXPECT_NE(refused.error().message.find("chmod 700"), std::string::npos);
    EXPECT_TRUE(std::filesystem::is_empty(folder));
    ASSERT_EQ(::chmod(folder.c_str(), 0700), 0);
    EXPECT_TRUE(init_certificates(folder, "kv", 30));
  }
}

TEST(certificates, what_lies_where_a_renewed_one_is_written_is_not_written_through) {
  const scratch place;
  const auto folder = place.path("certs");
  ASSERT_TRUE(init_certificates(folder, "kv", 30));
  const auto elsewhere = place.write("elsewhere", "untouched");
  ASSERT_EQ(::symlink(elsewhere.c_str(), (folder + "/node.key.new").c_str()), 0);
  ASSERT_TRUE(renew_certificates(folder, 30));
  std::ifstream in{elsewhere};
  EXPECT_EQ((std::string{std::istreambuf_iterator<char>{in}, {}}), "untouched");
  EXPECT_FALSE(std::filesystem::is_symlink(folder + "/node.key"));
}

TEST(certificates, none_lasts_longer_than_its_authority) {
  const auto brief = make_authority("kv", lasting(1h));
  ASSERT_TRUE(brief);
  const auto node = make_node_certificate(*brief, "kv", lasting(24h));
  ASSERT_TRUE(node);
  const auto facts = facts_of(node->certificate);
  ASSERT_TRUE(facts);
  EXPECT_LE(facts->life.until, std::chrono::system_clock::now() + 1h);
}

}  // namespace
}  // namespace troupe::actors
