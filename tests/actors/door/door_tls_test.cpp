// Mode tls: which certificates are admitted, and what the others are told.
#include <openssl/ssl.h>

#include "troupe/actors/door/door_handshake.hpp"
#include "troupe/transport/random.hpp"

#include "door_tls_fixture.hpp"
#include "fails_with.hpp"
#include "wall_clock.hpp"

namespace troupe::actors {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

TEST(door_tls, connects_nodes_of_one_cluster_and_hands_out_their_plain_ends) {
  encrypted_pair both;
  ASSERT_TRUE(both.here);
  ASSERT_TRUE(both.there);
  EXPECT_TRUE(talk(both.here.get(), both.there.get()));
  for (const int fd : {both.here.get(), both.there.get()}) {
    sockaddr_storage name{};
    socklen_t size = sizeof name;
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size);
    EXPECT_EQ(name.ss_family, AF_UNIX);
    EXPECT_NE(::fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_EQ(both.at.it->count().pumped, 1u);
  EXPECT_EQ(both.from.it->count().pumped, 1u);
  both.here.reset();
  EXPECT_TRUE(hangs_up(both.there.get()));
  both.there.reset();
  EXPECT_TRUE(comes_true([&] { return both.at.it->count().pumped == 0; }));
  EXPECT_TRUE(comes_true([&] { return both.from.it->count().pumped == 0; }));
}

/// Each dials the other. Both are refused, and both report why.
void refuse_each_other(const node_files& a, const node_files& b, const std::string& why) {
  listening_door at_a{a.options()};
  listening_door at_b{b.options()};
  for (const auto& [from, to] : {std::pair{&at_a, &at_b}, std::pair{&at_b, &at_a}}) {
    const auto tried = connect_from(*from->it, to->port);
    ASSERT_THAT(tried, fails_with(errc::unauthorized, HasSubstr("certificate")));
    EXPECT_TRUE(comes_true([&, to = to] { return to->it->count().refused == 1; }));
    EXPECT_EQ(to->it->count().admitted, 0u);
    EXPECT_FALSE(to->admits_another());
    const auto said = to->notices();
    ASSERT_FALSE(said.empty());
    // The end that judged first knows the reason.
    EXPECT_TRUE(tried.error().message.find(why) != std::string::npos ||
                said.back().find(why) != std::string::npos)
        << tried.error().message << "\n"
        << said.back();
  }
}

TEST(door_tls, refuses_a_certificate_of_another_authority) {
  const auto one = authority_of("test");
  const auto other = authority_of("test");
  refuse_each_other({one, node_of(one, "test")}, {other, node_of(other, "test")},
                    "another authority signed it");
}

TEST(door_tls, refuses_a_certificate_for_another_cluster_of_the_same_authority) {
  const auto authority = authority_of("test");
  refuse_each_other({authority, node_of(authority, "test")},
                    {authority, node_of(authority, "test2"), "test2"}, "another cluster");
}

constexpr const char* clock_was_set = "the wall clock was set while the test waited for a date";

TEST(door_tls, refuses_a_certificate_whose_time_is_over) {
  const troupe::testing::wall_clock_watch clock;
  const auto authority = authority_of("test");
  const node_files good{authority, node_of(authority, "test")};
  listening_door at_good{good.options()};
  const node_files brief{authority, node_of(authority, "test", 3s)};
  listening_door at_brief{brief.options()};
  const auto in_time = connect_from(*at_brief.it, at_good.port);
  if (clock.was_set()) GTEST_SKIP() << clock_was_set;
  ASSERT_TRUE(in_time);
  ASSERT_TRUE(at_good.admitted());
  std::this_thread::sleep_for(4s);
  const auto outwards = connect_from(*at_good.it, at_brief.port);
  if (clock.was_set()) GTEST_SKIP() << clock_was_set;
  ASSERT_THAT(outwards, fails_with(errc::unauthorized,
                                   HasSubstr("it has expired; `troupe certs renew DIR`")));
  const auto inwards = connect_from(*at_brief.it, at_good.port);
  if (clock.was_set()) GTEST_SKIP() << clock_was_set;
  ASSERT_THAT(inwards,
              fails_with(errc::unauthorized, HasSubstr("does not accept our certificate")));
  EXPECT_TRUE(at_good.noticed("it has expired"));
}

TEST(door_tls, tells_an_authority_whose_time_is_over_from_a_certificate_whose_is) {
  const troupe::testing::wall_clock_watch clock;
  const auto lasts = authority_of("test");
  const auto brief = make_authority("test", lasting(3s));
  ASSERT_TRUE(brief);
  const auto both_authorities = brief->certificate + lasts.certificate;
  const node_files of_brief{*brief, node_of(*brief, "test")};
  const node_files of_lasting{lasts, node_of(lasts, "test")};
  of_brief.files().write("ca", both_authorities, 0644);
  of_lasting.files().write("ca", both_authorities, 0644);
  listening_door at_brief{of_brief.options()};
  listening_door at_lasting{of_lasting.options()};
  const auto in_time = connect_from(*at_brief.it, at_lasting.port);
  if (clock.was_set()) GTEST_SKIP() << clock_was_set;
  ASSERT_TRUE(in_time);
  std::this_thread::sleep_for(4s);
  const auto outwards = connect_from(*at_lasting.it, at_brief.port);
  if (clock.was_set()) GTEST_SKIP() << clock_was_set;
  ASSERT_FALSE(outwards);
  EXPECT_EQ(outwards.error().code, errc::unauthorized);
  const auto& why = outwards.error().message;
  EXPECT_NE(why.find("its authority has expired"), std::string::npos) << why;
  EXPECT_NE(why.find("append its certificate to security.ca on every host"), std::string::npos)
      << why;
  EXPECT_EQ(why.find("certs renew"), std::string::npos) << why;

  const auto again = door::create(of_brief.options());
  if (clock.was_set()) GTEST_SKIP() << clock_was_set;
  ASSERT_FALSE(again);
  const auto& refused = again.error().message;
  EXPECT_NE(refused.find("security.ca: " + of_brief.files().path("ca") +
                         ": an authority in it has expired"),
            std::string::npos)
      << refused;
  EXPECT_NE(refused.find("append its certificate to security.ca on every host"), std::string::npos)
      << refused;
}

TEST(door_tls, does_not_open_with_credentials_that_no_peer_would_take) {
  const auto authority = authority_of("test");
  const auto other = authority_of("test");
  const auto good = node_of(authority, "test");
  const node_files files{authority, good};
  const auto refusal = [&] {
    const auto made = door::create(files.options());
    EXPECT_FALSE(made);
    if (made) return std::string{};
    EXPECT_EQ(made.error().code, errc::invalid_config);
    return made.error().message;
  };
  const auto with = [&](const std::string& name, const std::string& text, mode_t mode) {
    files.write(authority.certificate, good);
    files.files().write("secret", std::string(64, 's'));
    files.files().write(name, text, mode);
    auto why = refusal();
    EXPECT_NE(why.find(files.files().path(name)), std::string::npos) << why;
    return why;
  };
  const auto says = [](const std::string& why, const std::string& part) {
    EXPECT_NE(why.find(part), std::string::npos) << why;
  };
  says(with("key", good.key, 0644), "chmod 600");
  says(with("key", node_of(authority, "test").key, 0600), "does not belong to the certificate");
  says(with("key", "rubbish", 0600), "no key that can be read");
  says(with("certificate", "rubbish", 0644), "no certificate that can be read");
  says(with("certificate", good.certificate.substr(0, 300), 0644), "no certificate");
  says(with("ca", other.certificate, 0644), files.files().path("certificate"));
  says(with("ca", "", 0644), "no certificate that can be read");
  says(with("ca", good.certificate, 0644), "not that of an authority");
  says(with("secret", "short", 0600), "at least 32");

  const auto old = node_of(authority, "test", -10min);
  files.files().write("secret", std::string(64, 's'));
  files.write(authority.certificate, old);
  says(refusal(), "it has expired");
  files.write(authority.certificate, node_of(authority, "another"));
  says(refusal(), "not for cluster `test`");
  files.write(authority.certificate, node_of(other, "test"));
  says(refusal(), "not accepted by the authorities of");
  // A cluster name of which ours is only a prefix.
  files.write(authority.certificate, node_of(authority, "test2"));
  says(refusal(), "not for cluster `test`");
}

/// Proves the cluster's secret, so that TLS comes next. Empty if the door hung up.
owned_fd shows_the_secret(std::uint16_t port) {
  auto fd = dial_raw(port);
  door_nonce nonce{};
  transport::random_bytes(nonce);
  door_handshake hello{door_handshake::role::client,
                       door_security::mode::tls,
                       {door_key_of(std::string(64, 's'))},
                       nonce,
                       port};
  while (hello.where() == door_handshake::state::under_way) {
    const auto out = hello.to_send();
    send_all(fd.get(), {reinterpret_cast<const char*>(out.data()), out.size()});
    hello.sent(out.size());
    const auto in = read_exactly(fd.get(), hello.wants());
    if (in.empty()) return {};
    hello.take(std::as_bytes(std::span{in}));
  }
  EXPECT_EQ(hello.where(), door_handshake::state::proven);
  return fd;
}

/// A client that has the cluster's secret and speaks any TLS version. Returns how the door treats
/// it.
std::string speaks_tls(std::uint16_t port, int version) {
  const auto fd = shows_the_secret(port);
  if (!fd) return "hung up";
  const std::unique_ptr<SSL_CTX, decltype(&::SSL_CTX_free)> context{::SSL_CTX_new(::TLS_method()),
                                                                    &::SSL_CTX_free};
  ::SSL_CTX_set_max_proto_version(context.get(), version);
  const std::unique_ptr<SSL, decltype(&::SSL_free)> ssl{::SSL_new(context.get()), &::SSL_free};
  ::SSL_set_fd(ssl.get(), fd.get());
  char word = 0;
  if (::SSL_connect(ssl.get()) != 1) return "refused in the handshake";
  return ::SSL_read(ssl.get(), &word, 1) == 1 ? "admitted" : "refused after it";
}

TEST(door_tls, refuses_who_has_the_secret_and_no_certificate_or_an_old_version) {
  encrypted_pair both;
  EXPECT_EQ(speaks_tls(both.at.port, TLS1_3_VERSION), "refused after it");
  EXPECT_TRUE(both.at.noticed("shows no certificate"));
  EXPECT_EQ(speaks_tls(both.at.port, TLS1_2_VERSION), "refused in the handshake");
  EXPECT_TRUE(comes_true([&] { return both.at.it->count().refused == 2; }));
  EXPECT_EQ(both.at.it->count().admitted, 1u);
}

TEST(door_tls, a_certificate_is_replaced_while_connections_are_there) {
  encrypted_pair both;
  const auto& files = both.files;
  const auto renewed = node_of(both.authority, "test");
  // First only half of the new pair, as a reader in the middle of a renewal sees it: not reported.
  files.files().write("key", renewed.key);
  std::this_thread::sleep_for(1100ms);
  EXPECT_TRUE(connect_from(*both.from.it, both.at.port));
  auto are_read_again = [&both, before = std::pair{0, 0}]() mutable {
    const bool read = comes_true(
        [&] { return both.at.renewed > before.first && both.from.renewed > before.second; });
    before = {both.at.renewed.load(), both.from.renewed.load()};
    return read;
  };
  files.files().write("certificate", renewed.certificate);
  EXPECT_TRUE(are_read_again());
  EXPECT_TRUE(connect_from(*both.from.it, both.at.port));
  EXPECT_EQ(both.at.renewed, 1);
  EXPECT_EQ(both.from.renewed, 1);
  EXPECT_TRUE(both.at.alarms().empty());

  // Another authority, in the rotation order that keeps all connected.
  const auto next = authority_of("test");
  const auto both_authorities = both.authority.certificate + next.certificate;
  files.write(both_authorities, renewed);
  EXPECT_TRUE(are_read_again());
  EXPECT_TRUE(connect_from(*both.from.it, both.at.port));
  const auto of_next = node_of(next, "test");
  files.write(both_authorities, of_next);
  EXPECT_TRUE(are_read_again());
  EXPECT_TRUE(connect_from(*both.from.it, both.at.port));
  files.write(next.certificate, of_next);
  EXPECT_TRUE(are_read_again());
  EXPECT_TRUE(connect_from(*both.from.it, both.at.port));
  EXPECT_GE(both.at.renewed, 4);
  EXPECT_TRUE(both.at.alarms().empty());

  // Deleted files leave the old credentials in force and are reported once.
  ::unlink(files.files().path("certificate").c_str());
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(1100ms);
    EXPECT_TRUE(connect_from(*both.from.it, both.at.port));
  }
  EXPECT_TRUE(comes_true([&] { return !both.at.alarms().empty() && !both.from.alarms().empty(); }));
  EXPECT_EQ(both.at.alarms().size(), 1u);
  EXPECT_EQ(both.from.alarms().size(), 1u);
  EXPECT_TRUE(talk(both.here.get(), both.there.get())) << "the first connection is untouched";
}

TEST(door_tls, an_end_that_is_near_is_told_of_although_nobody_connects) {
  const auto authority = make_authority("test", lasting(24h * 365));
  ASSERT_TRUE(authority);
  const node_files files{*authority, node_of(*authority, "test", 24h)};
  std::mutex mutex;
  std::vector<std::string> told;
  std::atomic<int> renewed{0};
  auto options = files.options();
  options.notice = [&](const std::string& sentence) {
    const std::lock_guard lock{mutex};
    told.push_back(sentence);
  };
  options.credentials.renewed = [&](const std::string&) { ++renewed; };
  const auto made = door::create(options);
  ASSERT_TRUE(made);
  EXPECT_TRUE(comes_true([&] {
    const std::lock_guard lock{mutex};
    return !told.empty();
  }));
  std::this_thread::sleep_for(1500ms);
  {
    const std::lock_guard lock{mutex};
    ASSERT_EQ(told.size(), 1u) << "once a day";
    EXPECT_NE(told.front().find("expires in 2"), std::string::npos) << told.front();
    EXPECT_NE(told.front().find("troupe certs renew"), std::string::npos);
  }
  const auto later = make_authority("test", lasting(24h * 365));
  ASSERT_TRUE(later);
  files.write(later->certificate, node_of(*later, "test", 24h * 30));
  EXPECT_TRUE(comes_true([&] { return renewed > 0; }));
  std::this_thread::sleep_for(1500ms);
  const std::lock_guard lock{mutex};
  EXPECT_EQ(told.size(), 1u);
}

/// The first notice of a door.
std::string first_notice(const node_files& files) {
  listening_door at{files.options()};
  EXPECT_TRUE(comes_true([&] { return !at.notices().empty(); }));
  const auto told = at.notices();
  return told.empty() ? std::string{} : told.front();
}

TEST(door_tls, the_end_of_an_authority_is_told_of_as_such) {
  const auto brief = make_authority("test", lasting(47h + 30min));
  ASSERT_TRUE(brief);
  // The certificate is cut to its authority's life, so both end together, as `certs renew` makes
  // them.
  const node_files cut{*brief, node_of(*brief, "test", 24h * 365)};
  auto told = first_notice(cut);
  EXPECT_NE(told.find("an authority of " + cut.files().path("ca") + " expires in 47 hours"),
            std::string::npos)
      << told;
  EXPECT_NE(told.find("append a new one to security.ca on every host"), std::string::npos) << told;
  EXPECT_EQ(told.find("certs renew"), std::string::npos) << told;

  // The certificate itself expires first.
  const node_files briefer{*brief, node_of(*brief, "test", 23h + 30min)};
  told = first_notice(briefer);
  EXPECT_NE(told.find("the certificate " + briefer.files().path("certificate") +
                      " expires in 23 hours; `troupe certs renew"),
            std::string::npos)
      << told;

  // An authority that did not sign our certificate may expire: that is how authorities are
  // replaced.
  const auto lasts = make_authority("test", lasting(24h * 365));
  ASSERT_TRUE(lasts);
  const node_files changed{*lasts, node_of(*lasts, "test", 24h * 30)};
  changed.files().write("ca", brief->certificate + lasts->certificate, 0644);
  listening_door at{changed.options()};
  std::this_thread::sleep_for(1500ms);
  EXPECT_TRUE(at.notices().empty());
}

TEST(door_tls, credentials_that_others_could_have_written_are_refused) {
  const auto authority = authority_of("test");
  const node_files files{authority, node_of(authority, "test")};
  for (const auto* name : {"ca", "certificate"}) {
    const auto path = files.files().path(name);
    ASSERT_EQ(::chmod(path.c_str(), 0664), 0);
    const auto refused = door::create(files.options());
    ASSERT_THAT(refused, fails_with(errc::invalid_config,
                                    HasSubstr(path + ": others than its owner can change it")))
        << name;
    ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
    if (::geteuid() != 0) continue;
    ASSERT_EQ(::chown(path.c_str(), 1, 1), 0);
    EXPECT_FALSE(door::create(files.options())) << name;
    ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
  }
  EXPECT_TRUE(door::create(files.options()));
}

TEST(door_tls, who_has_shown_the_secret_has_room_of_its_own) {
  const auto authority = authority_of("test");
  const node_files files{authority, node_of(authority, "test")};
  auto options = files.options();
  options.patience = 1h;
  options.max_strangers = 4;
  listening_door at{options};
  const auto fd = shows_the_secret(at.port);
  ASSERT_TRUE(fd);
  EXPECT_EQ(at.it->count().strangers, 1u);
  std::vector<owned_fd> many;
  for (int i = 0; i < 20; ++i) many.push_back(dial_raw(at.port));
  EXPECT_TRUE(comes_true([&] { return at.it->count().refused == 16; }));
  EXPECT_FALSE(readable(fd.get(), 0ms));
}

TEST(door_tls, who_is_silent_in_the_middle_of_tls_is_gone_after_patience) {
  const auto authority = authority_of("test");
  const node_files files{authority, node_of(authority, "test")};
  auto options = files.options();
  options.patience = 1500ms;
  listening_door at{options};
  const auto fd = shows_the_secret(at.port);
  ASSERT_TRUE(fd);
  EXPECT_TRUE(hangs_up(fd.get()));
  EXPECT_TRUE(comes_true([&] { return at.it->count().strangers == 0; }));
  EXPECT_FALSE(at.admits_another());
}

}  // namespace
}  // namespace troupe::actors
