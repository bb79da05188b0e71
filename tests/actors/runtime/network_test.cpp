// The layer between the door and CAF: a peer that proves itself is connected once, in time, and
// only while it speaks. The other side of some connections is a door that this test holds itself.

#include "troupe/actors/runtime/network.hpp"

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include <caf/exit_reason.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/door/certificates.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/transport/owned_fd.hpp"

#include "cluster_peer.hpp"
#include "end_of_monitored.hpp"
#include "rude_host.hpp"
#include "scratch_folder.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;
using transport::owned_fd;
using troupe::testing::comes_true;
using troupe::testing::end_of_wait;
using troupe::testing::wait_limit;

milliseconds since(steady_clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
}

/// Credentials of mode tls, deleted with the object.
struct tls_files {
  troupe::testing::scratch_folder folder{"tls"};
  door_security security;
  tls_files() {
    const auto files = init_certificates(folder.path() + "/certs", "demo", 30);
    EXPECT_TRUE(files) << to_string(files.error());
    security = {door_security::mode::tls, "demo",     files->secret,
                files->certificate,       files->key, files->ca};
  }
};

/// Admits every peer that proves itself, and sends nothing more.
struct silent_host {
  std::mutex mutex;
  std::vector<door_socket> guests;
  std::unique_ptr<door> gate;
  std::uint16_t port{0};

  silent_host() {
    auto made = door::create({});
    EXPECT_TRUE(made) << to_string(made.error());
    gate = std::move(*made);
    auto bound = gate->listen("127.0.0.1", 0, [this](door_socket s) {
      const std::lock_guard lock{mutex};
      guests.push_back(s);
    });
    EXPECT_TRUE(bound) << to_string(bound.error());
    port = *bound;
  }
  ~silent_host() {
    gate.reset();
    hang_up();
  }
  void hang_up() {
    const std::lock_guard lock{mutex};
    for (const auto s : guests) ::close(s);
    guests.clear();
  }
  std::size_t count() {
    const std::lock_guard lock{mutex};
    return guests.size();
  }
};

/// Whether the peer closes. Bytes that arrive before that are dropped.
bool closes(door_socket s) {
  return comes_true([s] {
    std::array<char, 4096> bytes{};
    const auto n = ::recv(s, bytes.data(), bytes.size(), MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN);
  });
}

result<door_socket> dial(door& from, std::uint16_t port) {
  std::promise<result<door_socket>> outcome;
  from.connect("127.0.0.1", port, end_of_wait(),
               [&](result<door_socket> how) { outcome.set_value(std::move(how)); });
  return outcome.get_future().get();
}

std::uint16_t publish(actor_host& host, std::uint16_t port = 0) {
  const auto bound =
      host.publish(spawn_supervisor(host.system(), three_nodes()), "127.0.0.1", port);
  EXPECT_TRUE(bound) << to_string(bound.error());
  return bound.value_or(0);
}

result<membership> members_of(actor_host& host, const supervisor_actor& supervisor) {
  return ask<membership>(host.system(), supervisor, "the supervisor", wait_limit, members_atom_v);
}

// CAF's keep-alive takes a connection that is being made for one that has been silent since the
// machine was started, and closes it at the next tick.
TEST(network, a_connection_that_takes_longer_than_ticks_of_the_keep_alive_is_waited_for) {
  silent_host slow;
  actor_host host{{.network_heartbeat = 20ms}};
  // The dialling thread may be delayed for longer than `patience`, and then has made no connection.
  for (auto patience = 500ms; slow.count() == 0 && patience < wait_limit; patience *= 2) {
    const auto began = steady_clock::now();
    const auto found = host.connect<supervisor_actor>("127.0.0.1", slow.port, patience);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, errc::deadline) << found.error().message;
    EXPECT_GE(since(began), patience - 10ms);
  }
  EXPECT_EQ(slow.count(), 1U) << "one connection, never cut";
}

TEST(network, an_attempt_that_is_given_up_leaves_no_connection_behind) {
  silent_host slow;
  actor_host host;
  for (auto patience = 200ms; slow.count() == 0 && patience < wait_limit; patience *= 2) {
    ASSERT_FALSE(host.connect<supervisor_actor>("127.0.0.1", slow.port, patience));
  }
  ASSERT_EQ(slow.count(), 1U);
  EXPECT_TRUE(closes(slow.guests.front()));
}

/// Checks a silent guest of a host, with or without encryption.
void see_a_silent_guest_out(const door_security& security) {
  actor_host host{{.network_heartbeat = 50ms, .connection_timeout = 400ms, .security = security}};
  const auto port = publish(host);
  door_options options;
  options.security = security;
  auto outside = door::create(options);
  ASSERT_TRUE(outside) << to_string(outside.error());
  const auto began = steady_clock::now();
  const auto guest = dial(**outside, port);
  ASSERT_TRUE(guest) << to_string(guest.error());
  EXPECT_TRUE(closes(*guest));
  EXPECT_GE(since(began), 200ms) << "it has time to speak";
  ::close(*guest);
  actor_host other{{.security = security}};
  EXPECT_TRUE(other.connect<supervisor_actor>("127.0.0.1", port, wait_limit));
}

