// Every start with one failing allocation or system call: it ends with a sentence, or serves and
// ends on an order; no signal ends it, and nothing hangs.
//
// A first run counts the calls. Then some of them fail, one per run: as many as fit into a build of
// every commit; the seed selects them. By hand: TROUPE_FAIL_EVERY=50 takes every 50th call, 1 all
// of them. TROUPE_FAIL_AT=1234 takes one; with TROUPE_CALL_TRACE=1 its backtrace is written, and
// with TROUPE_FAIL_TO=1299 all calls from the one to the other fail in turn.

#include "failing_calls.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include <fcntl.h>
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
  /// Minimum number of runs for one start.
  static constexpr std::uint64_t few = 4;

  start_with_a_failing_call() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

  /// With the files that a supervisor writes by default: a secret and its state.
  static std::string text() {
    return "cluster: failing\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(free_port()) +
           "}\nmodel: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
           "stages:\n  - {name: cache, role: store, pool: {size: 1MiB}}\n";
  }

  /// Runs with that call failing, or none if 0. Returns the number of calls that were made.
  std::uint64_t run_with(std::uint64_t failing) {
    const auto& [of, kind] = GetParam();
    const auto index = static_cast<std::size_t>(kind);
    const auto complaints = complaints_so_far();
    const shared_counts counts;
    counts->failing[index] = failing;
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
      const bool began = expect_orderly_end(process, of.serving);
      EXPECT_TRUE(began || failing != 0) << process.out() << process.err();
      EXPECT_TRUE(comes_true(has_no_children)) << "it left processes behind";
      if (complaints_so_far() != complaints) {
        std::cerr << "failed: " << counts->failed.data() << " in process " << counts->failed_in
                  << "; again: TROUPE_FAIL_AT=" << failing << "\n";
      }
    }
    return counts->made[index];
  }

  static int complaints_so_far() {
    return ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
  }

  /// Orphans of the command are inherited by this process.
  static bool has_no_children() {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    return errno == ECHILD;
  }

  /// The calls to fail, out of `all`.
  static std::vector<std::uint64_t> chosen(std::uint64_t all) {
    std::vector<std::uint64_t> some;
    if (const auto first = number_from_environment("TROUPE_FAIL_AT", 0); first != 0) {
      some.resize(std::max(number_from_environment("TROUPE_FAIL_TO", first), first) + 1 - first);
      std::iota(some.begin(), some.end(), first);
      return some;
    }
    const auto step =
        std::max<std::uint64_t>(number_from_environment("TROUPE_FAIL_EVERY", all / few), 1);
    std::mt19937_64 chance{seed()};
    for (std::uint64_t begin = 1; begin <= all; begin += step)
      some.push_back(std::min(begin + chance() % step, all));
    return some;
  }
};

TEST_P(start_with_a_failing_call, ends_with_a_sentence_or_when_it_is_told_to) {
  const auto all = run_with(0);
  ASSERT_GT(all, 0U) << "nothing was counted";
  std::cout << all << " calls, TROUPE_SEED=" << seed() << std::endl;
  for (const auto failing : chosen(all)) {
    SCOPED_TRACE("call " + std::to_string(failing));
    (void)run_with(failing);
  }
}

INSTANTIATE_TEST_SUITE_P(every, start_with_a_failing_call,
                         ::testing::Combine(::testing::ValuesIn(starts),
                                            ::testing::ValuesIn(call_kinds)),
                         [](const auto& tested) {
                           return std::string{std::get<0>(tested.param).name} + "_" +
                                  name_of(std::get<1>(tested.param));
                         });

}  // namespace
