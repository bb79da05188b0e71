// The files of mode tls: a door accepts what `troupe certs` makes.
#include <algorithm>
#include <csignal>

#include "door_tls_fixture.hpp"
#include "fails_with.hpp"
#include "text_of.hpp"

namespace troupe::actors {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using troupe::testing::fails_with;
using troupe::testing::text_of;

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
    ASSERT_THAT(again, fails_with(errc::already_exists, HasSubstr("troupe certs renew " + folder)));
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

TEST(certificates,
     a_door_waits_for_the_second_file_of_a_renewal_that_stands_still_between_the_two) {
  const scratch place;
  const auto files = init_certificates(place.path("certs"), "kv", 30);
  ASSERT_TRUE(files);
  std::filesystem::copy(place.path("certs"), place.path("next"));
  const auto next = renew_certificates(place.path("next"), 30);
  ASSERT_TRUE(next) << to_string(next.error());
  std::filesystem::rename(next->key, files->key);
  std::filesystem::rename(next->certificate, file_beside(files->certificate));
  std::thread goes_on{[&] {
    std::this_thread::sleep_for(300ms);
    std::filesystem::rename(file_beside(files->certificate), files->certificate);
  }};
  const auto made = door::create(with(*files, "kv"));
  EXPECT_TRUE(made) << to_string(made.error());
  goes_on.join();
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
    ASSERT_THAT(refused, fails_with(errc::invalid_config, HasSubstr("chmod 700")));
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
  EXPECT_EQ(text_of(elsewhere), "untouched");
  EXPECT_FALSE(std::filesystem::is_symlink(folder + "/node.key"));
}

/// While it exists, no file of this process may grow beyond `bytes`, as on a full disk.
class small_disk {
 public:
  explicit small_disk(std::size_t bytes) : heeded_{std::signal(SIGXFSZ, SIG_IGN)} {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    auto now = before_;
    now.rlim_cur = bytes;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &now), 0);
  }
  small_disk(const small_disk&) = delete;
  small_disk& operator=(const small_disk&) = delete;
  ~small_disk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    (void)std::signal(SIGXFSZ, heeded_);
  }

 private:
  void (*heeded_)(int);
  rlimit before_{};
};

/// A file size limit that an authority's files keep and the certificate of a node exceeds.
std::size_t between_authority_and_node() {
  const auto authority = authority_of("kv");
  const auto node = node_of(authority, "kv");
  EXPECT_LT(authority.certificate.size() + 20, node.certificate.size());
  return (authority.certificate.size() + node.certificate.size()) / 2;
}

TEST(certificates, an_attempt_that_fails_half_way_leaves_nothing_of_its_own) {
  const scratch place;
  const auto limit = between_authority_and_node();
  const auto fresh = place.path("fresh");
  const auto old = place.path("old");
  ASSERT_EQ(::mkdir(old.c_str(), 0700), 0);
  place.write("old/notes", "of somebody");
  for (const auto& folder : {fresh, old}) {
    result<certificate_files> failed = fail(errc::internal, "");
    {
      const small_disk full{limit};
      failed = init_certificates(folder, "kv", 30);
    }
    ASSERT_FALSE(failed);
    EXPECT_NE(failed.error().message.find(folder + "/node.crt cannot be written: "),
              std::string::npos)
        << failed.error().message;
  }
  EXPECT_FALSE(std::filesystem::exists(fresh)) << "it made that folder";
  EXPECT_EQ(text_of(old + "/notes"), "of somebody");
  const std::filesystem::directory_iterator left{old};
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);
  for (const auto& folder : {fresh, old}) {
    const auto again = init_certificates(folder, "kv", 30);
    EXPECT_TRUE(again) << to_string(again.error());
  }
}

TEST(certificates, what_was_there_before_an_attempt_stays) {
  const scratch place;
  const auto folder = place.path("certs");
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  place.write("certs/node.crt", "of somebody");
  EXPECT_FALSE(init_certificates(folder, "kv", 30));
  EXPECT_EQ(text_of(folder + "/node.crt"), "of somebody");
  const std::filesystem::directory_iterator left{folder};
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);
}

TEST(certificates, an_authority_that_has_expired_renews_nothing_and_says_what_does) {
  const scratch place;
  const auto folder = place.path("certs");
  const auto files = init_certificates(folder, "kv", 30);
  ASSERT_TRUE(files);
  const auto ended = make_authority("kv", lasting(-10min));
  ASSERT_TRUE(ended);
  place.write("certs/ca.crt", ended->certificate);
  place.write("certs/ca.key", ended->key);
  const auto before = text_of(files->certificate);
  const auto key_before = text_of(files->key);
  const auto refused = renew_certificates(folder, 30);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config);
  const auto& why = refused.error().message;
  EXPECT_NE(why.find(files->ca + ": the authority has expired"), std::string::npos) << why;
  EXPECT_NE(why.find("`troupe certs init OTHER --cluster kv`"), std::string::npos) << why;
  EXPECT_NE(why.find("append its certificate to security.ca on every host"), std::string::npos)
      << why;
  EXPECT_EQ(text_of(files->certificate), before);
  EXPECT_EQ(text_of(files->key), key_before);
  const std::filesystem::directory_iterator left{folder};
  EXPECT_EQ(std::distance(begin(left), end(left)), 5);
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
