// The state file of a supervisor, as killed processes, full disks and strangers leave it.

#include "troupe/actors/membership/membership_store.hpp"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fails_with.hpp"
#include "scratch_folder.hpp"
#include "text_of.hpp"
#include "waiting.hpp"

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using troupe::testing::fails_with;
using troupe::testing::text_of;
namespace fs = std::filesystem;

membership_record with_epoch(std::uint64_t limit) {
  membership_record r{"demo", limit, {}};
  for (int i = 0; i < 40; ++i) {
    r.nodes.push_back({"decode-" + std::to_string(i),
                       node_state::up,
                       limit + 1,
                       "127.0.0.1",
                       5000,
                       42,
                       {1, 2, 3}});
  }
  return r;
}

struct state_file : ::testing::Test {
  troupe::testing::scratch_folder scratch{"state"};
  const std::string folder{scratch.path()};
  const std::string path{folder + "/demo.state"};

  ~state_file() override {
    std::error_code ignored;
    fs::permissions(folder, fs::perms::owner_all, ignored);
  }
  [[nodiscard]] std::unique_ptr<membership_store> open(const std::string& cluster = "demo") const {
    auto store = membership_store::open(path, cluster);
    EXPECT_TRUE(store) << store.error().message;
    return store ? std::move(*store) : nullptr;
  }
  void put(const std::string& text) const { std::ofstream{path, std::ios::binary} << text; }
};

TEST_F(state_file, that_is_not_there_is_made_and_what_was_saved_last_is_found_by_the_next) {
  {
    const auto store = open();
    EXPECT_FALSE(store->found());
    for (std::uint64_t i = 1; i <= 500; ++i) store->save(with_epoch(i));
  }
  EXPECT_EQ(open()->found(), with_epoch(500));
}

TEST_F(state_file, reserves_epochs_with_each_start_even_if_nothing_is_saved_then) {
  std::uint64_t before = 0;
  for (int i = 0; i < 3; ++i) {
    const auto store = open();
    if (i == 0) continue;
    ASSERT_TRUE(store->found());
    EXPECT_GE(store->found()->epoch_limit, before + epoch_reserve);
    before = store->found()->epoch_limit;
  }
}

TEST_F(state_file, is_open_to_its_owner_alone_whatever_was_left_beside_it) {
  const auto beside = path + ".tmp";
  std::ofstream{beside} << "of a supervisor that was killed, by hand open to all";
  fs::permissions(beside, fs::perms{0666});
  open()->save(with_epoch(1));
  EXPECT_EQ(fs::status(path).permissions(), fs::perms{0600});
}

TEST_F(state_file, of_a_living_supervisor_is_refused_to_a_second_one) {
  const auto first = open();
  const auto second = membership_store::open(path, "demo");
  ASSERT_THAT(second, fails_with(errc::already_exists, HasSubstr(path)));
  EXPECT_THAT(second.error().message, HasSubstr("pid " + std::to_string(::getpid())));
}

TEST_F(state_file, is_given_up_by_close_and_takes_nothing_after_it) {
  const auto first = open();
  first->save(with_epoch(7));
  first->close();
  first->save(with_epoch(8));
  EXPECT_EQ(open()->found(), with_epoch(7));
}

TEST_F(state_file, that_cannot_be_used_is_set_aside_and_the_supervisor_starts_afresh) {
  auto flipped = to_text(with_epoch(9));
  flipped[flipped.size() / 2] ^= 1;
  const auto bad = path + ".bad";
  std::string at = bad;
  int number = 0;
  for (const auto& text : {flipped, std::string{"troupe-membership 99 0123456789abcdef\n{}"},
                           std::string{"troupe-membership "}}) {
    put(text);
    const auto store = open();
    ASSERT_TRUE(store);
    EXPECT_FALSE(store->found());
    EXPECT_EQ(text_of(at), text) << "what was there is kept, each under a name of its own";
    EXPECT_TRUE(parse_record(text_of(path)));
    at = bad + "." + std::to_string(++number);
  }
}

TEST_F(state_file, that_is_empty_is_as_good_as_none) {
  put({});
  EXPECT_FALSE(open()->found());
  EXPECT_FALSE(fs::exists(path + ".bad"));
}

TEST_F(state_file, that_is_somebody_elses_is_left_and_the_start_fails) {
  for (const auto& text : {std::string{"my thesis"}, to_text({"another-cluster", 9, {}})}) {
    put(text);
    const auto store = membership_store::open(path, "demo");
    ASSERT_THAT(store, fails_with(errc::invalid_config, HasSubstr(path))) << text;
    EXPECT_THAT(store.error().message, HasSubstr("it is left as it is"));
    EXPECT_EQ(text_of(path), text);
  }
  ASSERT_EQ(::unlink(path.c_str()), 0);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto store = membership_store::open(path, "demo");
  ASSERT_FALSE(store);
  EXPECT_THAT(store.error().message, HasSubstr("it is not a file"));
  EXPECT_TRUE(fs::is_fifo(path));
  EXPECT_FALSE(membership_store::open("/dev/null", "demo"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_FALSE(fs::exists("/dev/null.lock"));
  EXPECT_FALSE(fs::exists(path + ".bad"));
}

TEST_F(state_file, that_may_not_be_read_is_left_too) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  put(to_text(with_epoch(9)));
  fs::permissions(path, fs::perms::none);
  EXPECT_FALSE(membership_store::open(path, "demo"));
  EXPECT_FALSE(fs::exists(path + ".bad"));
}

TEST_F(state_file, that_cannot_be_read_for_want_of_descriptors_is_left_and_the_start_fails) {
  const auto text = to_text(with_epoch(9));
  put(text);
  const int lowest = ::dup(STDIN_FILENO);
  ASSERT_GE(lowest, 0);
  ::close(lowest);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit one_more{static_cast<rlim_t>(lowest) + 1, before.rlim_max};  // only for the lock
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &one_more), 0);
  const auto store = membership_store::open(path, "demo");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_THAT(store, fails_with(errc::overloaded, HasSubstr("it is left as it is")));
  EXPECT_EQ(text_of(path), text);
  EXPECT_FALSE(fs::exists(path + ".bad"));
  EXPECT_EQ(open()->found(), with_epoch(9));
}

