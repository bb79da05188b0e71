#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_error.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"

#include "gpu_memory.hpp"

// The answers of a build without GPUs and of a machine without them, and how errors are translated.
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
  /// Expects the errors of a build without GPU support, or of a machine without GPUs.
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
  expect_refused(runtime->export_dmabuf({}, {}).error().code);
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

// -- what NICs are given

TEST(memory_of_a_gpu, is_exported_page_by_page_wherever_a_region_begins) {
  if (!on_real_gpus()) GTEST_SKIP() << "TROUPE_TEST_GPU is not 1";
  const auto& runtime = *site_under_test()->runtime;
  auto& gpus = *site_under_test()->runtime;
  constexpr std::uint64_t size = std::uint64_t{8} << 20;
  auto* const memory = gpus.allocate(0, size).value();
  const auto of = runtime.find(memory).value();
  for (const std::uint64_t offset : {0, 512, 4096, 5000}) {
    const auto made = gpus.export_dmabuf(of, {memory + offset, size - 8192});
    ASSERT_TRUE(made) << to_string(made.error());
    EXPECT_EQ((made->offset ^ reinterpret_cast<std::uintptr_t>(memory + offset)) & 4095, 0U);
    std::ifstream about{"/proc/self/fdinfo/" + std::to_string(made->dmabuf)};
    const std::string lines{std::istreambuf_iterator<char>{about}, {}};
    EXPECT_THAT(lines, HasSubstr("exp_name:")) << "no dma-buf";
    EXPECT_EQ(::close(made->dmabuf), 0);
  }
  gpus.release(0, memory);
}

TEST(memory_of_a_gpu, is_not_exported_where_no_nic_is) {
  const auto site = std::make_shared<gpu_site>(std::make_unique<gpu_double>());
  const auto& gpus = dynamic_cast<const gpu_double&>(*site->runtime);
  endpoint_options options;
  options.self = incarnation{1};
  options.xgmi.site = site;
  const auto place = endpoint::create(std::move(options)).value();
  for (const auto& one : place->backends()) {
    if (one.kind == backend_kind::rdma && one.state.usable) GTEST_SKIP() << "there are NICs";
  }
  EXPECT_TRUE(place->allocate_on_gpu(0, 4096, "pool"));
  EXPECT_EQ(gpus.exported(), 0U);
}

// -- what stores are given

TEST(memory_of_a_gpu, is_copied_for_the_host_and_the_hosts_own_is_not) {
  endpoint_options options;
  options.self = incarnation{1};
  options.xgmi.site = site_under_test();
  const auto& gpus = options.xgmi.site->runtime;
  const auto place = endpoint::create(std::move(options)).value();
  constexpr std::size_t size = 100'000;
  std::vector<std::byte> meant(size);
  for (std::size_t i = 0; i < size; ++i) meant[i] = static_cast<std::byte>(i * 7);
  auto* const memory = gpus->allocate(0, size).value();
  ASSERT_TRUE(gpus->copy_now(memory, meant.data(), size));
  const auto copy = place->copy_of_gpu({memory + 100, size - 100});
  ASSERT_TRUE(copy) << to_string(copy.error());
  ASSERT_TRUE(*copy);
  EXPECT_TRUE(std::equal((*copy)->begin(), (*copy)->end(), meant.begin() + 100, meant.end()));
  EXPECT_EQ(place->copy_of_gpu({memory, std::size_t{1} << 40}).error().code, errc::out_of_range);
  for (const auto bytes : {std::span<const std::byte>{meant}, std::span<const std::byte>{}}) {
    const auto none = place->copy_of_gpu(bytes);
    ASSERT_TRUE(none) << to_string(none.error());
    EXPECT_FALSE(*none);
  }
  gpus->release(0, memory);
}

// -- who can be joined

TEST(reach, is_judged_by_the_gpus_that_hold_what_would_move) {
  const auto site = std::make_shared<gpu_site>(std::make_unique<gpu_double>());
  auto& gpus = dynamic_cast<gpu_double&>(*site->runtime);
  gpus.cut(0, 1);
  endpoint_options options;
  options.self = incarnation{1};
  options.xgmi.site = site;
  const auto place = endpoint::create(std::move(options)).value();
  auto peer = place->identity();
  const auto judged = [&](const char* gpu) {
    peer.gpus = {gpu};
    const auto chosen = place->choose(peer, backend_kind::xgmi, {});
    return chosen ? chosen->reason : chosen.error().message;
  };
  const auto first = place->allocate_on_gpu(0, 4096, "pool").value();
  EXPECT_THAT(judged("0000:0a:00.0"), HasSubstr("the same GPU 0000:0a:00.0"));
  EXPECT_THAT(judged("0000:0b:00.0"),
              HasSubstr("GPU 0000:0a:00.0 does not reach the peer's GPU 0000:0b:00.0"));
  EXPECT_THAT(judged("0000:0c:00.0"), HasSubstr("does not see the peer's GPU 0000:0c:00.0, and"));
  gpus.reach({"0000:0d:00.0"});
  EXPECT_THAT(judged("0000:0c:00.0"), HasSubstr("does not see the peer's GPU 0000:0c:00.0, and"));
  EXPECT_THAT(
      judged("0000:0d:00.0"),
      HasSubstr("GPU 0000:0a:00.0 reaches GPU 0000:0d:00.0, which this process does not see"));
  ASSERT_TRUE(place->deregister(first));
  ASSERT_TRUE(place->allocate_on_gpu(1, 4096, "pool"));
  EXPECT_THAT(judged("0000:0a:00.0"), HasSubstr("GPU 0000:0b:00.0 reaches GPU 0000:0a:00.0"));
}

}  // namespace troupe::transport::xgmi
