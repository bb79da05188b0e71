/// Engines that no file names, through the C ABI: they join, transfer, are placed, and are found by
/// their labels.

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "c_fixture.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr std::uint64_t long_enough = 60'000;
/// No supervisor listens at this port; engines start anyway.
constexpr std::uint16_t nobody = 9;
constexpr troupe_label labels_of_a[] = {{"engine", "one"}, {"http", "10.0.0.1:8000"}};

troupe_announcement announced(const char* replica, const troupe_label* labels = nullptr,
                              std::uint32_t label_count = 0) {
  troupe_announcement join{};
  join.size = sizeof join;
  join.stage = "engines";
  join.replica = replica;
  join.labels = labels;
  join.label_count = label_count;
  return join;
}

std::vector<std::uint8_t> bytes_of(const std::uint8_t (&fingerprint)[16]) {
  return std::vector<std::uint8_t>(fingerprint, fingerprint + 16);
}

std::vector<std::uint8_t> fingerprint_of_small_layout() {
  std::uint8_t fingerprint[16] = {};
  EXPECT_EQ(troupe_layout_fingerprint(small_layout().get(), fingerprint), TROUPE_OK)
      << troupe_last_error();
  return bytes_of(fingerprint);
}

/// Two engines that joined, in this process.
class c_open : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(supervisor.port(), 0);
    ASSERT_DONE(troupe_engine_wait_registered(a.get(), long_enough));
    ASSERT_DONE(troupe_engine_wait_registered(b.get(), long_enough));
    const auto text = open_deployment_text(supervisor.port());
    const auto options = cluster_options_of(text);
    ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
  }
  ~c_open() override { troupe_cluster_free(cluster); }

  /// Waits until both engines are up. NULL if the placement was refused.
  troupe_placement* place(const char* id) {
    troupe_placement_request request{};
    request.size = sizeof request;
    request.request = id;
    request.timeout_ms = 30'000;
    troupe_placement* placement = nullptr;
    EXPECT_EQ(troupe_cluster_place(cluster, &request, &placement), TROUPE_OK)
        << troupe_last_error();
    return placement;
  }

  own_supervisor supervisor{open_deployment_text(0)};
  own_engine a{supervisor.port(), announced("a", labels_of_a, 2)};
  own_engine b{supervisor.port(), announced("b")};
  troupe_cluster* cluster{nullptr};
};

TEST_F(c_open, an_engine_that_joined_receives_from_another_that_joined) {
  for (std::size_t i = 0; i < a.memory.size(); ++i)
    a.memory[i] = static_cast<unsigned char>(i * 7 + 1);
  const auto from = send_of("r");
  troupe_operation sending = 0;
  ASSERT_DONE(troupe_engine_send(a.get(), &from, &sending));
  static const char* const sources[] = {"engines.a.0"};
  auto to = receive_of("r", sources);
  to.mode = TROUPE_MODE_READ;
  troupe_operation receiving = 0;
  ASSERT_DONE(troupe_engine_receive(b.get(), &to, &receiving));
  ASSERT_DONE(troupe_engine_layers_ready(a.get(), sending, 0, 2, tokens, nullptr));
  ASSERT_DONE(troupe_engine_seal(a.get(), sending, tokens, nullptr, 0));
  ASSERT_DONE(troupe_engine_wait(b.get(), receiving, long_enough, nullptr));
  ASSERT_DONE(troupe_engine_wait(a.get(), sending, long_enough, nullptr));
  expect_same_cache(a, b);

  EXPECT_REFUSED(troupe_engine_receive(a.get(), &to, &receiving), TROUPE_INVALID_CONFIG,
                 "is this node itself");
}

TEST_F(c_open, a_placement_says_of_its_nodes_what_they_announced) {
  troupe_placement* placement = place("r");
  ASSERT_NE(placement, nullptr);
  troupe_placement_info info{};
  info.size = sizeof info;
  ASSERT_DONE(troupe_placement_read(placement, &info));
  EXPECT_EQ(bytes_of(info.fingerprint), fingerprint_of_small_layout());
  EXPECT_EQ(info.mode, static_cast<std::uint32_t>(TROUPE_MODE_READ));
  std::vector<std::string> names, replicas;
  for (const std::uint32_t side : {TROUPE_PREFILL, TROUPE_DECODE}) {
    troupe_node_info node{};
    node.size = sizeof node;
    ASSERT_DONE(troupe_placement_node(placement, side, 0, &node));
    names.emplace_back(node.name);
    replicas.emplace_back(node.replica_name);
    EXPECT_EQ(bytes_of(node.fingerprint), fingerprint_of_small_layout());
    if (replicas.back() == "b") {
      EXPECT_EQ(node.label_count, 0u);
      continue;
    }
    ASSERT_EQ(node.label_count, 2u);
    EXPECT_STREQ(node.labels[1].key, "http");
    EXPECT_STREQ(node.labels[1].value, "10.0.0.1:8000");
  }
  EXPECT_THAT(names, UnorderedElementsAre("engines.a.0", "engines.b.0"));
  EXPECT_THAT(replicas, UnorderedElementsAre("a", "b"));
  troupe_placement_free(placement);
  ASSERT_DONE(troupe_cluster_finished(cluster, "r"));
}

