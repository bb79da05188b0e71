// The `rdma` options of a stage's file reach the devices. Runs in the machine of tests/verbs.

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/actors/engine/engine_setup.hpp"
#include "troupe/config/parse.hpp"

#include "sanitized.hpp"

namespace troupe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The description of a node's rdma backend, given the `rdma` section of its stage.
std::string backend_of(const std::string& section) {
  const auto file = config::parse(
      "cluster: c\nstages:\n  - {name: d, role: decode, engine: external, transport: {backend: "
      "rdma, "
      "device: rxe1a, rdma: {" +
          section + "}}}\n",
      "deployment.yaml");
  EXPECT_TRUE(file.value) << to_string(file.issues);
  actors::node_context context{actors::settings_of(*file.value, "d-0").value()};
  context.self.incarnation = 7;
  const auto made = actors::furnish(context, *file.value, {}, {});
  EXPECT_TRUE(made) << (made ? "" : to_string(made.error()));
  for (const auto& backend : context.endpoint->backends()) {
    if (backend.kind == transport::backend_kind::rdma) return backend.state.reason;
  }
  return "no rdma";
}

TEST(rdma_options_of_a_file, reach_the_backend_of_its_node) {
  if (!have_verbs()) GTEST_SKIP() << "needs RDMA devices: tests/run verbs";
  EXPECT_THAT(backend_of(""),
              AllOf(HasSubstr("rxe1a port 1 gid 1"), HasSubstr("grants through memory windows"),
                    HasSubstr("relaxed ordering"), Not(HasSubstr("off"))));
  EXPECT_THAT(backend_of("gid_index: 0"), HasSubstr("rxe1a port 1 gid 0"));
  EXPECT_THAT(backend_of("memory_windows: off"),
              AllOf(HasSubstr("memory_windows: off: a grant opens its whole region"),
                    Not(HasSubstr("relaxed_ordering: off"))));
  EXPECT_THAT(backend_of("relaxed_ordering: off"),
              AllOf(HasSubstr("strict ordering (relaxed_ordering: off)"),
                    HasSubstr("grants through memory windows")));
  EXPECT_THAT(backend_of("max_registration: 64MiB"), HasSubstr("pieces of at most 65536 KiB"));
  EXPECT_THAT(backend_of("max_registration: 0"), Not(HasSubstr("pieces")));
}

}  // namespace
}  // namespace troupe::testing
