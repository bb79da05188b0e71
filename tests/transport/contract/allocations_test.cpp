#include "allocations.hpp"

#include <fstream>

#include "pair.hpp"

// What must not allocate: posting a prepared batch once a similar one was posted, and the end of a
// region.

namespace troupe::transport::contract {

namespace {

/// Counts the allocations of its thread.
class allocation_count {
 public:
  [[nodiscard]] std::size_t so_far() const { return troupe::testing::allocations.made - before_; }

 private:
  const std::size_t before_{troupe::testing::allocations.made};
};

/// Keeps nothing of what it is told: memory that a sink keeps would count as the sink's.
class counting_sink final : public link_sink {
 public:
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) failed = true;
    ++completed;
  }
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override { failed = true; }
  std::atomic<bool> up{false}, failed{false};
  std::atomic<std::uint64_t> completed{0};
};

}  // namespace

class allocations_test : public ::testing::TestWithParam<backend_kind> {};
INSTANTIATE_TEST_SUITE_P(every, allocations_test,
                         ::testing::Values(backend_kind::tcp, backend_kind::shm),
                         [](const auto& of) { return std::string{to_string(of.param)}; });

TEST_P(allocations_test, posting_64_prepared_segments_again_allocates_nothing) {
  const variant with{GetParam(), 1, 1};
  pair p{with};
  auto sink = std::make_shared<counting_sink>();
  // A second link, whose initiator keeps nothing.
  link_options options{.role = link_role::initiator, .peer = p.b.self};
  options.connect_timeout = longer_than_any_wait;
  const auto wire = p.a.place->open(with.kind, options, sink).value();
  options.role = link_role::acceptor;
  options.peer = p.a.self;
  const auto far = std::make_shared<counting_sink>();
  const auto other = p.b.place->open(with.kind, options, far).value();
  ASSERT_TRUE(other->connect(wire->offer()));
  ASSERT_TRUE(wire->connect(other->offer()));
  ASSERT_TRUE(p.until([&] { return sink->up && far->up; }));
  const auto given = std::make_shared<const remote_grant>(
      other
          ->grant(p.b.region, {{0, pair::region_size, 0, 1}}, access::read_write,
                  grant_scope::for_all_transfers())
          .value());
  std::vector<segment> segments;
  for (std::uint64_t i = 0; i < 64; ++i) segments.push_back({i * 8192, i * 8192, 4096, 0, 0, 1});
  const std::vector<std::byte> frame(100, std::byte{1});
  for (const auto dir : {direction::write, direction::read}) {
    const auto what = wire->prepare(dir, {{p.a.region, given, segments}}).value();
    std::size_t counted = 0;
    const auto start = sink->completed.load();
    for (std::uint64_t i = 1; i <= 400; ++i) {
      const posting how{.id = batch_id{i}, .transfer = transfer_id{i}, .which = {}, .frame = frame};
      const bool posted = [&] {
        const allocation_count count;
        const bool took = wire->post_prepared(*what, how).has_value();
        if (i > 200) counted += count.so_far();
        return took;
      }();
      ASSERT_TRUE(posted);
      // Two in flight at first: while the end of one is reported, its resources may still be in use
      // when the next is posted.
      if (i <= 200 && i % 2 == 1) continue;
      ASSERT_TRUE(p.until([&] { return sink->completed == start + i; }));
    }
    EXPECT_EQ(counted, 0U) << (dir == direction::write ? "writes" : "reads");
    const allocation_count count;
    const std::vector<std::byte> something(100);
    EXPECT_EQ(count.so_far(), 1U);  // the counter itself works
  }
  EXPECT_FALSE(sink->failed);
  wire->close();
  other->close();
}

TEST(removal_of_a_region, is_told_to_the_peer_that_has_it_mapped_without_an_allocation) {
  pair p{{backend_kind::shm, 1, 1}};
  constexpr std::uint64_t size = 1 << 20;
  const auto mapped = [] {
    std::ifstream maps{"/proc/self/maps"};
    int found = 0;
    for (std::string line; std::getline(maps, line);)
      found += line.find("troupe:lent") != std::string::npos ? 1 : 0;
    return found;
  };
  const auto region = p.b.place->allocate(size, "lent").value();
  {
    const auto given = std::make_shared<const remote_grant>(
        p.b.wire->grant(region, {{0, size, 0, 1}}, access::read_write, t1).value());
    EXPECT_FALSE(
        p.run(p.a, p.make_batch(p.a, direction::write, given, {{0, 0, 4096, 0, 0, 1}})).failure);
  }
  EXPECT_TRUE(p.until(
      [&] { return p.b.sink->is_quiescent(t1) || p.b.wire->fence(t1) == fence_state::quiescent; }));
  EXPECT_EQ(mapped(), 2) << "by both ends";
  troupe::testing::allocations.left = 0;
  const auto gone = p.b.place->deregister(region);
  troupe::testing::allocations.left.reset();
  ASSERT_TRUE(gone) << to_string(gone.error());
  EXPECT_TRUE(p.until([&] { return mapped() == 0; }));
}

}  // namespace troupe::transport::contract
