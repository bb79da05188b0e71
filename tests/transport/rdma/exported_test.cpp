#include "exported.hpp"

#include <algorithm>
#include <array>

#include "gpu_double.hpp"
#include "open_descriptors.hpp"
#include "two_nodes.hpp"

// How a link treats memory that was exported as a dma-buf. In the machine of tests/verbs, whose
// Soft-RoCE supports no dma-buf, so such memory is registered by its address.
namespace troupe::transport {

namespace {

using contract::end;
using contract::t1;
using testing::open_descriptors;
using namespace std::chrono_literals;

constexpr std::uint64_t size = rdma::exported::size;

/// Two nodes with a link between rxe0a and rxe0b. They are told that only devices can access their
/// memory. (The bytes are in pages of their own, so that the test can read them.)
class rdma_exported : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    make(a, 'a', first_);
    make(b, 'b', second_);
    nodes_.join();
  }
  /// Moves all of b's region, in either direction.
  completion run(direction dir) {
    const auto rights = dir == direction::write ? access::write : access::read;
    auto given = b.wire->grant(b.region, {{0, size, 0, 1}}, rights, t1);
    EXPECT_TRUE(given) << (given ? "" : to_string(given.error()));
    if (!given) return {};
    batch work{.id = batch_id{1}, .transfer = t1, .dir = dir, .pieces = {}, .frame = {}};
    work.pieces.push_back({a.region,
                           std::make_shared<const remote_grant>(std::move(*given)),
                           {{.local_offset = 0, .remote_offset = 0, .length = size}}});
    const auto ok = a.wire->post(std::move(work));
    EXPECT_TRUE(ok) << (ok ? "" : to_string(ok.error()));
    EXPECT_TRUE(nodes_.until([&] { return a.sink->completed() == 1; }));
    return a.sink->outcome_of(1);
  }

  struct pages {
    pages()
        : at{::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)} {}
    ~pages() { ::munmap(at, size); }
    pages(const pages&) = delete;
    pages& operator=(const pages&) = delete;
    void* at;
  };

  // Outlives the nodes.
  rdma::exported exported_;
  pages first_, second_;
  rdma::two_nodes nodes_;
  end& a{nodes_.a};
  end& b{nodes_.b};

 private:
  void make(end& e, char side, const pages& memory) {
    auto options = rdma::two_nodes::options_of(side);
    options.rdma.memory_windows = std::string{GetParam()} == "windows";
    rdma::two_nodes::create(e, std::move(options));
    e.memory = {static_cast<std::byte*>(memory.at), size};
    contract::fill(e.memory, static_cast<std::uint32_t>(side));
    const auto made = e.place->register_memory(e.memory, "gpu", {.dmabuf = exported_.fd});
    ASSERT_TRUE(made) << to_string(made.error());
    e.region = *made;
  }
};

}  // namespace

TEST_P(rdma_exported, memory_is_written) {
  ASSERT_FALSE(std::ranges::equal(a.memory, b.memory));
  const auto done = run(direction::write);
  EXPECT_FALSE(done.failure) << to_string(*done.failure);
  EXPECT_TRUE(std::ranges::equal(a.memory, b.memory));
}

TEST_P(rdma_exported, memory_is_read) {
  ASSERT_FALSE(std::ranges::equal(a.memory, b.memory));
  const auto done = run(direction::read);
  EXPECT_FALSE(done.failure) << to_string(*done.failure);
  EXPECT_TRUE(std::ranges::equal(a.memory, b.memory));
}

/// Not even for a few bytes, which a NIC may otherwise be given inline in the request. The test
/// takes the processor's access to the pages away once they are registered: touching them then ends
/// the process.
TEST_P(rdma_exported, memory_is_not_touched_by_the_processor) {
  ASSERT_FALSE(run(direction::write).failure);
  auto given = b.wire->grant(b.region, {{0, size, 0, 1}}, access::write, contract::t2);
  ASSERT_TRUE(given) << to_string(given.error());
  const auto to = std::make_shared<const remote_grant>(std::move(*given));
  contract::fill(a.memory, 99);
  for (auto* e : {&a, &b}) ASSERT_EQ(::mprotect(e->memory.data(), size, PROT_NONE), 0);
  std::uint64_t id = 1;
  for (const std::uint64_t bytes : {1, 8, 100, 1000, 5000}) {
    batch work{.id = batch_id{++id},
               .transfer = contract::t2,
               .dir = direction::write,
               .pieces = {},
               .frame = {std::byte{'x'}}};
    work.pieces.push_back(
        {a.region, to, {{.local_offset = bytes, .remote_offset = bytes, .length = bytes}}});
    const auto ok = a.wire->post(std::move(work));
    ASSERT_TRUE(ok) << to_string(ok.error());
    ASSERT_TRUE(
        nodes_.until([&] { return a.sink->completed() == id && b.sink->framed() == id - 1; }));
    EXPECT_FALSE(a.sink->outcome_of(id).failure);
  }
  for (auto* e : {&a, &b}) ASSERT_EQ(::mprotect(e->memory.data(), size, PROT_READ | PROT_WRITE), 0);
  for (const std::size_t bytes : {1, 8, 100, 1000, 5000}) {
    EXPECT_TRUE(std::ranges::equal(a.memory.subspan(bytes, bytes), b.memory.subspan(bytes, bytes)))
        << bytes << " bytes";
  }
}