TEST(network, a_guest_that_proved_itself_and_then_says_nothing_is_closed) {
  see_a_silent_guest_out({});
}

TEST(network, also_where_its_connection_is_encrypted) {
  const tls_files files;
  see_a_silent_guest_out(files.security);
}

TEST(network, what_a_process_says_last_arrives_although_it_is_encrypted) {
  const tls_files files;
  actor_host there{{.security = files.security}};
  for (int round = 0; round < 10; ++round) {
    const auto boss = spawn_supervisor(there.system(), three_nodes());
    const auto bound = there.publish(boss, "127.0.0.1", 0);
    ASSERT_TRUE(bound) << to_string(bound.error());
    auto here = std::make_unique<actor_host>(actor_host_options{.security = files.security});
    const auto proxy = here->connect<supervisor_actor>("127.0.0.1", *bound, wait_limit);
    ASSERT_TRUE(proxy) << to_string(proxy.error());
    caf::scoped_actor self{there.system()};
    self->monitor(boss);
    caf::anon_send_exit(*proxy, caf::exit_reason::user_shutdown);
    here = nullptr;
    EXPECT_TRUE(troupe::testing::monitored_ends_within(self, wait_limit)) << "round " << round;
  }
}

TEST(network, all_who_ask_for_one_address_share_one_connection) {
  actor_host there, here;
  const auto port = publish(there);
  std::vector<std::thread> askers;
  std::atomic<int> found{0};
  for (int i = 0; i < 8; ++i) {
    askers.emplace_back([&] {
      const auto got = here.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
      if (got && members_of(here, *got)) ++found;
    });
  }
  for (auto& asker : askers) asker.join();
  EXPECT_EQ(found, 8);
  EXPECT_EQ(there.door_counters().admitted, 1U);
}

TEST(network, who_waits_shortly_is_answered_in_time_beside_who_waits_long) {
  silent_host slow;
  actor_host host;
  std::atomic<bool> answered{false};
  std::thread patient{[&] {
    EXPECT_FALSE(host.connect<supervisor_actor>("127.0.0.1", slow.port, 10 * wait_limit));
    answered = true;
  }};
  EXPECT_TRUE(comes_true([&] { return slow.count() == 1; }));
  const auto found = host.connect<supervisor_actor>("127.0.0.1", slow.port, 150ms);
  EXPECT_EQ(slow.count(), 1U);
  EXPECT_FALSE(answered) << "who waits long was given up too";
  slow.hang_up();
  patient.join();
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, errc::deadline);
}

// -- a crowded door

TEST(network, a_peer_that_hangs_up_is_asked_a_few_times_more) {
  const troupe::testing::rude_host rude;
  int came = 0;
  std::thread door{[&] {
    while (rude.guest().get() >= 0) ++came;
  }};
  actor_host host;
  const auto found = host.connect<supervisor_actor>("127.0.0.1", rude.port, wait_limit);
  ::shutdown(rude.listens.get(), SHUT_RDWR);
  door.join();
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, errc::peer_unreachable);
  EXPECT_THAT(found.error().message, HasSubstr("the peer hung up"));
  EXPECT_EQ(came, 4);
}

TEST(network, whoever_asks_during_a_pause_has_as_many_attempts_as_the_first) {
  const troupe::testing::rude_host rude;
  std::atomic<int> came{0};
  std::thread door{[&] {
    while (rude.guest().get() >= 0) ++came;
  }};
  actor_host host;
  const auto ask = [&] {
    return host.connect<supervisor_actor>("127.0.0.1", rude.port, wait_limit);
  };
  auto first = std::async(std::launch::async, ask);
  EXPECT_TRUE(comes_true([&] { return came == 3; }, 1ms));
  const auto second = ask();
  EXPECT_FALSE(first.get());
  ::shutdown(rude.listens.get(), SHUT_RDWR);
  door.join();
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, errc::peer_unreachable);
  EXPECT_GE(came, 2 + 4);  // the dialler may not have heard of the third hang-up when it was asked
}

TEST(network, a_peer_is_found_whose_door_was_crowded) {
  troupe::testing::rude_host rude;
  actor_host here, there;
  auto asked = std::async(std::launch::async, [&] {
    return here.connect<supervisor_actor>("127.0.0.1", rude.port, wait_limit);
  });
  for (int i = 0; i < 2; ++i) ASSERT_GE(rude.guest().get(), 0);
  const auto third = rude.guest();
  rude.listens.reset();
  publish(there, rude.port);
  ::shutdown(third.get(), SHUT_RDWR);
  const auto found = asked.get();
  EXPECT_TRUE(found) << to_string(found.error());
}

