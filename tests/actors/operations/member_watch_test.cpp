// The events of an engine that watches the other members: each life once there and once gone, in
// whatever order the lists come and whenever the engine takes events.

#include "troupe/actors/operations/member_watch.hpp"

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "seed.hpp"
#include "watch_judge.hpp"

namespace troupe::actors {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::watch_judge;

using enum node_state;

member shows(const std::string& name, std::uint64_t life, node_state state = up,
             std::string reason = {}) {
  member m;
  m.node.name = name;
  m.node.stage = "engines";
  m.node.incarnation = life;
  m.state = static_cast<std::uint8_t>(state);
  m.reason = std::move(reason);
  return m;
}

class watching : public ::testing::Test {
 protected:
  member_watch watch{"self"};
  watch_judge judge;

  void see(std::vector<member> members, std::uint64_t supervisor = 1) {
    watch.see({"demo", supervisor, ++epoch_, std::move(members), 0});
  }
  /// A list of a supervisor that has just begun.
  void see_collecting(std::vector<member> members, std::uint64_t supervisor) {
    watch.see({"demo", supervisor, ++epoch_, std::move(members), 1});
  }
  event_member next() {
    auto e = watch.pop();
    EXPECT_EQ(judge.hear(e), "");
    return e;
  }
  /// All queued events, as "a/1 up".
  std::vector<std::string> told() {
    std::vector<std::string> all;
    while (watch.size() != 0) {
      const auto e = next();
      all.push_back(e.node + "/" + std::to_string(e.incarnation) + " " +
                    std::string{to_string(e.state)});
    }
    return all;
  }

