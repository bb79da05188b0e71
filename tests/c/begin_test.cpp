/// A supervisor that is started on demand, through the C ABI: the first engine to connect starts
/// it, and starts another one if it is gone.

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include "begun_supervisor.hpp"
#include "c_fixture.hpp"
#include "free_port.hpp"
#include "scratch_folder.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

constexpr const char* text =
    "cluster: c-begin\nsupervisor: {begin: true, port: 0, state_file: none}\nstages:\n"
    "  - {name: engines, role: both, open: {max_nodes: 8}}\n"
    "edges:\n  - {from: engines, to: engines, mode: read}\n";

/// The notice of a supervisor at a port of ours, held by this process. This supervisor ends as soon
/// as it is connected to.
class ending_supervisor {
 public:
  explicit ending_supervisor(const std::string& folder)
      : door_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    auto at = loopback(0);
    socklen_t size = sizeof at;
    auto* generic = reinterpret_cast<sockaddr*>(&at);
    EXPECT_EQ(::bind(door_, generic, size), 0);
    EXPECT_EQ(::listen(door_, 8), 0);
    EXPECT_EQ(::getsockname(door_, generic, &size), 0);
    std::filesystem::create_directories(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    notice_ = ::open((folder + "/supervisor").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_EQ(::flock(notice_, LOCK_EX | LOCK_NB), 0);
    const auto says =
        "{\"host\":\"127.0.0.1\",\"incarnation\":1,\"pid\":" + std::to_string(::getpid()) +
        ",\"port\":" + std::to_string(ntohs(at.sin_port)) + "}\n";
    EXPECT_EQ(::write(notice_, says.data(), says.size()), static_cast<ssize_t>(says.size()));
    thread_ = std::thread{[this] { end_when_connected_to(); }};
  }
  ~ending_supervisor() { thread_.join(); }
  ending_supervisor(const ending_supervisor&) = delete;
  ending_supervisor& operator=(const ending_supervisor&) = delete;

 private:
  void end_when_connected_to() const {
    pollfd guest{door_, POLLIN, 0};
    const auto limit = std::chrono::milliseconds{wait_limit}.count();
    EXPECT_EQ(::poll(&guest, 1, static_cast<int>(limit)), 1);
    ::flock(notice_, LOCK_UN);
    ::close(notice_);
    ::close(door_);  // and with it the connection, which was never accepted
  }

  int door_{-1};
  int notice_{-1};
  std::thread thread_;
};

class c_begin : public ::testing::Test {
 protected:
  c_begin() {
    ::setenv("XDG_STATE_HOME", folder.path().c_str(), 1);
    ::setenv("TROUPE_COMMAND", TROUPE_COMMAND, 1);
  }
  ~c_begin() override { troupe_cluster_free(cluster); }

  [[nodiscard]] std::string members() const {
    char* json = nullptr;
    if (troupe_cluster_members(cluster, &json) != TROUPE_OK) return troupe_last_error();
    std::string all{json};
    troupe_free(json);
    return all;
  }

  scratch_folder folder{"c-begin"};
  begun_supervisor supervisor{"c-begin"};
  troupe_cluster_options options{.size = sizeof(troupe_cluster_options),
                                 .flags = 0,
                                 .deployment_file = nullptr,
                                 .deployment_text = text,
                                 .host = nullptr,
                                 .port = 0,
                                 .timeout_ms = 30'000};
  troupe_cluster* cluster{nullptr};
};

TEST_F(c_begin, a_connection_begins_the_supervisor_and_the_next_one_where_it_is_gone) {
  ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  EXPECT_THAT(members(), HasSubstr("\"cluster\": \"c-begin\""));
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  EXPECT_TRUE(comes_true([&] { return members().find("\"cluster\"") != std::string::npos; },
                         std::chrono::milliseconds{20}))
      << members();
  EXPECT_GT(supervisor.wait(pid), 0) << supervisor.log();
}

TEST_F(c_begin, a_connection_that_is_lazy_begins_it_with_its_first_call) {
  options.flags = TROUPE_LAZY;
  ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
  EXPECT_FALSE(supervisor.lives());
  EXPECT_THAT(members(), HasSubstr("\"cluster\": \"c-begin\""));
  EXPECT_TRUE(supervisor.lives());
}

TEST_F(c_begin, a_connection_to_one_that_has_just_ended_begins_the_next) {
  const ending_supervisor former{supervisor.folder()};
  ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
  EXPECT_THAT(members(), HasSubstr("\"cluster\": \"c-begin\""));
  EXPECT_GT(supervisor.wait(::getpid()), 0) << supervisor.log();
}

TEST_F(c_begin, a_connection_to_an_address_begins_none) {
  options.port = 1;
  options.timeout_ms = 500;
  EXPECT_EQ(troupe_cluster_connect(&options, &cluster), TROUPE_PEER_UNREACHABLE);
  EXPECT_FALSE(supervisor.lives());
}

}  // namespace

}  // namespace troupe::testing
