// Every start with one failing allocation or system call: it ends with a sentence, or serves and
// ends on an order; no signal ends it, and nothing hangs.
//
// A first run finds the places of the calls: their stacks, in the command and in each process that
// it starts. Then some of the calls fail, one per run: as many as fit into a build of every commit;
// the seed selects them. By hand: TROUPE_FAIL_EVERY=50 takes every 50th, 1 all of them: an allocation
// from each place, and the first eight system calls. TROUPE_FAIL_AT=1234 takes one place, with
// TROUPE_FAIL_CALL=2 its second call; with TROUPE_CALL_TRACE=1 its backtrace is written.

#include "failing_calls.hpp"

#include <algorithm>
#include <cerrno>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <new>
#include <random>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "command.hpp"
#include "orderly_end.hpp"
#include "seed.hpp"
#include "starts.hpp"

namespace {

using namespace troupe::testing;

/// Counts in a file that the counting processes map.
class shared_counts {
 public:
  shared_counts() {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    void* at = MAP_FAILED;
    if (fd >= 0 && ::ftruncate(fd, sizeof(call_counts)) == 0)
      at = ::mmap(nullptr, sizeof(call_counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) ::close(fd);
    if (at == MAP_FAILED) throw std::system_error{errno, std::generic_category(), path_};
    counts_ = new (at) call_counts;
  }
  ~shared_counts() { ::munmap(counts_, sizeof(call_counts)); }
  shared_counts(const shared_counts&) = delete;
  shared_counts& operator=(const shared_counts&) = delete;

  call_counts* operator->() const { return counts_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  const scratch_folder folder_;
  const std::string path_{folder_.path() + "/counts"};
  call_counts* counts_{nullptr};
};

const std::vector<start> starts{
    start_of_supervisor,
    start_of_store,
    {"up", TROUPE_COMMAND, {"up", "FILE"}, "2 nodes are up"},
    start_of_demo,
    {"check", TROUPE_COMMAND, {"check", "FILE"}, nullptr},
    start_embedded,
};

const char* name_of(call_kind kind) {
  return kind == call_kind::allocation ? "allocation" : "system_call";
}

class start_with_a_failing_call : public ::testing::TestWithParam<std::tuple<start, call_kind>> {
 protected:
  /// Minimum number of runs for the processes of one start: the command itself, and its nodes.
  static constexpr std::uint64_t few = 3;

  struct point {
    std::uint32_t role{0};  ///< 0: the command itself
    std::uint64_t stack{0};
    std::uint32_t call{1};  ///< of those from there
    auto operator<=>(const point&) const = default;
  };

  start_with_a_failing_call() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

  /// With the files that a supervisor writes by default: a secret and its state.
  static std::string text() {
    return "cluster: failing\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(free_port()) +
           "}\nmodel: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
           "stages:\n  - {name: cache, role: store, pool: {size: 1MiB}}\n";
  }

  /// Runs with that call failing, or none if its stack is 0. Returns the calls that can fail.
  std::vector<point> run_with(const point& failing) {
    const auto& [of, kind] = GetParam();
    const auto complaints = complaints_so_far();
    const shared_counts counts;
    counts->kind = kind;
    counts->failing_stack = failing.stack;
    counts->failing_call = failing.call;
    counts->failing_role = failing.role;
    const deployment_on_disk file{text()};
    const scratch_folder state;
    {
      command process{of.program, of.arguments_for(file.path()), [&] {
                        ::setenv("XDG_STATE_HOME", state.path().c_str(), 1);
                        ::setenv("TMPDIR", state.path().c_str(),
                                 1);  // where a failing demo keeps its files
                        ::setenv(call_counts_variable, counts.path().c_str(), 1);
                        ::setenv("LD_PRELOAD", FAILING_CALLS, 1);
                      }};
      // The run that finds the places takes a backtrace of each call: long on a busy machine.
      const bool began =
          expect_orderly_end(process, of.serving, failing.stack == 0 ? wait_limit : longest_start);
      const auto said = process.out() + process.err();
      EXPECT_TRUE(began || failing.stack != 0) << said;
      EXPECT_TRUE(comes_true(has_no_children)) << "it left processes behind";
      expect_named_leftovers(state.path(), said);
      if (of.name == std::string{"demo"} && process.wait() == 0) {
        EXPECT_THAT(said, ::testing::HasSubstr("identical: yes"));
      }
      if (complaints_so_far() != complaints) {
        std::cerr << "failed: " << counts->failed.data() << " in process " << counts->failed_in
                  << " " << counts->failed_role.data()
                  << "; again: TROUPE_FAIL_AT=" << failing.stack
                  << " TROUPE_FAIL_CALL=" << failing.call << "\n";
      }
    }
    reached_ += counts->failed_in != 0 ? 1 : 0;
    return points_in(counts, kind);
  }

  static std::vector<point> points_in(const shared_counts& counts, call_kind kind) {
    // Allocations from one place differ little, but one place starts all processes.
    const std::uint32_t most = kind == call_kind::allocation ? 1 : 8;
    std::vector<point> all;
    for (const auto& place : counts->places) {
      if (place.stack == 0 || place.spared) continue;
      for (std::uint32_t i = 1; i <= std::min(place.calls.load(), most); ++i)
        all.push_back({place.role, place.stack, i});
    }
    std::ranges::sort(all);
    return all;
  }

  /// Folders of the demo that stay must be known to the user. After an exception in a thread of CAF,
  /// which ends a process as a kill does, the next run removes them.
  static void expect_named_leftovers(const std::string& folder, const std::string& said) {
    if (said.find("troupe: internal: a thread ended by an exception") != std::string::npos) return;
    for (const auto& entry : std::filesystem::directory_iterator{folder})
      if (entry.path().filename().string().starts_with("troupe-demo-")) {
        EXPECT_THAT(said, ::testing::HasSubstr(entry.path().filename().string()));
      }
  }

  static int complaints_so_far() {
    return ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
  }

  /// Orphans of the command are inherited by this process.
  static bool has_no_children() {
    pid_t ended = 0;
    while ((ended = ::waitpid(-1, nullptr, WNOHANG)) > 0) {
    }
    return ended < 0 && errno == ECHILD;
  }

  /// The calls to fail, out of `all`.
  static std::vector<point> chosen(const std::vector<point>& all) {
    std::vector<point> some;
    if (const auto stack = number_from_environment("TROUPE_FAIL_AT", 0); stack != 0) {
      const auto call = number_from_environment("TROUPE_FAIL_CALL", 1);
      std::ranges::copy_if(all, std::back_inserter(some), [&](const point& one) {
        return one.stack == stack && one.call == call;
      });
      return some;
    }
    std::mt19937_64 chance{seed()};
    const auto draw = [&](std::span<const point> from) {
      const auto step = std::max<std::uint64_t>(
          number_from_environment("TROUPE_FAIL_EVERY", from.size() / few), 1);
      for (std::size_t begin = 0; begin < from.size(); begin += step)
        some.push_back(from[std::min(begin + chance() % step, from.size() - 1)]);
    };
    const auto own = std::ranges::find_if(all, [](const point& one) { return one.role != 0; });
    draw({all.begin(), own});  // of a command that starts nodes
    draw({own, all.end()});
    return some;
  }

  /// Number of runs in which the call failed. Some stacks appear only when threads take turns as they
  /// did in the first run.
  std::uint64_t reached_{0};
};

TEST_P(start_with_a_failing_call, ends_with_a_sentence_or_when_it_is_told_to) {
  const auto all = run_with({});
  ASSERT_FALSE(all.empty()) << "no call was seen";
  const auto some = chosen(all);
  for (const auto& failing : some) {
    SCOPED_TRACE("call " + std::to_string(failing.call) + " from " + std::to_string(failing.stack));
    (void)run_with(failing);
  }
  EXPECT_TRUE(some.empty() || reached_ > 0) << "none of the calls was met again";
  std::cout << all.size() << " calls that can fail, " << some.size() << " of them chosen, "
            << reached_ << " failed, TROUPE_SEED=" << seed() << std::endl;
}

INSTANTIATE_TEST_SUITE_P(every, start_with_a_failing_call,
                         ::testing::Combine(::testing::ValuesIn(starts),
                                            ::testing::ValuesIn(call_kinds)),
                         [](const auto& tested) {
                           return std::string{std::get<0>(tested.param).name} + "_" +
                                  name_of(std::get<1>(tested.param));
                         });

}  // namespace