TEST_P(rdma_exported, memory_that_no_way_registers_fails_its_caller_and_nobody_else) {
  const rdma::exported bare;  // the kernel pins none of it by its address
  const auto region = b.place->register_memory(bare.bytes(), "bare", {.dmabuf = bare.fd}).value();
  const auto given = b.wire->grant(region, {{0, size, 0, 1}}, access::write, t1);
  ASSERT_FALSE(given);
  EXPECT_EQ(given.error().code, errc::pool_exhausted) << to_string(given.error());
  EXPECT_NE(given.error().message.find("as a dma-buf:"), std::string::npos);
  EXPECT_NE(given.error().message.find("by its address:"), std::string::npos);
  EXPECT_TRUE(b.place->deregister(region));
  const auto done = run(direction::write);
  EXPECT_FALSE(done.failure) << to_string(*done.failure);
  EXPECT_TRUE(std::ranges::equal(a.memory, b.memory));
}

TEST_P(rdma_exported, memory_of_a_device_is_refused_by_backends_that_copy) {
  for (const auto kind : {backend_kind::tcp, backend_kind::shm}) {
    const auto sink = std::make_shared<contract::recorder>();
    const auto wire =
        a.place->open(kind, {.role = link_role::acceptor, .peer = b.self}, sink).value();
    const auto given = wire->grant(a.region, {{0, size, 0, 1}}, access::write, t1);
    ASSERT_FALSE(given);
    EXPECT_EQ(given.error().code, errc::backend_unavailable) << to_string(given.error());
    wire->close();
  }
}

TEST_P(rdma_exported, memory_is_what_a_gpu_was_asked_for_without_a_word_from_the_engine) {
  const auto site = std::make_shared<xgmi::gpu_site>(std::make_unique<xgmi::gpu_double>());
  auto& gpus = dynamic_cast<xgmi::gpu_double&>(*site->runtime);
  rdma::two_nodes nodes;
  for (const auto side : {'a', 'b'}) {
    auto options = rdma::two_nodes::options_of(side);
    options.self = incarnation{options.self.value + 1000};
    options.rdma.memory_windows = std::string{GetParam()} == "windows";
    options.xgmi.site = site;
    rdma::two_nodes::create(side == 'a' ? nodes.a : nodes.b, std::move(options));
  }
  nodes.join();
  auto& from = nodes.a;
  auto& to = nodes.b;
  // One region that the endpoint allocates, and part of one that the engine has.
  auto* const engines = gpus.allocate(1, size + 8192).value();
  const auto descriptors_before =
      open_descriptors() + 1;  // of the memory that the endpoint asks for
  from.region = from.place->allocate_on_gpu(0, size, "pool").value();
  from.memory = from.place->bytes(from.region).value();
  to.memory = {engines + 4608, size};
  to.region = to.place->register_memory(to.memory, "engine's").value();
  EXPECT_EQ(gpus.exported(), 2 * size);
  EXPECT_EQ(open_descriptors(), descriptors_before + 2) << "one for each region";
  contract::fill(from.memory, 5);

  auto given = to.wire->grant(to.region, {{0, size, 0, 1}}, access::write, t1);
  ASSERT_TRUE(given) << to_string(given.error());
  batch work{.id = batch_id{1}, .transfer = t1, .dir = direction::write, .pieces = {}, .frame = {}};
  work.pieces.push_back({from.region,
                         std::make_shared<const remote_grant>(std::move(*given)),
                         {{.local_offset = 0, .remote_offset = 0, .length = size}}});
  ASSERT_TRUE(from.wire->post(std::move(work)));
  ASSERT_TRUE(nodes.until([&] { return from.sink->completed() == 1; }));
  EXPECT_FALSE(from.sink->outcome_of(1).failure);
  EXPECT_TRUE(std::ranges::equal(from.memory, to.memory));
}

INSTANTIATE_TEST_SUITE_P(over, rdma_exported, ::testing::Values("windows", "keys"),
                         [](const auto& of) { return std::string{of.param}; });

}  // namespace troupe::transport