TEST_F(c_open, a_node_is_found_by_each_of_its_labels) {
  troupe_placement_free(place("r"));  // they are up now
  troupe_members* found = nullptr;
  ASSERT_DONE(troupe_cluster_find_label(cluster, "http", "10.0.0.1:8000", &found));
  std::uint32_t count = 0;
  ASSERT_DONE(troupe_members_count(found, &count));
  ASSERT_EQ(count, 1u);
  troupe_member_info info{};
  info.size = sizeof info;
  ASSERT_DONE(troupe_members_read(found, 0, &info));
  EXPECT_EQ(info.state, static_cast<std::uint32_t>(TROUPE_UP)) << info.reason;
  troupe_node_info node{};
  node.size = sizeof node;
  ASSERT_DONE(troupe_members_node(found, 0, &node));
  EXPECT_STREQ(node.name, "engines.a.0");
  EXPECT_STREQ(node.replica_name, "a");
  troupe_identity identity{};
  identity.size = sizeof identity;
  ASSERT_DONE(troupe_engine_identity(a.get(), &identity));
  EXPECT_EQ(node.incarnation, identity.incarnation);
  EXPECT_EQ(bytes_of(node.fingerprint), fingerprint_of_small_layout());
  ASSERT_EQ(node.label_count, 2u);
  EXPECT_STREQ(node.labels[0].value, "one");
  EXPECT_REFUSED(troupe_members_read(found, 1, &info), TROUPE_OUT_OF_RANGE,
                 "`index` is 1 of 1 members");
  EXPECT_REFUSED(troupe_members_node(found, 1, &node), TROUPE_OUT_OF_RANGE, "`index` is 1");
  EXPECT_REFUSED(troupe_members_count(found, nullptr), TROUPE_INVALID_CONFIG, "`count` is NULL");
  EXPECT_REFUSED(troupe_members_count(nullptr, &count), TROUPE_INVALID_CONFIG, "`members` is NULL");
  troupe_members_free(found);

  ASSERT_DONE(troupe_cluster_find_label(cluster, "http", "10.0.0.1", &found));  // not an exact one
  ASSERT_DONE(troupe_members_count(found, &count));
  EXPECT_EQ(count, 0u);
  troupe_members_free(found);
  EXPECT_REFUSED(troupe_cluster_find_label(cluster, "", "one", &found), TROUPE_INVALID_CONFIG,
                 "`key` is empty");
  EXPECT_REFUSED(troupe_cluster_find_label(cluster, "engine", nullptr, &found),
                 TROUPE_INVALID_CONFIG, "`value` is NULL");
  EXPECT_REFUSED(troupe_cluster_find_label(cluster, "engine", "one", nullptr),
                 TROUPE_INVALID_CONFIG, "`members` is NULL");
}

TEST_F(c_open, structs_of_before_they_grew_are_filled_in_as_far_as_they_went) {
  troupe_placement* placement = place("r");
  ASSERT_NE(placement, nullptr);
  troupe_placement_info info{};
  info.size = offsetof(troupe_placement_info, fingerprint);
  info.fingerprint[15] = 77;  // from memory beyond the struct
  ASSERT_DONE(troupe_placement_read(placement, &info));
  EXPECT_EQ(info.prefill_count, 1u);
  EXPECT_EQ(info.fingerprint[15], 77);
  troupe_node_info node{};
  node.size = offsetof(troupe_node_info, replica_name);
  node.label_count = 77;
  ASSERT_DONE(troupe_placement_node(placement, TROUPE_PREFILL, 0, &node));
  EXPECT_THAT(node.name, HasSubstr("engines."));
  EXPECT_EQ(node.label_count, 77u);
  troupe_placement_free(placement);
}

/// An event of a member, copied.
struct told_member {
  std::string node, stage, reason;
  std::uint64_t incarnation{0};
  std::uint32_t state{0}, replica{0}, rank{0};
  std::map<std::string, std::string> labels;
};