 private:
  std::uint64_t epoch_{0};
};

TEST_F(watching, who_is_there_is_told_in_the_order_of_the_list_and_the_engine_itself_is_not) {
  see({shows("c", 3), shows("self", 9), shows("a", 1, joining), shows("b", 2, leaving)});
  EXPECT_EQ(watch.size(), 3u);
  EXPECT_THAT(told(), ElementsAre("c/3 up", "a/1 joining", "b/2 leaving"));
}

TEST_F(watching, an_event_says_who_it_is_and_what_it_announced) {
  auto one = shows("engines.a.1", 7, suspect, "not heard for 3000 ms");
  one.node.replica = 4;
  one.node.rank = 1;
  one.node.labels = {{"http", "here"}};
  see({one});
  const auto there = next();
  see({shows("engines.a.1", 7, down, "connection lost: closed")});
  const auto gone = next();
  for (const auto* e : {&there, &gone}) {
    EXPECT_EQ(e->node, "engines.a.1");
    EXPECT_EQ(e->stage, "engines");
    EXPECT_EQ(e->replica, 4u);
    EXPECT_EQ(e->rank, 1u);
    EXPECT_EQ(e->incarnation, 7u);
    EXPECT_EQ(e->labels, one.node.labels);
  }
  EXPECT_EQ(there.state, member_state::suspect);
  EXPECT_EQ(there.reason, "not heard for 3000 ms");
  EXPECT_EQ(gone.state, member_state::gone);
  EXPECT_EQ(gone.reason, "connection lost: closed");
}

TEST_F(watching, states_are_told_as_they_change_and_loads_are_not) {
  see({shows("a", 1, joining)});
  EXPECT_THAT(told(), ElementsAre("a/1 joining"));
  see({shows("a", 1)});
  EXPECT_THAT(told(), ElementsAre("a/1 up"));
  auto busy = shows("a", 1);
  busy.load.queue_length = 5;
  see({busy});
  EXPECT_THAT(told(), IsEmpty());
  see({shows("a", 1, suspect)});
  see({shows("a", 1)});
  EXPECT_THAT(told(), IsEmpty()) << "it is as it was when the engine looked last";
}

TEST_F(watching, the_end_of_a_life_is_told_once) {
  see({shows("a", 1)});
  EXPECT_THAT(told(), ElementsAre("a/1 up"));
  see({shows("a", 1, leaving)});
  see({shows("a", 1, down, "left")});
  see({shows("a", 1, down, "left")});
  EXPECT_THAT(told(), ElementsAre("a/1 gone"));
  see({shows("a", 1, down, "left")});
  see({});
  EXPECT_THAT(told(), IsEmpty());
}

TEST_F(watching, a_life_is_told_behind_the_end_of_the_one_that_it_replaces) {
  see({shows("a", 1), shows("b", 5)});
  EXPECT_THAT(told(), ElementsAre("a/1 up", "b/5 up"));
  see({shows("a", 2, joining), shows("b", 5, suspect)});
  EXPECT_EQ(watch.size(), 3u);
  const auto end = next();
  EXPECT_EQ(end.incarnation, 1u);
  EXPECT_EQ(end.state, member_state::gone);
  EXPECT_THAT(end.reason, HasSubstr("another life has its name"));
  EXPECT_THAT(told(), ElementsAre("a/2 joining", "b/5 suspect"));
}

TEST_F(watching, lives_that_come_and_go_while_nobody_takes_events_are_not_told) {
  see({shows("a", 1)});
  see({shows("a", 1, down, "killed")});
  EXPECT_EQ(watch.size(), 0u);
  see({shows("a", 2)});
  see({shows("a", 3)});
  EXPECT_THAT(told(), ElementsAre("a/3 up"));
  see({shows("a", 4)});
  see({shows("a", 4, down, "killed")});
  see({shows("a", 5)});
  see({shows("a", 6)});
  EXPECT_THAT(told(), ElementsAre("a/3 gone", "a/6 up"));
}

TEST_F(watching, who_is_down_before_the_engine_watches_is_not_told) {
  see({shows("a", 1, down, "killed")});
  EXPECT_THAT(told(), IsEmpty());
}

TEST_F(watching, a_node_that_reports_a_failure_is_there_and_down) {
  see({shows("a", 1)});
  EXPECT_THAT(told(), ElementsAre("a/1 up"));
  see({shows("a", 1, down, "reports: no memory")});
  EXPECT_THAT(told(), ElementsAre("a/1 down"));
  see({shows("a", 1, joining)});
  EXPECT_THAT(told(), ElementsAre("a/1 joining"));
  see({shows("a", 1, down, "reports: no memory")});
  see({shows("a", 1, down, "connection lost: closed")});
  EXPECT_THAT(told(), ElementsAre("a/1 gone"));
}

TEST_F(watching,
       a_life_that_is_taken_in_again_is_there_once_more_unless_nobody_had_heard_of_its_end) {
  see({shows("a", 1)});
  EXPECT_THAT(told(), ElementsAre("a/1 up"));
  see({shows("a", 1, down, "not heard for 5000 ms")});
  see({shows("a", 1, joining)});
  EXPECT_THAT(told(), ElementsAre("a/1 joining"));
  see({shows("a", 1, down, "not heard for 5000 ms")});
  EXPECT_THAT(told(), ElementsAre("a/1 gone"));
  see({shows("a", 1)});
  EXPECT_THAT(told(), ElementsAre("a/1 up"));
}

TEST_F(watching, whoever_waits_for_longest_is_told_first) {
  see({shows("a", 1), shows("b", 2)});
  EXPECT_THAT(told(), ElementsAre("a/1 up", "b/2 up"));
  see({shows("a", 1), shows("b", 2, suspect)});
  see({shows("a", 1, leaving), shows("b", 2, suspect)});
  see({shows("a", 1, leaving), shows("b", 2, leaving)});
  EXPECT_THAT(told(), ElementsAre("b/2 leaving", "a/1 leaving"));
}

// -- supervisors

TEST_F(watching, whom_a_restarted_supervisor_does_not_show_yet_is_there_until_it_has_collected) {
  see({shows("a", 1), shows("b", 2), shows("c", 3)});
  EXPECT_THAT(told(), ElementsAre("a/1 up", "b/2 up", "c/3 up"));
  see_collecting({}, 2);
  see_collecting({shows("a", 1)}, 2);
  EXPECT_THAT(told(), IsEmpty());
  see_collecting({shows("a", 1), shows("c", 4)}, 2);
  EXPECT_THAT(told(), ElementsAre("c/3 gone", "c/4 up"));
  see({shows("a", 1), shows("c", 4)}, 2);
  EXPECT_THAT(told(), ElementsAre("b/2 gone"));
  see({shows("a", 1), shows("b", 2), shows("c", 4)}, 2);
  EXPECT_THAT(told(), ElementsAre("b/2 up")) << "it could not reach the supervisor for so long";
}

TEST_F(watching, whom_a_record_names_is_waited_for_as_joining_and_gone_if_it_does_not_come_back) {
  see({shows("a", 1), shows("b", 2)});
  EXPECT_THAT(told(), ElementsAre("a/1 up", "b/2 up"));
  see_collecting({shows("a", 1, joining), shows("b", 2, joining)}, 2);
  EXPECT_THAT(told(), ElementsAre("a/1 joining", "b/2 joining"));
  see({shows("a", 1), shows("b", 2, down, "not heard for 5000 ms")}, 2);
  EXPECT_THAT(told(), ElementsAre("a/1 up", "b/2 gone"));
}

TEST_F(watching, whom_its_own_supervisor_has_forgotten_is_gone_also_while_that_collects) {
  see_collecting({shows("a", 1), shows("b", 2)}, 1);
  EXPECT_THAT(told(), ElementsAre("a/1 up", "b/2 up"));
  see_collecting({shows("a", 1)}, 1);
  const auto end = next();
  EXPECT_EQ(end.node, "b");
  EXPECT_THAT(end.reason, HasSubstr("no longer a member"));
  // The same for a supervisor that showed nothing new of the node.
  see_collecting({shows("a", 1)}, 2);
  see_collecting({}, 2);
  EXPECT_THAT(told(), ElementsAre("a/1 gone"));
}

TEST_F(watching, a_record_that_is_older_than_what_is_known_brings_no_replaced_life_back) {
  see({shows("a", 1)});
  see({shows("a", 2)});
  EXPECT_THAT(told(), ElementsAre("a/2 up"));
  see_collecting({shows("a", 1, joining)}, 2);
  EXPECT_THAT(told(), IsEmpty());
  see_collecting({shows("a", 2)}, 2);
  EXPECT_THAT(told(), IsEmpty());
  see_collecting({shows("a", 1, joining)}, 3);
  see({shows("a", 1, down, "not heard for 5000 ms")}, 3);
  EXPECT_THAT(told(), ElementsAre("a/2 gone")) << "it has not come back to that supervisor";
}

TEST_F(watching, a_replaced_life_that_another_supervisor_has_taken_in_is_there) {
  see({shows("a", 1)});
  see({shows("a", 2)});
  EXPECT_THAT(told(), ElementsAre("a/2 up"));
  see_collecting({shows("a", 1)}, 2);
  EXPECT_THAT(told(), ElementsAre("a/2 gone", "a/1 up"));
}

TEST_F(watching, lives_that_no_supervisor_speaks_of_are_bounded) {
  constexpr std::size_t more = 3;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < member_watch::max_unspoken + more; ++i) {
    names.push_back("a" + std::to_string(i));
    see_collecting({shows(names.back(), i + 1)}, i + 1);  // each ends before it has collected
    if (i < member_watch::max_unspoken + 1) {
      EXPECT_EQ(told().size(), 1u);
    }
  }
  // The oldest lives end, since more than `max_unspoken` are not confirmed.
  EXPECT_THAT(told(), ElementsAre("a4097/4098 up", "a0/1 gone", "a4098/4099 up", "a1/2 gone"));
  EXPECT_EQ(judge.there().size(), member_watch::max_unspoken + 1);
}

