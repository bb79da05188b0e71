#include <map>
#include <random>

#include <gtest/gtest.h>

#include "troupe/transport/tcp/tcp_batch.hpp"

namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t region_size = std::uint64_t{8} << 20;

struct planner {
  region_table regions{10};
  region_id local = regions.allocate(region_size, "local").value();
  std::byte* base = regions.bytes(local)->data();

  result<std::shared_ptr<batch_in_flight>> plan(std::vector<segment> segments, std::size_t lanes,
                                                std::uint64_t min_stripe = 4096) {
    remote_grant grant;
    grant.id = 5;
    grant.owner = incarnation{2};
    grant.transfer = transfer_id{3};
    grant.rights = access::read_write;
    grant.region_size = region_size;
    grant.permitted = {{0, region_size, 0, 1}};
    batch work;
    work.id = batch_id{1};
    work.transfer = transfer_id{3};
    work.pieces.push_back(
        {local, std::make_shared<const remote_grant>(grant), std::move(segments)});
    return plan_batch(
        std::move(work), 1,
        {.regions = regions, .peer = incarnation{2}, .lanes = lanes, .min_stripe = min_stripe});
  }
};

// remote byte -> local byte, as the jobs would move them.
std::map<std::uint64_t, std::uint64_t> moves_of(const batch_in_flight& plan,
                                                const std::byte* base) {
  std::map<std::uint64_t, std::uint64_t> moves;
  for (const auto& part : plan.parts()) {
    const auto& job = part.job;
    for (std::size_t i = 0; i < job.runs.size(); ++i) {
      const auto& run = job.runs[i];
      for (std::uint32_t r = 0; r < run.count; ++r) {
        for (std::uint64_t b = 0; b < run.length; ++b) {
          const auto local = static_cast<std::uint64_t>(run.at - base) + r * run.stride + b;
          const auto remote = job.remote[i].offset + r * job.remote[i].stride + b;
          EXPECT_TRUE(moves.emplace(remote, local).second) << "byte " << remote << " moves twice";
        }
      }
    }
  }
  return moves;
}

TEST(batch_plan_test, any_division_over_lanes_moves_exactly_the_bytes_of_the_segments) {
  planner p;
  std::mt19937 random{11};
  for (int round = 0; round < 100; ++round) {
    std::vector<segment> segments;
    std::map<std::uint64_t, std::uint64_t> expected;
    std::uint64_t remote = 0;
    for (int i = 0; i < 6; ++i) {
      segment s{random() % 10'000, remote, random() % 3000, 0, 0, 1};
      if (random() % 2 == 0) {
        s.count = 1 + static_cast<std::uint32_t>(random() % 5);
        s.local_stride = s.length + random() % 50;
        s.remote_stride = s.length + random() % 50;
      }
      for (std::uint32_t r = 0; r < s.count; ++r) {
        for (std::uint64_t b = 0; b < s.length; ++b) {
          expected[s.remote_offset + r * s.remote_stride + b] =
              s.local_offset + r * s.local_stride + b;
        }
      }
      remote += s.length + s.count * (s.length + 50);
      segments.push_back(s);
    }
    const auto lanes = 1 + random() % 8;
    const auto plan = p.plan(segments, lanes);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(moves_of(**plan, p.base), expected);
    EXPECT_EQ((*plan)->bytes, total_bytes(segments));
    const auto parts = (*plan)->parts();
    EXPECT_LE(parts.size(), lanes);
    for (const auto& part : parts) EXPECT_EQ(part.job.parts, parts.size());
  }
}

TEST(batch_plan_test, lanes_carry_equal_shares_of_a_large_batch) {
  planner p;
  std::vector<segment> segments;
  for (std::uint64_t i = 0; i < 64; ++i)
    segments.push_back({i * 65'536, i * 65'536, 65'536, 0, 0, 1});
  const auto plan = p.plan(segments, 4);
  ASSERT_TRUE(plan);
  ASSERT_EQ((*plan)->parts().size(), 4U);
  for (const auto& part : (*plan)->parts()) EXPECT_EQ(part.job.bytes, 16 * 65'536U);
}

TEST(batch_plan_test, a_failed_batch_names_what_was_not_acknowledged_besides_what_was_refused) {
  planner p;
  std::vector<segment> segments;
  for (std::uint64_t i = 0; i < 6; ++i) segments.push_back({i << 16, i << 16, 65'536, 0, 0, 1});
  const auto named = [&](auto&& change) {
    const auto plan = p.plan(segments, 4).value();
    const auto parts = plan->parts();
    EXPECT_EQ(parts.size(), 4U);  // each has one and a half segments
    for (auto& part : parts) part.done = true;
    plan->failure = troupe::error{errc::peer_lost, "gone"};
    change(*plan, parts);
    return plan->outcome().bad_segments;
  };
  using list = std::vector<std::uint32_t>;
  EXPECT_EQ(named([](auto& plan, auto) { plan.bad.insert(4); }), (list{4}));
  EXPECT_EQ(named([](auto&, auto parts) { parts[1].done = false; }), (list{1, 2}));
  EXPECT_EQ(named([](auto& plan, auto parts) {
              plan.bad.insert(0);
              parts[2].done = false;
              parts[3].all_bad = true;
            }),
            (list{0, 3, 4, 5}));
  EXPECT_EQ(named([](auto&, auto parts) {
              for (auto& part : parts) part.done = false;
            }),
            (list{0, 1, 2, 3, 4, 5}));
}

TEST(batch_plan_test, a_small_batch_stays_on_one_lane) {
  planner p;
  const auto plan = p.plan({{0, 0, 4096, 0, 0, 1}}, 8, 256 << 10);
  ASSERT_TRUE(plan);
  EXPECT_EQ((*plan)->parts().size(), 1U);
}

TEST(batch_plan_test, a_planned_batch_keeps_its_region_registered) {
  planner p;
  {
    const auto plan = p.plan({{0, 0, 4096, 0, 0, 1}}, 1);
    ASSERT_TRUE(plan);
    EXPECT_FALSE(p.regions.remove(p.local));
  }
  EXPECT_TRUE(p.regions.remove(p.local));
}

}  // namespace

}  // namespace troupe::transport::tcp
