// A supervisor that no operator starts: the notice that announces it, and which process begins one
// if there is none. Processes and locks are real; the command that is run is a double.

#include "troupe/actors/supervisor_begin.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/discovery/supervisor_notice.hpp"
#include "troupe/actors/discovery/supervisor_process.hpp"
#include "troupe/actors/discovery/supervisor_search.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/transport/types.hpp"

#include "fails_with.hpp"
#include "sanitized.hpp"
#include "scratch_folder.hpp"
#include "text_of.hpp"
#include "waiting.hpp"

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using troupe::testing::comes_true;
using troupe::testing::fails_with;
using troupe::testing::slowness;
using troupe::testing::text_of;
using troupe::testing::wait_limit;
namespace fs = std::filesystem;

config::deployment deployment_of(const std::string& supervisor,
                                 const std::string& security = "{mode: none}") {
  auto parsed =
      config::parse("cluster: demo\nsupervisor: " + supervisor + "\nsecurity: " + security +
                        "\nstages:\n  - {name: engines, role: both, open: {}}\n",
                    "test.yaml");
  for (const auto& issue : parsed.issues) ADD_FAILURE() << config::to_string(issue);
  return parsed.value.value_or(config::deployment{});
}

/// A child process that writes the line returned by `body` and then sleeps until it is killed.
class child {
 public:
  explicit child(const std::function<std::string()>& body) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const auto line = body() + "\n";
      [[maybe_unused]] const auto written = ::write(ends[1], line.data(), line.size());
      while (true) ::pause();
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~child() {
    kill();
    if (out_ >= 0) ::close(out_);
  }
  child(const child&) = delete;
  child& operator=(const child&) = delete;

