#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_error.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"

// What a build without GPUs, and a machine without them, answer; and what errors become.
namespace troupe::transport::xgmi {

using ::testing::HasSubstr;

TEST(gpu_errors, each_fault_has_a_code_and_a_sentence_with_the_gpu_and_the_call) {
  EXPECT_EQ(code_of(gpu_fault::no_device), errc::no_device);
  EXPECT_EQ(code_of(gpu_fault::no_memory), errc::pool_exhausted);
  EXPECT_EQ(code_of(gpu_fault::not_permitted), errc::backend_unavailable);
  EXPECT_EQ(code_of(gpu_fault::bad_handle), errc::peer_lost);
  EXPECT_EQ(code_of(gpu_fault::lost), errc::backend_unavailable);
  EXPECT_EQ(code_of(gpu_fault::invalid), errc::internal);
  const auto said = gpu_error(gpu_fault::lost, "0000:1b:00.0", "hipEventQuery", "illegal address");
  EXPECT_EQ(
      said.message,
      "GPU 0000:1b:00.0: hipEventQuery: illegal address; this process cannot use its GPUs any "
      "more: restart it");
  EXPECT_EQ(gpu_error(gpu_fault::no_memory, "", "hipMalloc", "out of memory").message,
            "GPU: hipMalloc: out of memory");
}

class no_gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (runtime->state().usable) GTEST_SKIP() << "this machine has GPUs";
  }
  /// What is said where nothing was built, and where no GPU is.
  void expect_refused(errc code) const {
    EXPECT_EQ(code, std::string_view{runtime->kind()} == "none" ? errc::backend_unavailable
                                                                : errc::no_device);
  }
  std::unique_ptr<gpu_runtime> runtime{make_gpu_runtime()};
};

TEST_F(no_gpu, every_call_says_why_and_none_fails_in_another_way) {
  EXPECT_FALSE(runtime->state().reason.empty());
  EXPECT_TRUE(runtime->devices().empty());
  int here = 0;
  EXPECT_FALSE(runtime->find(&here));
  EXPECT_FALSE(runtime->reaches(0, 0));
  expect_refused(runtime->allocate(0, 4096).error().code);
  expect_refused(runtime->allocate_pinned(0, 4096).error().code);
  expect_refused(runtime->make_stream(0).error().code);
  expect_refused(runtime->make_event(0).error().code);
  expect_refused(runtime->open_memory(0, {}).error().code);
  expect_refused(runtime->launch({}, {.count = 1}).error().code);
  expect_refused(runtime->copy({}, 0, 0, 1).error().code);
}

TEST_F(no_gpu, an_endpoint_goes_on_without_and_says_so) {
  endpoint_options options;
  options.self = incarnation{1};
  const auto place = endpoint::create(std::move(options)).value();
  EXPECT_TRUE(place->identity().gpus.empty());
  expect_refused(place->allocate_on_gpu(0, 4096, "pool").error().code);
  for (const auto& one : place->backends()) {
    if (one.kind != backend_kind::xgmi) continue;
    EXPECT_FALSE(one.state.usable);
    EXPECT_EQ(one.state.reason, runtime->state().reason);
  }
  const auto opened =
      place->open(backend_kind::xgmi, {.peer = incarnation{2}}, std::shared_ptr<link_sink>{});
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, errc::backend_unavailable);
  auto peer = place->identity();
  peer.gpus = {"0000:0a:00.0"};
  EXPECT_NE(place->choose(peer, std::nullopt)->kind, backend_kind::xgmi);
}

}  // namespace troupe::transport::xgmi