TEST(network, an_actor_that_was_found_is_forgotten_with_its_process) {
  auto there = std::make_unique<actor_host>();
  actor_host here;
  const auto port = publish(*there);
  const auto former = here.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
  ASSERT_TRUE(former);
  const auto first = members_of(here, *former);
  ASSERT_TRUE(first);
  there = nullptr;
  there = std::make_unique<actor_host>();
  publish(*there, port);
  // The former supervisor may be found until the end of its connection has arrived here.
  result<membership> second = fail(errc::internal, "not asked");
  const auto is_asked = [&] {
    const auto now = here.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
    if (now) second = members_of(here, *now);
    return second.has_value();
  };
  ASSERT_TRUE(comes_true(is_asked, 10ms)) << to_string(second.error());
  EXPECT_NE(second->supervisor_incarnation, first->supervisor_incarnation);
}

// -- secrets

struct secret_file {
  std::string path;
  explicit secret_file(const std::string& text) {
    std::string name = std::filesystem::temp_directory_path() / "troupe-secret-XXXXXX";
    const int fd = ::mkstemp(name.data());
    EXPECT_GE(fd, 0);
    ::close(fd);
    path = name;
    write(text);
  }
  ~secret_file() { std::filesystem::remove(path); }
  void write(const std::string& text) const {
    std::ofstream{path, std::ios::trunc} << text << "\n";
    EXPECT_EQ(::chmod(path.c_str(), 0600), 0);
  }
  [[nodiscard]] actor_host_options options() const {
    actor_host_options made;
    made.security.how = door_security::mode::secret;
    made.security.cluster = "demo";
    made.security.secret = path;
    return made;
  }
};

const std::string ours(48, 'o');
const std::string theirs(48, 't');

TEST(network, who_does_not_know_the_secret_is_unauthorized_until_it_does) {
  const secret_file one{ours};
  const secret_file other{theirs};
  actor_host there{one.options()};
  const auto port = publish(there);
  actor_host friendly{one.options()};
  EXPECT_TRUE(friendly.connect<supervisor_actor>("127.0.0.1", port, wait_limit));
  actor_host open;
  const auto refused = open.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::unauthorized) << refused.error().message;
  actor_host stranger{other.options()};
  const auto wrong = stranger.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().code, errc::unauthorized) << wrong.error().message;
  EXPECT_EQ(there.door_counters().admitted, 1U);
  other.write(ours);
  auto mended = wrong;
  const auto gets_in = [&] {
    mended = stranger.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
    return mended.has_value();
  };
  EXPECT_TRUE(comes_true(gets_in, 100ms)) << to_string(mended.error());
}

TEST(network, a_host_whose_credentials_cannot_be_used_says_which_with_every_call) {
  actor_host_options options;
  options.security.how = door_security::mode::secret;
  options.security.secret = "/nowhere/secret";
  actor_host host{options};
  const auto bound = host.publish(spawn_supervisor(host.system(), three_nodes()), "127.0.0.1", 0);
  ASSERT_FALSE(bound);
  EXPECT_EQ(bound.error().code, errc::invalid_config);
  EXPECT_THAT(bound.error().message, HasSubstr("/nowhere/secret"));
  const auto found = host.connect<supervisor_actor>("127.0.0.1", 1, 100ms);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, errc::invalid_config);
}

TEST(network, a_deployment_open_to_other_machines_has_no_host_unless_it_is_tls) {
  config::deployment deployment;
  deployment.cluster = "demo";
  deployment.security = {config::security_mode::none, "/s", "", "", ""};
  EXPECT_TRUE(host_options_of(deployment));
  deployment.supervisor.host = "10.0.0.1";
  for (const auto mode : {config::security_mode::none, config::security_mode::secret}) {
    deployment.security.mode = mode;
    const auto refused = host_options_of(deployment);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, errc::invalid_config);
    EXPECT_THAT(refused.error().message, HasSubstr("supervisor.host is 10.0.0.1"));
    EXPECT_THAT(refused.error().message, HasSubstr("security.mode: tls"));
  }
  deployment.supervisor.host = "127.0.0.1";
  deployment.stages.push_back({});
  deployment.stages.back().name = "decode";
  deployment.stages.back().hosts = {"127.0.0.1", "gpu-host-2"};
  EXPECT_THAT(host_options_of(deployment).error().message,
              HasSubstr("a host of stage decode is gpu-host-2"));
  deployment.security.mode = config::security_mode::secret;
  deployment.stages.back().hosts = {"127.0.0.1", "auto"};
  EXPECT_TRUE(host_options_of(deployment)) << "what it stands for is looked at when it is known";
  deployment.security.mode = config::security_mode::tls;
  deployment.security.secret = "/s";
  const auto fine = host_options_of(deployment);
  ASSERT_TRUE(fine);
  EXPECT_EQ(fine->security.how, door_security::mode::tls);
  EXPECT_EQ(fine->security.cluster, "demo");
  EXPECT_EQ(fine->security.secret, "/s");
}

}  // namespace
}  // namespace troupe::actors::testing
