// Every start with too few resources ends with a sentence, or is told to stop and does so: no
// signal ends it, and nothing hangs.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "command.hpp"
#include "orderly_end.hpp"
#include "starts.hpp"

namespace {

using namespace troupe::testing;

constexpr rlim_t mib = rlim_t{1} << 20U;
/// A user id that no account and no other running test has: root's processes are not limited, and
/// the processes of one user count together.
const auto stranger = static_cast<uid_t>(100'000 + ::getpid());

struct limit {
  const char* name;
  __rlimit_resource what;
  std::vector<rlim_t> tried;  ///< the last one is enough
};

const std::vector<limit> limits{
    {"descriptors",
     RLIMIT_NOFILE,
     {0, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 256}},
    {"addresses",
     RLIMIT_AS,
     {64 * mib, 96 * mib, 128 * mib, 160 * mib, 192 * mib, 256 * mib, 320 * mib, 384 * mib,
      448 * mib, 512 * mib, 768 * mib, 8192 * mib}},
    {"processes", RLIMIT_NPROC, {0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48, 64, 512}},
    {"file_size",
     RLIMIT_FSIZE,
     {0, 1, 100, 4096, 65'536, mib - 1, mib, 2 * mib, 64 * mib, 1024 * mib}},
};

struct tight_case {
  const char* name;
  start of;
  bool keeps{false};  ///< files that a supervisor writes by default: a secret and its state
};

const std::vector<tight_case> starts{
    {"supervisor", start_of_supervisor},
    {"keeping_supervisor", start_of_supervisor, true},
    {"store", start_of_store},
    {"prefill",
     {"prefill", TROUPE_COMMAND, {"node", "FILE", "--name", "prefill-0"}, "not registered"}},
    {"up",
     {"up",
      TROUPE_COMMAND,
      {"up", "FILE", "--only", "supervisor", "--only", "cache"},
      "2 nodes are up"}},
    {"demo", start_of_demo},
    {"embedded", start_embedded},
};

class tight_start : public ::testing::TestWithParam<std::tuple<tight_case, limit>> {
 protected:
  static std::string text(bool keeps) {
    return "cluster: tight\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(free_port()) +
           (keeps ? "}\n" : ", state_file: none}\nsecurity: {mode: none}\n") +
           "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
           "stages:\n  - {name: cache, role: store, pool: {size: 1MiB}}\n"
           "  - {name: prefill, role: prefill, pool: {size: 1MiB}}\n";
  }

  static void give_to_stranger(const std::string& path) {
    if (::geteuid() == 0) {
      ASSERT_EQ(::chown(path.c_str(), stranger, stranger), 0) << path;
    }
  }

  static void restrict_to(const limit& with, rlim_t most) {
    const rlimit wanted{most, most};
    (void)::setrlimit(with.what, &wanted);
    if (with.what == RLIMIT_NPROC && ::geteuid() == 0)
      (void)::setresuid(stranger, stranger, stranger);
  }
};

TEST_P(tight_start, ends_with_a_sentence_or_when_it_is_told_to) {
  const auto& [tight, with] = GetParam();
  const auto& of = tight.of;
  bool began = false;
  for (const auto most : with.tried) {
    SCOPED_TRACE(std::to_string(most));
    const deployment_on_disk file{text(tight.keeps)};
    const scratch_folder state;
    give_to_stranger(file.path());
    give_to_stranger(state.path());
    command process{of.program, of.arguments_for(file.path()), [&with = with, &state, most] {
                      ::setenv("XDG_STATE_HOME", state.path().c_str(), 1);
                      ::setenv("TMPDIR", state.path().c_str(),
                               1);  // where a failing demo keeps its files
                      restrict_to(with, most);
                    }};
    const bool last = most == with.tried.back();
    began = expect_orderly_end(process, of.serving, last ? wait_limit : longest_start);
  }
  EXPECT_TRUE(began) << "the last was to be enough";
}

INSTANTIATE_TEST_SUITE_P(every, tight_start,
                         ::testing::Combine(::testing::ValuesIn(starts),
                                            ::testing::ValuesIn(limits)),
                         [](const auto& tested) {
                           return std::string{std::get<0>(tested.param).name} + "_" +
                                  std::get<1>(tested.param).name;
                         });

}  // namespace