// -- any order

TEST_F(watching, what_waits_is_two_events_a_name_and_each_life_is_told_in_order_whatever_happens) {
  std::mt19937_64 random{troupe::testing::printed_seed()};
  const auto draw = [&](std::uint64_t below) { return random() % below; };
  constexpr std::size_t count = 12;
  std::vector<member> all;
  std::uint64_t life = 0;
  std::uint64_t supervisor = 1;
  for (std::size_t i = 0; i < count; ++i) all.push_back(shows("n" + std::to_string(i), ++life));
  for (int step = 0; step < 100'000; ++step) {
    auto& one = all[draw(count)];
    switch (draw(4)) {
      case 0: one.node.incarnation = ++life; [[fallthrough]];
      case 1: one.state = static_cast<std::uint8_t>(1 + draw(5)); break;
      case 2: one.reason = draw(2) == 0 ? "reports: it" : "lost"; break;
      case 3:
        if (draw(50) == 0) ++supervisor;
        break;
    }
    if (one.reason.empty()) one.reason = "lost";
    auto shown = all;
    const bool collects = draw(3) == 0;
    if (draw(5) == 0) std::erase_if(shown, [&](const auto&) { return draw(3) == 0; });
    if (collects) {
      see_collecting(shown, supervisor);
    } else {
      see(shown, supervisor);
    }
    ASSERT_LE(watch.size(), 2 * count);
    for (auto takes = draw(10) == 0 ? draw(30) : 0; takes > 0 && watch.size() != 0; --takes) next();
    ASSERT_FALSE(HasFailure()) << "step " << step;
  }
  see(all, supervisor);
  (void)told();
  for (const auto& one : all) {
    const auto known = judge.there().find(one.node.name);
    const bool lost = node_state_from(one.state) == down && !one.reason.starts_with("reports: ");
    ASSERT_EQ(known == judge.there().end(), lost) << one.node.name;
    if (lost) continue;
    EXPECT_EQ(known->second.incarnation, one.node.incarnation);
    EXPECT_EQ(static_cast<int>(known->second.state), static_cast<int>(one.state));
  }
  EXPECT_GT(judge.ended, 1000);
}

}  // namespace
}  // namespace troupe::actors
