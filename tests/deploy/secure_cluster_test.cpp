// Clusters whose nodes prove to each other that they belong together, and strangers at their ports:
// real processes, started as an operator does.

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/door/certificates.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"

#include "command.hpp"
#include "process_memory.hpp"
#include "text_of.hpp"

namespace {

using namespace std::chrono_literals;
using clock_type = std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace troupe::testing;
namespace actors = troupe::actors;
namespace reference = troupe::reference;

/// The files of one cluster's credentials.
struct credentials {
  scratch_folder folder;
  std::string mode;

  explicit credentials(std::string how, const std::string& cluster = "secured")
      : mode{std::move(how)} {
    if (mode == "secret") write_secret(std::string(48, 's'));
    if (mode == "tls") {
      const auto made = actors::init_certificates(folder.path(), cluster, 30);
      EXPECT_TRUE(made) << to_string(made.error());
    }
  }
  [[nodiscard]] std::string file(const std::string& name) const {
    return folder.path() + "/" + name;
  }
  void write_secret(const std::string& text) const {
    std::ofstream{file("cluster.secret"), std::ios::trunc} << text << "\n";
    EXPECT_EQ(::chmod(file("cluster.secret").c_str(), 0600), 0);
  }
  [[nodiscard]] std::string section() const {
    if (mode == "none") return "security: {mode: none}\n";
    auto text = "security:\n  mode: " + mode + "\n  secret: " + file("cluster.secret") + "\n";
    if (mode == "tls") {
      text += "  certificate: " + file("node.crt") + "\n  key: " + file("node.key") +
              "\n  ca: " + file("ca.crt") + "\n";
    }
    return text;
  }
};

/// A new supervisor assigns a stage's names only after it has waited for their nodes for
/// `heartbeat_timeout`.
std::string deployment(std::uint16_t port, const std::string& security,
                       const std::string& heartbeat_timeout = "10min") {
  return "cluster: secured\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
         ", heartbeat_interval: 200ms, heartbeat_timeout: " + heartbeat_timeout + "}\n" + security +
         "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
         "stages:\n"
         "  - {name: prefill, role: prefill, pool: {size: 1MiB}, transport: {peer_silence: 1min, "
         "connect_timeout: 1min}}\n"
         "  - {name: decode, role: decode, replicas: 2, restart: on-failure, pool: {size: 1MiB}, "
         "transport: {peer_silence: 1min, connect_timeout: 1min}}\n"
         "edges:\n  - {from: prefill, to: decode, mode: write}\n"
         "limits: {transfer_deadline: 10min}\n";
}

std::unique_ptr<actors::cluster_client> client_of(const std::string& file) {
  const auto outcome = troupe::config::load(file);
  EXPECT_TRUE(outcome.value);
  if (!outcome.value) return nullptr;
  actors::cluster_client_options options;
  options.port = outcome.value->supervisor.port;
  options.timeout = wait_limit;
  options.actors.security = actors::door_security_of(*outcome.value).value();
  auto client = actors::cluster_client::connect(options);
  EXPECT_TRUE(client) << to_string(client.error());
  return client ? std::move(*client) : nullptr;
}

/// Longer than anything in these tests takes.
constexpr std::uint32_t never_ms = 600'000;

/// One prompt by way of a transfer. Returns what went wrong, or an empty string.
std::string transfer(actors::cluster_client& client, const std::string& id) {
  const auto call = [&](const actors::node_info& node, const std::string& method,
                        reference::payload payload) {
    return client.call(node, {method, std::move(payload), never_ms});
  };
  actors::placement_request wanted;
  wanted.request = id;
  wanted.from = "prefill";
  wanted.to = "decode";
  wanted.timeout_ms = never_ms;
  const auto where = client.place(wanted);
  if (!where) return to_string(where.error());
  reference::prefill_call prefill;
  prefill.request = id;
  prefill.prompt = reference::encode_text("to be or not to be");
  prefill.deadline_ms = never_ms;
  reference::decode_call decode;
  decode.request = id;
  decode.sources = {where->prefill.front().name};
  decode.replica = {where->decode.front().name};
  decode.prompt = prefill.prompt;
  decode.max_tokens = 4;
  decode.deadline_ms = never_ms;
  auto first = std::async(std::launch::async, [&] {
    return call(where->prefill.front(), "prefill", reference::to_json(prefill));
  });
  const auto text = call(where->decode.front(), "decode", reference::to_json(decode));
  const auto filled = first.get();
  (void)client.finished(id);
  if (!text) return to_string(text.error());
  return filled ? "" : to_string(filled.error());
}

/// A cluster under `troupe up`.
class secured : public ::testing::TestWithParam<std::string> {
 protected:
  void start(const std::string& mode, const std::string& heartbeat_timeout = "10min") {
    keep_pages_small();
    given_.emplace(mode);
    port_ = free_port();
    file_ = folder_.path() + "/deployment.yaml";
    std::ofstream{file_} << deployment(port_, given_->section(), heartbeat_timeout);
    up_.emplace(std::vector<std::string>{"up", file_, "--log-dir", folder_.path()});
    ASSERT_TRUE(up_->says("4 nodes are up")) << up_->out() << up_->err();
  }
  [[nodiscard]] std::string log_of(const std::string& node) const {
    return text_of(folder_.path() + "/" + node + ".log");
  }
  scratch_folder folder_;
  std::optional<credentials> given_;
  std::string file_;
  std::uint16_t port_{0};
  std::optional<command> up_;
};

TEST_P(secured, a_cluster_transfers_and_its_file_opens_it_to_the_commands) {
  start(GetParam());
  const auto client = client_of(file_);
  ASSERT_TRUE(client);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(transfer(*client, "r" + std::to_string(i)), "");
  EXPECT_EQ(run_until_good({"status", file_}).code, 0);
  EXPECT_EQ(run({"events", file_}).code, 0);
  const auto drained = run({"drain", file_, "decode-1"});
  EXPECT_EQ(drained.code, 0) << drained.out << drained.err;
  EXPECT_EQ(transfer(*client, "after"), "");
}

TEST_P(secured, an_address_alone_does_not_open_it) {
  start(GetParam());
  const auto address = "127.0.0.1:" + std::to_string(port_);
  for (const std::vector<std::string>& verb : {std::vector<std::string>{"status", address},
                                               {"events", address},
                                               {"drain", address, "decode-0"}}) {
    const auto refused = run(verb);
    EXPECT_NE(refused.code, 0) << verb.front();
    EXPECT_THAT(refused.err, HasSubstr("unauthorized")) << verb.front();
    EXPECT_THAT(refused.err, HasSubstr("give the deployment's file instead of HOST:PORT"));
  }
  EXPECT_EQ(run_until_good({"status", file_}).code, 0);
}

TEST_P(secured, a_node_with_wrong_credentials_keeps_asking_and_is_taken_in_once_they_are_mended) {
  start(GetParam(), "5s");
  const auto client = client_of(file_);
  ASSERT_TRUE(client);
  ASSERT_EQ(transfer(*client, "before"), "");
  const auto victim = node_in(up_->out(), "decode-1");
  // The node leaves, and comes back with the credentials of another cluster.
  const auto drained = run({"drain", file_, "decode-1"});
  ASSERT_EQ(drained.code, 0) << drained.out << drained.err;
  ASSERT_TRUE(vanishes(victim.pid));
  const credentials others{GetParam()};
  if (GetParam() == "secret") others.write_secret(std::string(48, 'x'));
  const deployment_on_disk wrong{deployment(port_, others.section())};
  const std::vector<std::string> who = GetParam() == "tls"
                                           ? std::vector<std::string>{"--name", "decode-1"}
                                           : std::vector<std::string>{"--stage", "decode"};
  command node{{"node", wrong.path(), who[0], who[1]}};
  ASSERT_TRUE(node.says("unauthorized")) << node.err();
  EXPECT_EQ(transfer(*client, "meanwhile"), "");
  // The right files replace the wrong ones. They are read again without a restart.
  for (const auto& entry : std::filesystem::directory_iterator{given_->folder.path()}) {
    std::filesystem::copy(entry.path(), others.file(entry.path().filename()),
                          std::filesystem::copy_options::overwrite_existing |
                              std::filesystem::copy_options::recursive);
  }
  EXPECT_TRUE(node.says(registered)) << node.err();
  EXPECT_EQ(run_until_good({"status", file_}).code, 0);
  EXPECT_EQ(transfer(*client, "after"), "");
}

TEST_P(secured, a_process_that_is_started_for_a_stage_claims_its_name_with_them) {
  start(GetParam(), "5s");
  const auto victim = node_in(up_->out(), "decode-1");
  const auto drained = run({"drain", file_, "decode-1"});
  ASSERT_EQ(drained.code, 0) << drained.out << drained.err;
  ASSERT_TRUE(vanishes(victim.pid));
  command node{{"node", file_, "--stage", "decode"}};
  EXPECT_TRUE(node.says("the supervisor assigned the name decode-1\n")) << node.err();
  EXPECT_TRUE(node.says(registered)) << node.err();
  EXPECT_EQ(run_until_good({"status", file_}).code, 0);
}

TEST_P(secured, a_killed_node_is_reported_at_once) {
  start(GetParam());
  const auto victim = node_in(up_->out(), "decode-1");
  command follow{{"events", file_, "--follow"}};
  ASSERT_TRUE(follow.says("first heartbeat")) << follow.err();
  ASSERT_EQ(::kill(victim.pid, SIGKILL), 0);
  // Its heartbeats alone would take ten minutes.
  EXPECT_TRUE(follow.says("connection lost")) << follow.out();
  EXPECT_TRUE(up_->says("is up again")) << up_->out() << up_->err();
}

TEST_P(secured, credentials_are_changed_while_the_cluster_runs) {
  start(GetParam());
  const auto client = client_of(file_);
  ASSERT_TRUE(client);
  ASSERT_EQ(transfer(*client, "before"), "");
  if (GetParam() == "tls") {
    const auto renewed = actors::renew_certificates(given_->folder.path(), 30);
    ASSERT_TRUE(renewed) << to_string(renewed.error());
  } else {
    given_->write_secret(std::string(48, 'n') + "\n" + std::string(48, 's'));
  }
  // A node that starts with the new credentials joins those that started with the old ones.
  const auto victim = node_in(up_->out(), "decode-1");
  ASSERT_EQ(::kill(victim.pid, SIGKILL), 0);
  ASSERT_TRUE(up_->says("is up again")) << up_->out() << up_->err();
  EXPECT_EQ(run_until_good({"status", file_}).code, 0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(transfer(*client, "after-" + std::to_string(i)), "");
  // The other nodes read them again without any new connection.
  const std::string said = "the credentials of the cluster port were read again";
  EXPECT_TRUE(
      comes_true([&] { return log_of("supervisor").find(said) != std::string::npos; }, 100ms))
      << log_of("supervisor");
  for (const auto* stayed : {"supervisor", "prefill-0", "decode-0"})
    EXPECT_EQ(::kill(node_in(up_->out(), stayed).pid, 0), 0) << stayed;
}

INSTANTIATE_TEST_SUITE_P(mode, secured, ::testing::Values("secret", "tls"),
                         [](const auto& tested) { return tested.param; });

// -- strangers

/// The lowest `bytes` bytes of `value`, in network byte order.
std::string number(std::uint64_t value, int bytes) {
  std::string out;
  for (int i = bytes; i-- > 0;) out += static_cast<char>(value >> (8 * i));
  return out;
}
/// A header of CAF's own protocol.
std::string header(char operation, char flags, std::uint32_t payload, std::uint64_t data,
                   std::uint64_t source, std::uint64_t dest) {
  return std::string{operation, 0, 0, flags} + number(payload, 4) + number(data, 8) +
         number(source, 8) + number(dest, 8);
}

/// What strangers send. An empty string sends nothing at all.
std::vector<std::string> hostile() {
  std::mt19937 random{7};
  std::string noise(4096, 0);
  for (auto& c : noise) c = static_cast<char>(random());
  std::string nested;
  for (int i = 0; i < 60'000; ++i) nested += std::string{"\x01@message", 9};
  const auto payload = [](char op, char flags, std::uint64_t dest, const std::string& body) {
    return header(op, flags, static_cast<std::uint32_t>(body.size()), 4, 1, dest) + body;
  };
  return {
      header(0, 0, 0, 4, 0, 0),              // a handshake without a payload crashed CAF
      header(1, 0, 0, 4, 0, 0),              // the same in a client handshake
      header(1, 0, 1'610'612'736, 4, 0, 0),  // a length of 1.5 GiB
      payload(1, 0, 0, std::string(20, 'v') + number(4711, 4)),  // pretends to be a victim's node
      payload(2, 0, 0, nested),                                  // nested messages
      payload(2, 0, 8, "@exit"),                                 // the end of actor 8
      payload(2, 1, 1, "SpawnServ"),                             // a message to the spawn server
      noise,
      "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
      std::string{"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11} + noise.substr(0, 500),
      "",
  };
}

int dial(std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0) return fd;
  ::close(fd);
  return -1;
}

void send_all(int fd, const std::string& bytes) {
  for (std::size_t sent = 0; sent < bytes.size();) {
    const auto n = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;
    sent += static_cast<std::size_t>(n);
  }
}

/// Of all threads of the process.
double cpu_seconds(pid_t pid) {
  const auto text = text_of("/proc/" + std::to_string(pid) + "/stat");
  std::istringstream rest{text.substr(text.rfind(')') + 2)};
  std::string skipped;
  for (int i = 0; i < 11; ++i) rest >> skipped;
  double user = 0;
  double system = 0;
  rest >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

class besieged : public secured {
 protected:
  std::vector<started_node> targets() {
    return {node_in(up_->out(), "supervisor"), node_in(up_->out(), "decode-0")};
  }
};

TEST_P(besieged, hostile_bytes_neither_end_a_node_nor_fill_it) {
  start(GetParam());
  const auto client = client_of(file_);
  ASSERT_TRUE(client);
  ASSERT_EQ(transfer(*client, "before"), "");
  const auto attacks = hostile();
  for (const auto& target : targets()) {
    const auto visit = [&](int rounds) {
      for (int i = 0; i < rounds; ++i) {
        const int fd = dial(target.port);
        ASSERT_GE(fd, 0) << target.name;
        send_all(fd, attacks[static_cast<std::size_t>(i) % attacks.size()]);
        ::close(fd);
      }
    };
    visit(200);  // let it make its one-time allocations
    const auto before = resident_bytes(target.pid);
    visit(2000);
    const auto after = resident_bytes(target.pid);
    EXPECT_LT(after, before + (std::uint64_t{16} << 20)) << target.name;
    EXPECT_EQ(::kill(target.pid, 0), 0) << target.name;
    EXPECT_EQ(transfer(*client, "beside-" + target.name), "");
  }
  EXPECT_EQ(run_until_good({"status", file_}).code, 0);
}

TEST_P(besieged, silent_and_slow_strangers_cost_next_to_nothing_and_keep_nobody_out) {
  start(GetParam());
  const auto client = client_of(file_);
  ASSERT_TRUE(client);
  for (const auto& target : targets()) {
    std::vector<int> strangers;
    const auto besiege = [&] {
      for (const int fd : strangers) ::close(fd);
      strangers.clear();
      for (int i = 0; i < 100; ++i) strangers.push_back(dial(target.port));
    };
    const auto idle_from = cpu_seconds(target.pid);
    std::this_thread::sleep_for(2s);
    const auto idle = cpu_seconds(target.pid) - idle_from;
    besiege();
    const auto busy_from = cpu_seconds(target.pid);
    std::this_thread::sleep_for(1500ms);
    const auto busy = cpu_seconds(target.pid) - busy_from;
    // Busy-polling the strangers would take all of these 1.5 s.
    EXPECT_LT(busy - idle * 0.75, 1.5 / 4) << target.name << ": " << idle << ", " << busy;
    besiege();
    for (int i = 0; i < 5; ++i) {  // one byte at a time
      for (const int fd : strangers) send_all(fd, "T");
      EXPECT_EQ(transfer(*client, target.name + std::to_string(i)), "");
    }
    command status{{"status", file_}};  // a new connection beside the strangers
    EXPECT_EQ(status.wait(), 0) << status.err();
    std::this_thread::sleep_for(2500ms);
    for (const int fd : strangers) {
      std::array<char, 256> bytes{};
      pollfd p{fd, POLLIN, 0};
      EXPECT_GT(::poll(&p, 1, static_cast<int>(std::chrono::milliseconds{wait_limit}.count())), 0)
          << "shown out";
      while (::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
      }
      ::close(fd);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(mode, besieged, ::testing::Values("none", "tls"),
                         [](const auto& tested) { return tested.param; });

// -- hosts that others can reach

// -- a file without `security`

std::string store_alone(const std::string& cluster, std::uint16_t port,
                        const std::string& security = "") {
  return "cluster: " + cluster + "\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
         ", heartbeat_interval: 200ms, heartbeat_timeout: 10min, state_file: none}\n" + security +
         "stages: [{name: cache, role: store, pool: {size: 1MiB}}]\n";
}

TEST(without_a_word_on_security, the_users_own_processes_find_each_other_and_no_other_gets_in) {
  const auto port = free_port();
  const auto own = "own-" + std::to_string(port);
  const deployment_on_disk file{store_alone(own, port)};
  EXPECT_THAT(run({"check", file.path()}).out, HasSubstr("which the first process creates"));
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("2 nodes are up")) << up.out() << up.err();
  EXPECT_THAT(run({"check", file.path()}).out,
              HasSubstr("/troupe/" + own + "/secret, which exists"));
  const auto by_file = run_until_good({"status", file.path()});
  EXPECT_EQ(by_file.code, 0) << by_file.err;

  const deployment_on_disk other{store_alone("other-" + std::to_string(port), port)};
  const auto stranger = run({"status", other.path()});
  EXPECT_NE(stranger.code, 0);
  EXPECT_THAT(stranger.err, HasSubstr("unauthorized"));
  const deployment_on_disk open{store_alone(own, port, "security: {mode: none}\n")};
  const auto refused = run({"status", open.path()});
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.err, HasSubstr("unauthorized"));

  // The secret of the other cluster is there as well, and is newer.
  const auto by_address = run_until_good({"status", "127.0.0.1:" + std::to_string(port)});
  EXPECT_EQ(by_address.code, 0) << by_address.err;
}

TEST(without_a_word_on_security, an_address_where_no_secret_is_taken_is_said_with_what_was_tried) {
  const auto port = free_port();
  const auto own = "own-" + std::to_string(port);
  const deployment_on_disk here{store_alone(own, port)};
  EXPECT_NE(run({"status", here.path()}).code, 0) << "nobody is there, but the secret is now";
  const scratch_folder folder{"secret"};
  const auto secret = folder.path() + "/secret";
  std::ofstream{secret} << std::string(64, 'a') << "\n";
  ASSERT_EQ(::chmod(secret.c_str(), 0600), 0);
  const deployment_on_disk file{
      store_alone("else", port, "security: {mode: secret, secret: " + secret + "}\n")};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("2 nodes are up")) << up.out() << up.err();
  const auto refused = run({"status", "127.0.0.1:" + std::to_string(port)});
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("unauthorized"),
                                 HasSubstr("the clusters that this user used last (" + own),
                                 HasSubstr("give the deployment's file instead of HOST:PORT")));
}

TEST(without_a_word_on_security, a_cluster_that_asks_for_none_is_found_by_its_address) {
  const auto port = free_port();
  const deployment_on_disk secret{store_alone("own-" + std::to_string(port), port)};
  EXPECT_NE(run({"status", secret.path()}).code, 0) << "nobody is there, but the secret is now";
  const deployment_on_disk file{store_alone("open", port, "security: {mode: none}\n")};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("2 nodes are up")) << up.out() << up.err();
  const auto status = run_until_good({"status", "127.0.0.1:" + std::to_string(port)});
  EXPECT_EQ(status.code, 0) << status.err;
}

TEST(an_open_host, that_is_named_by_its_address_is_not_dialled) {
  for (const std::vector<std::string>& verb : {std::vector<std::string>{"status", "10.9.8.7:7400"},
                                               {"events", "10.9.8.7:7400"},
                                               {"drain", "10.9.8.7:7400", "decode-0"}}) {
    const auto refused = run(verb);
    EXPECT_NE(refused.code, 0) << verb.front();
    EXPECT_THAT(refused.err, HasSubstr("give the deployment's file instead of HOST:PORT"));
  }
}

TEST(an_open_host, is_refused_unless_the_mode_is_tls) {
  const deployment_on_disk file{
      "cluster: open\nsupervisor: {host: 10.9.8.7}\n"
      "stages: [{name: cache, role: store, pool: {size: 1MiB}}]\n"};
  const auto refused = run({"check", file.path()});
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.err + refused.out, HasSubstr("set security.mode: tls"));
  const deployment_on_disk secured{
      "cluster: open\nsupervisor: {host: 10.9.8.7}\n"
      "security: {mode: tls, secret: /s, certificate: /c, key: /k, ca: /a}\n"
      "stages: [{name: cache, role: store, pool: {size: 1MiB}, hosts: [10.9.8.6]}]\n"};
  const auto fine = run({"check", secured.path()});
  EXPECT_EQ(fine.code, 0) << fine.err;
}

}  // namespace