TEST_F(state_file, whose_folder_is_missing_or_no_folder_is_named) {
  put("a file");
  for (const auto& where : {folder + "/missing/demo.state", path + "/demo.state", folder}) {
    const auto store = membership_store::open(where, "demo");
    ASSERT_THAT(store, fails_with(errc::invalid_config, HasSubstr(where))) << where;
    EXPECT_THAT(store.error().message, HasSubstr("supervisor.state_file"));
  }
}

TEST_F(state_file, behind_a_symbolic_link_is_written_where_the_link_points) {
  fs::create_directory(folder + "/real");
  fs::create_symlink(folder + "/real/demo.state", path);
  open()->save(with_epoch(3));
  EXPECT_TRUE(fs::is_symlink(path));
  EXPECT_TRUE(parse_record(text_of(folder + "/real/demo.state")));
}

TEST_F(state_file, that_cannot_be_written_for_a_while_is_written_when_it_can_be_again) {
  const auto store = open();
  fs::create_directory(path + ".tmp");  // blocks the next write
  store->save(with_epoch(5));
  std::this_thread::sleep_for(200ms);
  fs::remove(path + ".tmp");
  const auto written = [&] {
    const auto read = parse_record(text_of(path));
    return read && *read == with_epoch(5);
  };
  EXPECT_TRUE(troupe::testing::comes_true(written, 20ms));
}

TEST_F(state_file, of_a_writer_that_is_killed_at_any_moment_is_whole) {
  std::uint64_t newest = 0;
  for (int round = 0; round < 10; ++round) {
    const auto child = ::fork();
    if (child == 0) {
      auto store = membership_store::open(path, "demo");
      if (!store) ::_exit(1);
      const auto from = (*store)->found() ? (*store)->found()->epoch_limit : 0;
      for (std::uint64_t i = 1;; ++i) {
        (*store)->save(with_epoch(from + i));
        std::this_thread::sleep_for(100us);
      }
    }
    std::this_thread::sleep_for(10ms + round * 7ms);
    ::kill(child, SIGKILL);
    (void)::waitpid(child, nullptr, 0);
    if (!fs::exists(path)) continue;
    const auto read = parse_record(text_of(path));
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_GE(read->epoch_limit, newest);
    newest = read->epoch_limit;
  }
  EXPECT_GT(newest, 0u);
  EXPECT_TRUE(open()) << "the lock goes with the process";
}

// -- which file

struct automatic_state_file : state_file {
  automatic_state_file() {
    ::unsetenv("STATE_DIRECTORY");
    ::unsetenv("XDG_STATE_HOME");
    ::setenv("HOME", (folder + "/home").c_str(), 1);
    value.cluster = "demo";
    value.supervisor.port = 7400;
  }
  [[nodiscard]] std::string place() const {
    auto store = open_membership_store(value);
    EXPECT_TRUE(store) << store.error().message;
    return !store ? "error" : *store ? (*store)->path() : "none";
  }
  config::deployment value;
};

TEST_F(automatic_state_file, stands_in_the_folder_of_the_service_or_of_the_user) {
  const auto& root = folder;
  EXPECT_EQ(place(), root + "/home/.local/state/troupe/demo-7400.state");
  ::setenv("XDG_STATE_HOME", (folder + "/xdg").c_str(), 1);
  EXPECT_EQ(place(), root + "/xdg/troupe/demo-7400.state");
  ::setenv("STATE_DIRECTORY", (folder + "/svc:" + folder + "/other").c_str(), 1);
  EXPECT_EQ(place(), root + "/svc/demo-7400.state");
}

TEST_F(automatic_state_file, is_left_out_where_the_port_is_any_or_no_folder_can_be_made) {
  value.supervisor.port = 0;
  EXPECT_EQ(place(), "none");
  value.supervisor.port = 7400;
  ::setenv("HOME", "/proc/no-such-home", 1);
  EXPECT_EQ(place(), "none");
  ::unsetenv("HOME");
  EXPECT_EQ(place(), "none");
  value.supervisor.state_file = "none";
  EXPECT_EQ(place(), "none");
}

TEST_F(automatic_state_file, is_one_per_supervisor_as_a_named_one_is) {
  const auto first = open_membership_store(value);
  ASSERT_TRUE(first);
  const auto second = open_membership_store(value);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, errc::already_exists);
  value.supervisor.state_file = "/proc/no/such.state";
  const auto named = open_membership_store(value);
  ASSERT_FALSE(named) << "a path that is named must be writable";
  EXPECT_EQ(named.error().code, errc::invalid_config);
}

}  // namespace
}  // namespace troupe::actors