told_member copy_of(const troupe_event& event) {
  EXPECT_EQ(event.kind, static_cast<std::uint32_t>(TROUPE_EVENT_MEMBER));
  EXPECT_EQ(event.operation, 0u);
  EXPECT_EQ(event.code, TROUPE_OK);
  const auto& of = event.u.member;
  told_member told{troupe_detail_node(event.detail),
                   troupe_detail_stage(event.detail),
                   troupe_detail_reason(event.detail),
                   of.incarnation,
                   of.state,
                   of.replica,
                   of.rank,
                   {}};
  const troupe_label* labels = nullptr;
  std::size_t count = 7;
  EXPECT_EQ(troupe_detail_labels(event.detail, &labels, &count), TROUPE_OK) << troupe_last_error();
  EXPECT_EQ(count, of.label_count);
  EXPECT_EQ(labels == nullptr, count == 0);
  for (std::size_t i = 0; i < count; ++i) told.labels[labels[i].key] = labels[i].value;
  return told;
}

/// The member events up to the one that shows that node in that state, which is the last.
std::vector<told_member> told_until(troupe_engine* engine, const std::string& node,
                                    std::uint32_t state) {
  std::vector<told_member> all;
  do {
    troupe_event event{};
    std::size_t count = 0;
    EXPECT_EQ(troupe_engine_take(engine, &event, sizeof event, 1, long_enough, &count), TROUPE_OK)
        << troupe_last_error();
    EXPECT_EQ(count, 1u) << "never told of " << node;
    if (count == 0) return {told_member{}};
    all.push_back(copy_of(event));
    troupe_events_free(&event, sizeof event, 1);
    EXPECT_EQ(event.detail, nullptr);
  } while (all.back().node != node || all.back().state != state);
  return all;
}

TEST_F(c_open, an_engine_that_watches_is_told_of_the_others_life_by_life) {
  const own_engine watching{supervisor.port(), announced("w"), TROUPE_WATCH};
  const auto there = told_until(watching.get(), "engines.a.0", TROUPE_UP).back();
  EXPECT_EQ(there.stage, "engines");
  EXPECT_EQ(there.rank, 0u);
  EXPECT_EQ(there.labels,
            (std::map<std::string, std::string>{{"engine", "one"}, {"http", "10.0.0.1:8000"}}));
  troupe_identity identity{};
  identity.size = sizeof identity;
  ASSERT_DONE(troupe_engine_identity(a.get(), &identity));
  EXPECT_EQ(there.incarnation, identity.incarnation);

  auto c = std::make_unique<own_engine>(supervisor.port(), announced("c"));
  const auto of_c = told_until(watching.get(), "engines.c.0", TROUPE_UP).back();
  EXPECT_TRUE(of_c.labels.empty());
  c.reset();
  const auto end = told_until(watching.get(), "engines.c.0", TROUPE_GONE).back();
  EXPECT_EQ(end.incarnation, of_c.incarnation);
  EXPECT_EQ(end.stage, "engines");
  EXPECT_EQ(end.replica, of_c.replica);
  EXPECT_EQ(end.reason, "left");
  c = std::make_unique<own_engine>(supervisor.port(), announced("c"));
  for (const auto& told : told_until(watching.get(), "engines.c.0", TROUPE_UP)) {
    EXPECT_NE(told.node, "engines.w.0") << "it is told of itself";
    if (told.node == "engines.c.0") {
      EXPECT_NE(told.incarnation, of_c.incarnation);
    }
  }

  ASSERT_DONE(troupe_engine_stop(watching.get()));
  c.reset();
  troupe_event none{};
  std::size_t count = 7;
  ASSERT_DONE(troupe_engine_take(watching.get(), &none, sizeof none, 1, 0, &count));
  EXPECT_EQ(count, 0u);
  ASSERT_DONE(troupe_engine_take(a.get(), &none, sizeof none, 1, 0, &count));
  EXPECT_EQ(count, 0u) << "this one does not watch";
}

TEST(c_open_alone, what_an_event_does_not_have_is_nothing) {
  EXPECT_STREQ(troupe_detail_stage(nullptr), "");
  const troupe_label* labels = nullptr;
  std::size_t count = 0;
  EXPECT_REFUSED(troupe_detail_labels(nullptr, &labels, &count), TROUPE_INVALID_CONFIG,
                 "`detail` is NULL");
}