  std::string line() {
    std::string text;
    for (char c = 0; ::read(out_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_{-1};
  int out_{-1};
};

class begun_by_need : public ::testing::Test {
 protected:
  begun_by_need() {
    ::setenv("XDG_STATE_HOME", state.c_str(), 1);
    ::setenv("TROUPE_COMMAND", SUPERVISOR_DOUBLE, 1);
    ::setenv("TROUPE_DOUBLE_LIST", (folder.path() + "/begun").c_str(), 1);
    ::setenv("TROUPE_DOUBLE_GATE", gate.c_str(), 1);
    ::unsetenv("TROUPE_DOUBLE");
  }
  ~begun_by_need() override {
    for (const auto pid : begun()) {
      if (!is_double(pid)) continue;  // it has ended, and its pid may be reused by now
      ::kill(pid, SIGKILL);
      (void)comes_true([pid] { return !runs(pid); });
    }
  }
  void double_does(const std::string& how) { ::setenv("TROUPE_DOUBLE", how.c_str(), 1); }
  void open_gate() const { std::ofstream{gate} << "open"; }
  /// The pids of all doubles that were begun.
  [[nodiscard]] std::vector<pid_t> begun() const {
    std::vector<pid_t> all;
    std::ifstream list{folder.path() + "/begun"};
    for (pid_t pid = 0; list >> pid;) all.push_back(pid);
    return all;
  }
  /// Returns false for a zombie.
  static bool runs(pid_t pid) {
    const auto stat = text_of("/proc/" + std::to_string(pid) + "/stat");
    const auto name_end = stat.rfind(')');
    return name_end != std::string::npos && name_end + 2 < stat.size() && stat[name_end + 2] != 'Z';
  }
  static bool is_double(pid_t pid) {
    std::error_code failed;
    const auto program = fs::read_symlink("/proc/" + std::to_string(pid) + "/exe", failed);
    return !failed && program.filename() == fs::path{SUPERVISOR_DOUBLE}.filename();
  }
  [[nodiscard]] seen_notice look() const {
    auto seen = look_at_notice(cluster, of);
    EXPECT_TRUE(seen) << to_string(seen.error());
    return seen ? std::move(*seen) : seen_notice{};
  }
  [[nodiscard]] std::unique_ptr<supervisor_notice> claim() const {
    auto notice = supervisor_notice::claim(of);
    EXPECT_TRUE(notice) << to_string(notice.error());
    return notice ? std::move(*notice) : nullptr;
  }
  void put(const std::string& text) const {
    std::ofstream{path, std::ios::binary | std::ios::trunc} << text;
  }
  /// Looks for a supervisor, and gives up once one has been begun.
  void look_and_give_up() const {
    std::stop_source over;
    std::jthread gives_up{[&] {
      (void)comes_true([this] { return begun().size() == 1; });
      over.request_stop();
    }};
    const auto found = find_or_begin_supervisor(of, 10min, over.get_token());
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, errc::aborted);
  }

  troupe::testing::scratch_folder folder{"begin"};
  std::string state = folder.path() + "/state";
  std::string cluster = state + "/troupe/demo";
  std::string path = cluster + "/supervisor";
  std::string gate = folder.path() + "/gate";
  config::deployment of = deployment_of("{begin: true, port: 0}");
};

// -- the notice

TEST_F(begun_by_need, a_supervisor_is_found_from_when_it_listens_until_it_ends) {
  EXPECT_EQ(find_supervisor(of).error().code, errc::not_found);
  auto notice = claim();
  ASSERT_TRUE(notice);
  EXPECT_TRUE(look().held);
  EXPECT_FALSE(look().listens) << "it does not listen yet";
  EXPECT_EQ(look().pid, static_cast<std::uint32_t>(::getpid()));
  ASSERT_TRUE(notice->publish("127.0.0.1", 7411, 0xc0ffee));
  const auto found = find_supervisor(of);
  ASSERT_TRUE(found) << to_string(found.error());
  const found_supervisor expected{"127.0.0.1", 7411, static_cast<std::uint32_t>(::getpid()),
                                  0xc0ffee};
  EXPECT_EQ(*found, expected);
  const auto again = find_or_begin_supervisor(of);
  ASSERT_TRUE(again) << to_string(again.error());
  EXPECT_EQ(*again, expected);
  EXPECT_TRUE(begun().empty());
  EXPECT_EQ(fs::status(path).permissions(), fs::perms{0600});
  notice.reset();
  EXPECT_EQ(find_supervisor(of).error().code, errc::not_found);
  EXPECT_THAT(find_supervisor(of).error().message, HasSubstr("supervisor.begin"));
}

TEST_F(begun_by_need, a_second_supervisor_is_refused_and_told_who_is_the_first) {
  const auto first = claim();
  ASSERT_TRUE(first);
  const auto second = supervisor_notice::claim(of);
  ASSERT_THAT(second,
              fails_with(errc::already_exists, HasSubstr("pid " + std::to_string(::getpid()))));
  EXPECT_THAT(second.error().message, HasSubstr(path));
}

TEST_F(begun_by_need, a_supervisor_that_was_killed_is_nobodys_whatever_its_notice_says) {
  child supervisor{[this] {
    auto notice = supervisor_notice::claim(of);
    if (!notice || !(*notice)->publish("127.0.0.1", 7411, 1)) return std::string{"failed"};
    (void)notice->release();  // held until the end of the process
    return std::string{"listens"};
  }};
  ASSERT_EQ(supervisor.line(), "listens");
  const auto found = find_supervisor(of);
  ASSERT_TRUE(found) << to_string(found.error());
  EXPECT_EQ(found->pid, static_cast<std::uint32_t>(supervisor.pid()));
  supervisor.kill();
  EXPECT_FALSE(look().held);
  EXPECT_EQ(find_supervisor(of).error().code, errc::not_found);
  EXPECT_TRUE(claim()) << "the next one takes it over";
}

TEST_F(begun_by_need, whoever_looks_at_once_keeps_nobody_from_becoming_the_supervisor) {
  ASSERT_TRUE(claim());  // creates the file
  std::atomic<bool> over{false};
  std::vector<std::jthread> lookers;
  for (int i = 0; i < 4; ++i) {
    lookers.emplace_back([&] {
      while (!over) (void)look_at_notice(cluster, of);
    });
  }
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(claim());
  over = true;
}

/// Otherwise a supervisor that has just claimed the notice would look like one that has ended.
TEST_F(begun_by_need, what_stands_in_a_notice_that_nobody_holds_is_of_one_that_has_ended) {
  ASSERT_TRUE(claim());
  std::atomic<std::uint64_t> ended{0};
  std::atomic<bool> over{false};
  std::jthread lives{[&] {
    for (std::uint64_t life = 1; life <= 300; ++life) {
      const auto notice = claim();
      if (!notice || !notice->publish("127.0.0.1", 7411, life)) break;
      ended = life;
    }
    over = true;
  }};
  while (!over) {
    const auto seen = look();
    if (seen.held) continue;
    ASSERT_LE(seen.incarnation, ended.load());
  }
}

TEST_F(begun_by_need, a_supervisor_knows_when_nobody_finds_its_notice_any_more) {
  auto notice = claim();
  ASSERT_TRUE(notice && notice->publish("127.0.0.1", 7411, 1));
  EXPECT_FALSE(notice->is_lost());
  fs::rename(cluster, cluster + ".away");
  EXPECT_TRUE(notice->is_lost()) << "its folder is gone";
  fs::rename(cluster + ".away", cluster);
  EXPECT_FALSE(notice->is_lost());
  fs::remove(path);
  EXPECT_TRUE(notice->is_lost()) << "it was removed";
  const auto next = claim();
  ASSERT_TRUE(next);
  EXPECT_TRUE(notice->is_lost()) << "another stands in its place";
  EXPECT_FALSE(next->is_lost());
}

TEST_F(begun_by_need,
       a_supervisor_of_another_machine_or_network_that_shares_the_folder_is_an_error) {
  auto notice = claim();
  ASSERT_TRUE(notice && notice->publish("127.0.0.1", 7411, 1));
  const auto here = transport::host_identity::of_this_process();
  ASSERT_FALSE(here.boot_id.empty());
  EXPECT_THAT(text_of(path), HasSubstr("\"boot_id\":\"" + here.boot_id + "\""));
  EXPECT_THAT(text_of(path),
              HasSubstr("\"network_namespace\":" + std::to_string(here.network_namespace)));
  const std::string where = "{\"host\":\"127.0.0.1\",\"port\":7411,\"pid\":1,\"incarnation\":1,";
  std::vector<std::string> others{where + "\"boot_id\":\"another\"}",
                                  "{\"pid\":1,\"boot_id\":\"b\"}"};
  if (here.network_namespace != 0) others.push_back(where + "\"network_namespace\":1}");
  for (const auto& text : others) {
    put(text);
    for (const auto& why : {find_supervisor(of).error(), find_or_begin_supervisor(of).error(),
                            supervisor_notice::claim(of).error()}) {
      EXPECT_EQ(why.code, errc::invalid_config) << to_string(why);
      EXPECT_THAT(why.message,
                  AllOf(HasSubstr(path), HasSubstr("on another machine"),
                        HasSubstr("in another network namespace"), HasSubstr("XDG_STATE_HOME")));
    }
  }
  EXPECT_TRUE(begun().empty());
  // An unknown machine or network is not an error.
  put(where + "\"boot_id\":\"\",\"network_namespace\":0}");
  EXPECT_TRUE(find_supervisor(of));
  put(others.front());
  notice.reset();
  EXPECT_EQ(find_supervisor(of).error().code, errc::not_found) << "that one has ended";
  EXPECT_TRUE(claim());
}

TEST_F(begun_by_need, a_supervisor_that_ends_for_want_of_nodes_is_found_no_more_and_waited_for) {
  auto notice = claim();
  ASSERT_TRUE(notice && notice->publish("127.0.0.1", 7411, 1));
  EXPECT_FALSE(notice->withdraw([] { return false; })) << "a node came at the last moment";
  EXPECT_TRUE(find_supervisor(of));
  {
    auto another = lock_beginning(cluster);
    ASSERT_TRUE(another && *another);
    EXPECT_FALSE(notice->withdraw([] { return true; })) << "somebody looks just now";
  }
  EXPECT_TRUE(find_supervisor(of));
  EXPECT_TRUE(notice->withdraw([] { return true; }));
  EXPECT_TRUE(look().held) << "it is not over yet";
  EXPECT_FALSE(look().listens);
  auto begins = lock_beginning(cluster);
  ASSERT_TRUE(begins) << to_string(begins.error());
  EXPECT_FALSE(*begins) << "its port may not be free yet";
  notice.reset();
  EXPECT_EQ(fs::file_size(path), 0u);
  EXPECT_EQ(find_supervisor(of).error().code, errc::not_found);
  begins = lock_beginning(cluster);
  EXPECT_TRUE(begins && *begins);
}

TEST_F(begun_by_need, what_stands_in_a_held_notice_is_believed_only_where_it_can_be_so) {
  auto notice = claim();
  ASSERT_TRUE(notice && notice->publish("127.0.0.1", 7411, 1));
  ASSERT_TRUE(look().listens);
  const std::string pid = "\"pid\":1";
  for (const auto& text : {
           std::string{},
           std::string{"{"},
           std::string{"my thesis"},
           std::string{"[1,2,3]"},
           std::string(100'000, '['),
           std::string(1'000'000, 'x'),
           "{\"host\":\"127.0.0.1\",\"port\":7411," + pid + "}",
           "{\"host\":\"127.0.0.1\",\"port\":0," + pid + ",\"incarnation\":1}",
           "{\"host\":\"127.0.0.1\",\"port\":70000," + pid + ",\"incarnation\":1}",
           "{\"host\":\"127.0.0.1\",\"port\":-1," + pid + ",\"incarnation\":1}",
           "{\"host\":\"127.0.0.1\",\"port\":\"7411\"," + pid + ",\"incarnation\":1}",
           "{\"host\":\"10.0.0.1\",\"port\":7411," + pid + ",\"incarnation\":1}",
           "{\"host\":\"0.0.0.0\",\"port\":7411," + pid + ",\"incarnation\":1}",
           "{\"host\":[],\"port\":7411," + pid + ",\"incarnation\":1}",
           std::string{"{\"host\":\"127.0.0.1\",\"port\":7411,\"incarnation\":1}"},
           "{\"host\":\"127.0.0.1\",\"port\":7411," + pid + ",\"incarnation\":1}" +
               std::string(4096, ' '),
       }) {
    put(text);
    EXPECT_TRUE(look().held) << text.substr(0, 100);
    EXPECT_FALSE(look().listens) << text.substr(0, 100);
  }
  const auto silent = find_supervisor(of);
  ASSERT_THAT(silent, fails_with(errc::deadline, HasSubstr("supervisor.log")));
  put("{\"host\":\"127.0.0.1\",\"port\":7411," + pid + ",\"incarnation\":1}\n");
  EXPECT_TRUE(look().listens);
  const auto anywhere = deployment_of("{begin: true, port: 0}",
                                      "{mode: tls, secret: /s, certificate: /c, key: /k, ca: /a}");
  put("{\"host\":\"node-a.example.org\",\"port\":7411," + pid + ",\"incarnation\":1}\n");
  EXPECT_FALSE(look().listens);
  const auto seen = look_at_notice(cluster, anywhere);
  ASSERT_TRUE(seen) << to_string(seen.error());
  EXPECT_TRUE(seen->listens) << "with tls it may be any host";
}

TEST_F(begun_by_need, a_notice_that_nobody_holds_says_nothing_and_is_taken_over) {
  ASSERT_TRUE(claim());
  for (const auto& text : {std::string{"my thesis"}, std::string(1'000'000, 'x'),
                           std::string{"{\"host\":\"127.0.0.1\",\"port\":7411,\"pid\":1,"
                                       "\"incarnation\":1}"}}) {
    put(text);
    EXPECT_EQ(find_supervisor(of).error().code, errc::not_found);
    const auto notice = claim();
    ASSERT_TRUE(notice && notice->publish("127.0.0.1", 7412, 2));
    const auto found = find_supervisor(of);
    ASSERT_TRUE(found) << to_string(found.error());
    EXPECT_EQ(found->port, 7412);
  }
}

TEST_F(begun_by_need, what_is_no_plain_file_of_the_users_own_is_left_as_it_is) {
  ASSERT_TRUE(claim());
  ASSERT_EQ(::unlink(path.c_str()), 0);
  const auto refused = [&] {
    for (const auto& why : {find_supervisor(of).error(), find_or_begin_supervisor(of).error(),
                            supervisor_notice::claim(of).error()}) {
      EXPECT_EQ(why.code, errc::invalid_config) << to_string(why);
      EXPECT_THAT(why.message, AllOf(HasSubstr(path), HasSubstr("not a regular file")));
    }
  };
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  refused();
  EXPECT_TRUE(fs::is_fifo(path));
  fs::remove(path);
  fs::create_directory(path);
  refused();
  EXPECT_TRUE(fs::is_directory(path));
  fs::remove(path);
  std::ofstream{folder.path() + "/thesis"} << "my thesis";
  fs::create_symlink(folder.path() + "/thesis", path);
  refused();
  EXPECT_TRUE(fs::is_symlink(path));
  EXPECT_EQ(fs::file_size(folder.path() + "/thesis"), 9u);
  EXPECT_TRUE(begun().empty());
  if (::geteuid() != 0) return;
  fs::remove(path);
  put("{}");
  ASSERT_EQ(::chown(path.c_str(), 1, 1), 0);
  EXPECT_THAT(find_supervisor(of).error().message, HasSubstr("it belongs to somebody else"));
}

TEST_F(begun_by_need, a_folder_that_others_can_get_into_is_refused_whatever_the_mode_is) {
  ASSERT_TRUE(claim());
  ASSERT_EQ(::chmod(cluster.c_str(), 0755), 0);
  const auto open = find_or_begin_supervisor(of);
  ASSERT_THAT(
      open, fails_with(errc::invalid_config,
                       AllOf(HasSubstr(cluster), HasSubstr("others than its owner can get into it"),
                             Not(HasSubstr("security.secret")))));
  ::setenv("XDG_STATE_HOME", "/proc/no-such", 1);
  EXPECT_THAT(find_supervisor(of).error().message,
              AllOf(HasSubstr("/proc/no-such/troupe/demo"), HasSubstr("set XDG_STATE_HOME")));
  EXPECT_TRUE(begun().empty());
}

TEST_F(begun_by_need, a_lock_that_was_given_up_is_not_kept_by_a_child_that_was_forked_meanwhile) {
  ASSERT_TRUE(claim());
  auto lock = lock_beginning(cluster);
  ASSERT_TRUE(lock && *lock);
  child heir{[] { return std::string{"has a copy"}; }};
  ASSERT_EQ(heir.line(), "has a copy");
  lock->give_up();
  auto again = lock_beginning(cluster);
  ASSERT_TRUE(again) << to_string(again.error());
  EXPECT_TRUE(*again);
}

// -- which process begins one

TEST_F(begun_by_need, where_none_lives_one_is_begun_with_the_deployment_as_it_was_given) {
  const auto found = find_or_begin_supervisor(of, wait_limit);
  ASSERT_TRUE(found) << to_string(found.error());
  ASSERT_EQ(begun().size(), 1u);
  EXPECT_EQ(found->pid, static_cast<std::uint32_t>(begun().front()));
  const auto given = config::load(cluster + "/supervisor.yaml");
  ASSERT_TRUE(given.value) << config::to_string(given.issues);
  EXPECT_EQ(*given.value, of);
  EXPECT_EQ(fs::status(cluster + "/supervisor.yaml").permissions(), fs::perms{0600});
  EXPECT_EQ(fs::status(cluster + "/supervisor.log").permissions(), fs::perms{0600});
  const auto again = find_or_begin_supervisor(of, wait_limit);
  ASSERT_TRUE(again) << to_string(again.error());
  EXPECT_EQ(*again, *found);
  ::kill(begun().front(), SIGKILL);
  ASSERT_TRUE(comes_true([this] { return !look().held; }));
  const auto next = find_or_begin_supervisor(of, wait_limit);
  ASSERT_TRUE(next) << to_string(next.error());
  EXPECT_NE(next->pid, found->pid);
  EXPECT_EQ(begun().size(), 2u);
}

TEST_F(begun_by_need, all_that_look_at_once_find_the_one_that_one_of_them_begins) {
  std::vector<std::unique_ptr<child>> lookers;
  for (int i = 0; i < 8; ++i) {
    lookers.push_back(std::make_unique<child>([this] {
      const auto found = find_or_begin_supervisor(of, wait_limit);
      return found ? std::to_string(found->pid) : to_string(found.error());
    }));
  }
  std::set<std::string> found;
  for (auto& one : lookers) found.insert(one->line());
  ASSERT_EQ(begun().size(), 1u);
  EXPECT_EQ(found, std::set<std::string>{std::to_string(begun().front())});
}

TEST_F(begun_by_need, threads_of_one_process_begin_one_as_well) {
  std::vector<result<found_supervisor>> all(8, fail(errc::internal, "not asked"));
  {
    std::vector<std::jthread> lookers;
    for (auto& one : all)
      lookers.emplace_back([&] { one = find_or_begin_supervisor(of, wait_limit); });
  }
  ASSERT_EQ(begun().size(), 1u);
  for (const auto& one : all) {
    ASSERT_TRUE(one) << to_string(one.error());
    EXPECT_EQ(one->pid, static_cast<std::uint32_t>(begun().front()));
  }
}

TEST_F(begun_by_need, a_command_that_does_not_begin_is_an_error_with_what_it_said) {
  double_does("refuses");
  const auto found = find_or_begin_supervisor(of, wait_limit);
  ASSERT_THAT(found, fails_with(errc::peer_unreachable,
                                AllOf(HasSubstr("exit code 3"), HasSubstr("it does not begin"),
                                      HasSubstr(cluster + "/supervisor.log"))));
  auto lock = lock_beginning(cluster);
  ASSERT_TRUE(lock) << to_string(lock.error());
  EXPECT_TRUE(*lock) << "the next one may try";
}

TEST_F(begun_by_need, a_supervisor_that_ends_before_it_listens_is_noticed_at_once) {
  double_does("dies");
  const auto began = std::chrono::steady_clock::now();
  const auto found = find_or_begin_supervisor(of, 10min);
  ASSERT_FALSE(found);
  EXPECT_LT(std::chrono::steady_clock::now() - began, wait_limit);
  EXPECT_EQ(found.error().code, errc::peer_unreachable);
  EXPECT_THAT(found.error().message,
              AllOf(HasSubstr("ended before it listened"), HasSubstr("the port is taken, say")));
}

TEST_F(begun_by_need, one_that_does_not_come_to_listen_is_waited_for_no_longer_than_the_patience) {
  const auto patience = 1s * slowness;
  std::size_t count = 0;
  for (const auto* how : {"comes to nothing", "is silent"}) {
    double_does(how);
    auto another = of;
    another.cluster += std::to_string(++count);
    const auto found = find_or_begin_supervisor(another, patience);
    ASSERT_THAT(found, fails_with(errc::deadline, HasSubstr("within " + time_text(patience))))
        << how;
    EXPECT_TRUE(comes_true([&] { return begun().size() == count; })) << how << ": it goes on";
  }
}

TEST_F(begun_by_need,
       one_that_takes_longer_than_the_patience_is_left_alone_and_found_by_the_next_look) {
  double_does("takes its time");
  for (int i = 0; i < 3; ++i) {
    const auto found = find_or_begin_supervisor(of, 20ms);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, errc::deadline) << to_string(found.error());
  }
  ASSERT_TRUE(comes_true([this] { return !begun().empty(); }));
  EXPECT_TRUE(runs(begun().front()));
  open_gate();
  const auto found = find_or_begin_supervisor(of, wait_limit);
  ASSERT_TRUE(found) << to_string(found.error());
  const auto all = begun();
  ASSERT_EQ(all.size(), 2u) << "one, before it was detached and then";
  EXPECT_EQ(found->pid, static_cast<std::uint32_t>(all.back()));
}

TEST_F(begun_by_need, what_was_begun_may_fail_where_another_has_come_to_live_meanwhile) {
  double_does("takes its time and refuses");
  auto finds = std::async(std::launch::async,
                          [this] { return find_or_begin_supervisor(of, 10 * wait_limit); });
  ASSERT_TRUE(comes_true([this] { return begun().size() == 1; }));
  const auto another = claim();
  ASSERT_TRUE(another);
  open_gate();
  EXPECT_TRUE(comes_true([this] { return !runs(begun().front()); }));
  ASSERT_TRUE(another->publish("127.0.0.1", 7411, 1));
  const auto found = finds.get();
  ASSERT_TRUE(found) << to_string(found.error());
  EXPECT_EQ(found->port, 7411);
}

TEST_F(begun_by_need, one_that_has_ended_unseen_is_noticed_by_what_it_has_said) {
  double_does("gets no notice");
  const auto found = find_or_begin_supervisor(of, 10 * wait_limit);
  ASSERT_THAT(found,
              fails_with(errc::peer_unreachable, AllOf(HasSubstr("ended before it listened"),
                                                       HasSubstr("there is no notice to be had"))));
}

TEST_F(begun_by_need,
       a_process_whose_children_are_reaped_by_the_kernel_hears_of_a_failure_as_well) {
  struct ignored_children {
    ignored_children() { ::signal(SIGCHLD, SIG_IGN); }
    ~ignored_children() { ::signal(SIGCHLD, SIG_DFL); }
  } ignored;
  double_does("refuses");
  const auto none = find_or_begin_supervisor(of, 10 * wait_limit);
  ASSERT_THAT(none, fails_with(errc::peer_unreachable, HasSubstr("it does not begin")));
  double_does("");
  const auto found = find_or_begin_supervisor(of, wait_limit);
  ASSERT_TRUE(found) << to_string(found.error());
}

TEST_F(begun_by_need, whoever_gives_up_waits_no_longer) {
  double_does("comes to nothing");
  look_and_give_up();
}

TEST_F(begun_by_need, whoever_gives_up_leaves_no_child_behind) {
  double_does("takes its time");
  look_and_give_up();
  ASSERT_EQ(begun().size(), 1u);
  EXPECT_EQ(::waitpid(begun().front(), nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "it has been waited for";
}

TEST_F(begun_by_need, a_log_that_is_no_plain_file_is_left_as_it_is) {
  ASSERT_TRUE(claim());
  const auto log = cluster + "/supervisor.log";
  const auto refused = [&] {
    const auto found = find_or_begin_supervisor(of, wait_limit);
    ASSERT_THAT(found, fails_with(errc::invalid_config,
                                  AllOf(HasSubstr(log), HasSubstr("not a regular file"))));
  };
  ASSERT_EQ(::mkfifo(log.c_str(), 0600), 0);
  refused();
  EXPECT_TRUE(fs::is_fifo(log));
  fs::remove(log);
  fs::create_directory(log);
  refused();
  fs::remove(log);
  std::ofstream{folder.path() + "/thesis"} << "my thesis";
  fs::create_symlink(folder.path() + "/thesis", log);
  refused();
  EXPECT_EQ(text_of(folder.path() + "/thesis"), "my thesis");
  EXPECT_TRUE(begun().empty());
}

TEST_F(begun_by_need, what_was_read_of_the_environment_once_is_all_that_counts) {
  const auto terms = begun_terms_of(of);
  const auto look = look_for_supervisor(of, missing_supervisor::is_begun);
  const auto elsewhere = folder.path() + "/elsewhere";
  ::setenv("XDG_STATE_HOME", elsewhere.c_str(), 1);
  ::setenv("TROUPE_DOUBLE_LIST", elsewhere.c_str(), 1);
  ::setenv("TROUPE_COMMAND", "/no/such/troupe", 1);
  double_does("refuses");
  const auto found = find_or_begin_supervisor(terms, wait_limit);
  ASSERT_TRUE(found) << to_string(found.error());
  ASSERT_EQ(begun().size(), 1u);
  EXPECT_EQ(found->pid, static_cast<std::uint32_t>(begun().front()));
  const auto same = find_supervisor(terms);
  ASSERT_TRUE(same) << to_string(same.error());
  EXPECT_EQ(*same, *found);
  const auto looked = look(wait_limit);
  ASSERT_TRUE(looked) << to_string(looked.error());
  EXPECT_EQ(*looked, *found);
  EXPECT_FALSE(fs::exists(elsewhere));
}

TEST_F(begun_by_need, without_a_command_it_says_where_one_was_looked_for) {
  ::setenv("TROUPE_COMMAND", "/no/such/troupe", 1);
  const auto named = find_or_begin_supervisor(of, wait_limit);
  ASSERT_THAT(named, fails_with(errc::not_found, HasSubstr("TROUPE_COMMAND is /no/such/troupe")));
  ::unsetenv("TROUPE_COMMAND");
  const std::string before = ::getenv("PATH");
  ::setenv("PATH", folder.path().c_str(), 1);
  const auto none = troupe_command(environment_of_this_process());
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message,
              AllOf(HasSubstr("PATH"), HasSubstr("TROUPE_COMMAND"), HasSubstr("/../bin/troupe")));
  const auto there = folder.path() + "/troupe";
  fs::copy_file(SUPERVISOR_DOUBLE, there);
  const auto found = troupe_command(environment_of_this_process());
  ::setenv("PATH", before.c_str(), 1);
  ASSERT_TRUE(found) << to_string(found.error());
  EXPECT_EQ(*found, there);
}

// -- where the supervisor is

TEST_F(begun_by_need, a_supervisor_of_another_host_is_where_the_deployment_says) {
  const std::string tls = "{mode: tls, secret: /s, certificate: /c, key: /k, ca: /a}";
  const auto there = deployment_of("{begin: true, host: 203.0.113.7, port: 7411}", tls);
  for (const auto& found : {find_supervisor(there), find_or_begin_supervisor(there)}) {
    ASSERT_TRUE(found) << to_string(found.error());
    EXPECT_EQ(*found, (found_supervisor{"203.0.113.7", 7411, 0, 0}));
  }
  const auto anywhere = deployment_of("{begin: true, host: 203.0.113.7, port: 0}", tls);
  for (const auto& found : {find_supervisor(anywhere), find_or_begin_supervisor(anywhere)}) {
    ASSERT_THAT(found, fails_with(errc::invalid_config, HasSubstr("supervisor.port is 0")));
  }
  EXPECT_FALSE(fs::exists(state)) << "nothing is made for it";
}

TEST_F(begun_by_need, a_deployment_gets_the_address_that_was_found) {
  const auto plain = deployment_of("{port: 0}");
  const auto same = with_supervisor(plain, missing_supervisor::is_begun);
  ASSERT_TRUE(same) << to_string(same.error());
  EXPECT_EQ(*same, plain);
  EXPECT_FALSE(look_for_supervisor(plain, missing_supervisor::is_begun));
  const auto missing = with_supervisor(of, missing_supervisor::is_an_error);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, errc::not_found);
  EXPECT_TRUE(begun().empty());
  const auto here = with_supervisor(of, missing_supervisor::is_begun);
  ASSERT_TRUE(here) << to_string(here.error());
  auto expected = of;
  expected.supervisor.port = find_supervisor(of).value().port;
  EXPECT_NE(expected.supervisor.port, 0);
  EXPECT_EQ(*here, expected);
}

TEST(supervisor_place, is_looked_for_at_most_once_a_second_and_remembered_in_between) {
  int looks = 0;
  bool lives = true;
  const auto began = std::chrono::steady_clock::now();
  supervisor_place place{{"127.0.0.1", 0, 0, 0},
                         [&](std::chrono::milliseconds) -> result<found_supervisor> {
                           ++looks;
                           if (!lives) return fail(errc::not_found, "none lives");
                           return found_supervisor{"127.0.0.1", 7400, 1, 1};
                         }};
  EXPECT_EQ(place.text(), "127.0.0.1");
  for (int i = 0; i < 100; ++i) EXPECT_EQ(place.now(1s).value().port, 7400);
  EXPECT_LE(looks, 1 + (std::chrono::steady_clock::now() - began) / between_looks);
  EXPECT_EQ(place.text(), "127.0.0.1:7400");
  lives = false;
  std::this_thread::sleep_for(between_looks);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(place.now(1s).error().code, errc::not_found);
  lives = true;
  std::this_thread::sleep_for(between_looks);
  EXPECT_TRUE(place.now(1s));
  supervisor_place fixed{{"::1", 7400, 0, 0}, {}};
  EXPECT_EQ(fixed.now(1s).value().port, 7400);
  EXPECT_EQ(fixed.text(), "[::1]:7400");
}

TEST_F(begun_by_need, a_search_tells_what_it_found_and_ends_when_it_is_told_to) {
  const auto terms = [this] { return std::make_shared<const begun_terms>(begun_terms_of(of)); };
  std::atomic<std::uint32_t> told{0};
  const auto tell = [&](const result<found_supervisor>& found) {
    told = found ? found->pid : std::uint32_t{1};
  };
  {
    supervisor_search search;
    const auto begins = search.begin(terms(), tell);
    ASSERT_TRUE(begins && *begins);
    ASSERT_TRUE(comes_true([&] { return told != 0; }));
    ASSERT_EQ(begun().size(), 1u);
    EXPECT_EQ(told, static_cast<std::uint32_t>(begun().front()));
  }
  ::kill(begun().front(), SIGKILL);
  ASSERT_TRUE(comes_true([this] { return !look().held; }));
  double_does("comes to nothing");
  told = 0;
  supervisor_search search;
  const auto begins = search.begin(terms(), tell);
  ASSERT_TRUE(begins && *begins);
  const auto second = search.begin(terms(), tell);
  ASSERT_TRUE(second) << to_string(second.error());
  EXPECT_FALSE(*second) << "one at a time";
  ASSERT_TRUE(comes_true([this] { return begun().size() == 2; }));
  search.stop();
  EXPECT_EQ(told, 0u) << "nobody is told after that";
  const auto after = search.begin(terms(), tell);
  ASSERT_TRUE(after) << to_string(after.error());
  EXPECT_FALSE(*after);
}

TEST_F(begun_by_need, a_search_tells_again_what_could_not_be_told_for_want_of_memory) {
  const auto notice = claim();
  ASSERT_TRUE(notice && notice->publish("127.0.0.1", 7411, 1));
  const auto terms = std::make_shared<const begun_terms>(begun_terms_of(of));
  std::atomic<int> tries{0};
  std::atomic<std::uint16_t> told{0};
  supervisor_search search;
  const auto begins = search.begin(terms, [&](const result<found_supervisor>& found) {
    if (++tries < 3) throw std::bad_alloc{};
    told = found ? found->port : std::uint16_t{1};
  });
  ASSERT_TRUE(begins && *begins);
  EXPECT_TRUE(comes_true([&] { return told == 7411; }));
  EXPECT_EQ(tries, 3);
  supervisor_search in_vain;
  const auto never =
      in_vain.begin(terms, [](const result<found_supervisor>&) { throw std::bad_alloc{}; });
  ASSERT_TRUE(never && *never);
  in_vain.stop();  // returns although the callback always throws
}

}  // namespace
}  // namespace troupe::actors