/// Valid options, except for what the test changes.
struct joining {
  joining() {
    options.size = sizeof options;
    options.deployment_text = text.c_str();
    options.layout = layout.get();
    options.allocate = TROUPE_ALLOCATE;
    options.join = &join;
  }
  joining(const joining&) = delete;
  joining& operator=(const joining&) = delete;

  std::string text{open_deployment_text(nobody)};
  layout_handle layout{small_layout()};
  troupe_announcement join{announced("a")};
  troupe_engine_options options{};
  troupe_engine* engine{nullptr};
};

TEST(c_open_alone, an_engine_is_named_or_joins) {
  joining both;
  both.options.node = "engines.a.0";
  EXPECT_REFUSED(troupe_engine_start(&both.options, &both.engine), TROUPE_INVALID_CONFIG,
                 "are both given");
  joining neither;
  neither.options.join = nullptr;
  EXPECT_REFUSED(troupe_engine_start(&neither.options, &neither.engine), TROUPE_INVALID_CONFIG,
                 "`options.node` is NULL");
  neither.options.node = "";
  EXPECT_REFUSED(troupe_engine_start(&neither.options, &neither.engine), TROUPE_INVALID_CONFIG,
                 "`options.node` is empty");
  joining named_by_nothing;
  named_by_nothing.options.node = "";
  ASSERT_DONE(troupe_engine_start(&named_by_nothing.options, &named_by_nothing.engine));
  troupe_engine_free(named_by_nothing.engine);
}

TEST(c_open_alone, what_is_wrong_with_an_announcement_is_named) {
  const auto refused = [](const joining& with) {
    troupe_engine* engine = nullptr;
    const auto status = troupe_engine_start(&with.options, &engine);
    EXPECT_EQ(engine, nullptr);
    return status;
  };
  joining unsized;
  unsized.join.size = 0;
  EXPECT_REFUSED(refused(unsized), TROUPE_INVALID_CONFIG, "`options.join.size` is 0");
  joining no_stage;
  no_stage.join.stage = nullptr;
  EXPECT_REFUSED(refused(no_stage), TROUPE_INVALID_CONFIG, "`options.join.stage` is NULL");
  joining elsewhere;
  elsewhere.join.stage = "elsewhere";
  EXPECT_REFUSED(refused(elsewhere), TROUPE_NOT_FOUND, "elsewhere");
  joining no_replica;
  no_replica.join.replica = "";
  EXPECT_REFUSED(refused(no_replica), TROUPE_INVALID_CONFIG, "`options.join.replica` is empty");
  joining called_wrongly;
  called_wrongly.join.replica = "a.b";
  EXPECT_REFUSED(refused(called_wrongly), TROUPE_INVALID_CONFIG, "a.b");
  joining behind_the_last;
  behind_the_last.join.rank = 1;
  EXPECT_REFUSED(refused(behind_the_last), TROUPE_INVALID_CONFIG, "rank 1 of 1");
  joining unlike_its_layout;
  unlike_its_layout.join.ranks = 2;
  EXPECT_REFUSED(refused(unlike_its_layout), TROUPE_INVALID_CONFIG, "rank 0 of 2");
}

TEST(c_open_alone, what_is_wrong_with_a_label_is_named) {
  const auto refused = [](const troupe_label* labels, std::uint32_t count) {
    joining with;
    with.join.labels = labels;
    with.join.label_count = count;
    return troupe_engine_start(&with.options, &with.engine);
  };
  EXPECT_REFUSED(refused(nullptr, 1), TROUPE_INVALID_CONFIG, "`options.join.labels` is NULL");
  EXPECT_REFUSED(refused(labels_of_a, 17), TROUPE_INVALID_CONFIG,
                 "`options.join.label_count` is 17");
  const troupe_label no_key[] = {{"k", "v"}, {nullptr, "v"}};
  EXPECT_REFUSED(refused(no_key, 2), TROUPE_INVALID_CONFIG, "`options.join.labels[1].key` is NULL");
  const troupe_label no_value[] = {{"k", nullptr}};
  EXPECT_REFUSED(refused(no_value, 1), TROUPE_INVALID_CONFIG,
                 "`options.join.labels[0].value` is NULL");
  const std::string long_word(257, 'x');
  const troupe_label long_value[] = {{"k", long_word.c_str()}};
  EXPECT_REFUSED(refused(long_value, 1), TROUPE_INVALID_CONFIG, "257");
  const troupe_label twice[] = {{"k", "v"}, {"k", "w"}};
  EXPECT_REFUSED(refused(twice, 2), TROUPE_INVALID_CONFIG, "twice");
}

}  // namespace

}  // namespace troupe::testing
