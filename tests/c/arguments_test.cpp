/// What the C ABI refuses, by name: null, wrong sizes, numbers out of range, contradictions.

#include <cstring>
#include <thread>

#include <gmock/gmock.h>

#include "c_fixture.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

/// Nobody listens there; engines start all the same.
constexpr std::uint16_t nobody = 9;

troupe_engine_options good_options(const std::string& text) {
  troupe_engine_options options{};
  options.size = sizeof options;
  options.deployment_text = text.c_str();
  options.node = "prefill-0";
  return options;
}

TEST(c_arguments, every_null_is_named) {
  EXPECT_REFUSED(troupe_engine_start(nullptr, nullptr), TROUPE_INVALID_CONFIG, "`engine` is NULL");
  troupe_engine* engine = nullptr;
  EXPECT_REFUSED(troupe_engine_start(nullptr, &engine), TROUPE_INVALID_CONFIG, "`options` is NULL");
  EXPECT_REFUSED(troupe_engine_stop(nullptr), TROUPE_INVALID_CONFIG, "`engine` is NULL");
  EXPECT_REFUSED(troupe_layout_check(nullptr), TROUPE_INVALID_CONFIG, "`layout` is NULL");
  EXPECT_REFUSED(troupe_cluster_members(nullptr, nullptr), TROUPE_INVALID_CONFIG,
                 "`cluster` is NULL");
  EXPECT_REFUSED(troupe_placement_read(nullptr, nullptr), TROUPE_INVALID_CONFIG,
                 "`placement` is NULL");
  EXPECT_REFUSED(troupe_stop_request(nullptr), TROUPE_INVALID_CONFIG, "`stop` is NULL");

  const own_engine node{nobody, "prefill-0"};
  ASSERT_NE(node.get(), nullptr);
  troupe_operation operation = 0;
  EXPECT_REFUSED(troupe_engine_send(node.get(), nullptr, &operation), TROUPE_INVALID_CONFIG,
                 "`spec` is NULL");
  troupe_send_spec send{};
  send.size = sizeof send;
  EXPECT_REFUSED(troupe_engine_send(node.get(), &send, nullptr), TROUPE_INVALID_CONFIG,
                 "`operation` is NULL");
  EXPECT_REFUSED(troupe_engine_send(node.get(), &send, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.request` is NULL");
  send.request = "";
  EXPECT_REFUSED(troupe_engine_send(node.get(), &send, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.request` is empty");
  send.request = "r";
  send.block_count = 1;
  EXPECT_REFUSED(troupe_engine_send(node.get(), &send, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.blocks` is NULL");
  send.block_count = 0;
  send.held_for_count = 1;
  EXPECT_REFUSED(troupe_engine_send(node.get(), &send, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.held_for` is NULL");
  const char* const nobody_named[] = {nullptr};
  send.held_for = nobody_named;
  EXPECT_REFUSED(troupe_engine_send(node.get(), &send, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.held_for[0]` is NULL");
  EXPECT_REFUSED(troupe_engine_seal(node.get(), 1, 1, nullptr, 5), TROUPE_INVALID_CONFIG,
                 "`aux` is NULL");
  EXPECT_REFUSED(troupe_engine_put(node.get(), nullptr, "key", "v", 1, 0, &operation),
                 TROUPE_INVALID_CONFIG, "`peer` is NULL");
  EXPECT_REFUSED(troupe_engine_get(node.get(), "prefill-0", nullptr, &operation),
                 TROUPE_INVALID_CONFIG, "`key` is NULL");
  EXPECT_REFUSED(troupe_engine_report(node.get(), nullptr), TROUPE_INVALID_CONFIG,
                 "`json` is NULL");
  EXPECT_REFUSED(troupe_engine_event_fd(node.get(), nullptr), TROUPE_INVALID_CONFIG,
                 "`fd` is NULL");
  EXPECT_REFUSED(troupe_engine_take(node.get(), nullptr, sizeof(troupe_event), 1, 0, nullptr),
                 TROUPE_INVALID_CONFIG, "`events` is NULL");
  EXPECT_REFUSED(troupe_engine_place(node.get(), nullptr, &operation), TROUPE_INVALID_CONFIG,
                 "`request` is NULL");
  EXPECT_EQ(operation, 0u);
}

TEST(c_arguments, what_is_freed_may_be_null) {
  troupe_engine_free(nullptr);
  troupe_layout_free(nullptr);
  troupe_detail_free(nullptr);
  troupe_events_free(nullptr, sizeof(troupe_event), 3);
  troupe_placement_free(nullptr);
  troupe_cluster_free(nullptr);
  troupe_stop_free(nullptr);
  troupe_carried_free(nullptr);
  troupe_free(nullptr);
  EXPECT_STREQ(troupe_detail_reason(nullptr), "");
  EXPECT_STREQ(troupe_detail_method(nullptr), "");
}

TEST(c_arguments, a_size_that_was_not_set_or_is_none_is_named) {
  troupe_engine* engine = nullptr;
  const auto text = deployment_text(nobody);
  auto options = good_options(text);
  for (const std::uint32_t size : {0u, 8u, 1'000'000u}) {
    options.size = size;
    EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                   "`options.size` is " + std::to_string(size));
  }
  const own_engine node{nobody, "prefill-0"};
  troupe_outcome outcome{};
  EXPECT_REFUSED(troupe_engine_wait(node.get(), 1, 0, &outcome), TROUPE_INVALID_CONFIG,
                 "`outcome.size` is 0");
  troupe_event events[2];
  std::size_t count = 7;
  EXPECT_REFUSED(troupe_engine_take(node.get(), events, 8, 2, 0, &count), TROUPE_INVALID_CONFIG,
                 "`event_size`");
  EXPECT_REFUSED(troupe_engine_take(node.get(), events, sizeof *events, 0, 0, &count),
                 TROUPE_INVALID_CONFIG, "`capacity` is 0");
  EXPECT_EQ(count, 7u);
}

/// A program that was compiled against a later header, with one more field.
struct later_geometry {
  troupe_cache_geometry known;
  std::uint64_t added;
};

TEST(c_arguments, a_later_struct_is_taken_while_what_was_added_is_not_used) {
  later_geometry geometry{};
  geometry.known.size = sizeof geometry;
  geometry.known.dtype = "bf16";
  geometry.known.block_tokens = 4;
  geometry.known.blocks = 8;
  const troupe_layer_shape shape{TROUPE_LAYER_ATTENTION, 2, 8};
  troupe_layout* layout = nullptr;
  ASSERT_DONE(troupe_layout_make(&geometry.known, &shape, 1, nullptr, &layout));

  // What is filled in for it has 0 where this library knows nothing.
  later_geometry seen{};
  seen.known.size = sizeof seen;
  seen.added = 77;
  ASSERT_DONE(troupe_layout_geometry(layout, &seen.known));
  EXPECT_EQ(seen.known.size, sizeof seen);
  EXPECT_EQ(seen.known.blocks, 8u);
  EXPECT_EQ(seen.added, 0u);
  troupe_layout_free(layout);

  geometry.added = 1;
  EXPECT_REFUSED(troupe_layout_make(&geometry.known, &shape, 1, nullptr, &layout),
                 TROUPE_VERSION_MISMATCH,
                 "`geometry` uses what this release of libtroupe does not know");
}

TEST(c_arguments, events_of_a_later_program_stand_at_its_own_distance) {
  const own_engine node{nobody, "prefill-0"};
  troupe_operation operation = 0;
  ASSERT_DONE(troupe_engine_remove(node.get(), "prefill-0", "no such key", &operation));
  struct {
    troupe_event known;
    std::uint64_t added[3];
  } events[2];
  std::memset(static_cast<void*>(events), 0xee, sizeof events);
  std::size_t count = 0;
  ASSERT_DONE(troupe_engine_take(node.get(), &events[0].known, sizeof *events, 2, 10'000, &count));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(events[0].known.operation, operation);
  EXPECT_EQ(events[0].known.kind, static_cast<std::uint32_t>(TROUPE_EVENT_FAILED));
  EXPECT_EQ(events[0].added[2], 0u);
  troupe_events_free(&events[0].known, sizeof *events, count);
  EXPECT_EQ(events[0].known.detail, nullptr);
}

TEST(c_arguments, options_that_contradict_each_other_or_say_nothing_are_refused) {
  troupe_engine* engine = nullptr;
  const auto text = deployment_text(nobody);
  auto options = good_options(text);
  options.deployment_text = nullptr;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                 "neither `options.deployment_file`");
  options = good_options(text);
  options.deployment_file = "/a/file";
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG, "both given");
  options = good_options(text);
  options.node = nullptr;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                 "`options.node` is NULL");
  options = good_options(text);
  options.node = "prefill-7";
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_NOT_FOUND, "prefill-7");
  options = good_options(text);
  options.flags = 1u << 30;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG, "`options.flags`");
  options = good_options(text);
  options.allocate = 9;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                 "`options.allocate` is 9");
  options = good_options(text);
  options.supervisor_port = 70'000;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                 "`options.supervisor_port` is 70000");
  options = good_options(text);
  options.region_count = 1;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                 "`options.regions` is NULL");
  const troupe_memory nothing{nullptr, 4096};
  options.regions = &nothing;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG,
                 "`options.regions[0]` is no memory");
  const std::string wrong = "cluster: x\nstages: 7\n";
  options = good_options(wrong);
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_INVALID_CONFIG, "deployment:2");
  EXPECT_EQ(engine, nullptr);
}

TEST(c_arguments, a_region_that_the_layout_does_not_fit_into_is_refused) {
  const auto layout = small_layout();
  std::vector<unsigned char> memory(64);
  const troupe_memory region{memory.data(), memory.size()};
  const auto text = deployment_text(nobody);
  auto options = good_options(text);
  options.layout = layout.get();
  options.regions = &region;
  options.region_count = 1;
  troupe_engine* engine = nullptr;
  EXPECT_REFUSED(troupe_engine_start(&options, &engine), TROUPE_OUT_OF_RANGE, "64");
  EXPECT_EQ(engine, nullptr);
}

TEST(c_arguments, layouts_that_are_none_name_the_field) {
  troupe_cache_geometry geometry{};
  geometry.size = sizeof geometry;
  geometry.dtype = "mine";
  geometry.block_tokens = 4;
  geometry.blocks = 8;
  troupe_layer_shape shape{TROUPE_LAYER_ATTENTION, 2, 8};
  troupe_layout* layout = nullptr;
  EXPECT_REFUSED(troupe_layout_make(&geometry, &shape, 1, nullptr, &layout), TROUPE_INVALID_CONFIG,
                 "the size of `mine` is not known");
  geometry.dtype = "bf16";
  shape.kind = 9;
  EXPECT_REFUSED(troupe_layout_make(&geometry, &shape, 1, nullptr, &layout), TROUPE_INVALID_CONFIG,
                 "`shape.kind` is 9");
  shape.kind = TROUPE_LAYER_ATTENTION;
  const troupe_arrangement how{7, 0, 0, 0};
  EXPECT_REFUSED(troupe_layout_make(&geometry, &shape, 1, &how, &layout), TROUPE_INVALID_CONFIG,
                 "`how.order` is 7");
  geometry.block_tokens = 5'000;
  EXPECT_REFUSED(troupe_layout_make(&geometry, &shape, 1, nullptr, &layout), TROUPE_INVALID_CONFIG,
                 "block_tokens");
  EXPECT_REFUSED(troupe_layout_decode("nonsense", 8, &layout), TROUPE_INVALID_CONFIG, "malformed");
  EXPECT_EQ(layout, nullptr);

  const auto small = small_layout();
  troupe_layer_shape seen{};
  std::size_t planes = 0;
  EXPECT_REFUSED(troupe_layout_layer(small.get(), 2, &seen, nullptr, 0, &planes),
                 TROUPE_OUT_OF_RANGE, "there is no layer 2");
}

TEST(c_arguments, a_layout_by_hand_is_the_one_that_was_made) {
  const auto made = small_layout();
  troupe_cache_geometry geometry{};
  geometry.size = sizeof geometry;
  ASSERT_DONE(troupe_layout_geometry(made.get(), &geometry));
  EXPECT_STREQ(geometry.dtype, "bf16");
  troupe_layout* raw = nullptr;
  ASSERT_DONE(troupe_layout_new(&geometry, &raw));
  const layout_handle by_hand{raw};
  std::uint32_t layers = 0;
  ASSERT_DONE(troupe_layout_layer_count(made.get(), &layers));
  ASSERT_EQ(layers, 2u);
  for (std::uint32_t i = 0; i < layers; ++i) {
    troupe_layer_shape shape{};
    troupe_plane planes[2];
    std::size_t count = 0;
    ASSERT_DONE(troupe_layout_layer(made.get(), i, &shape, planes, 2, &count));
    ASSERT_DONE(troupe_layout_add_layer(raw, &shape, planes, count));
  }
  ASSERT_DONE(troupe_layout_check(raw));
  ASSERT_DONE(troupe_layout_compatible(raw, made.get()));
  void* bytes[2] = {};
  std::size_t sizes[2] = {};
  ASSERT_DONE(troupe_layout_encode(made.get(), &bytes[0], &sizes[0]));
  ASSERT_DONE(troupe_layout_encode(raw, &bytes[1], &sizes[1]));
  EXPECT_EQ(std::string(static_cast<char*>(bytes[0]), sizes[0]),
            std::string(static_cast<char*>(bytes[1]), sizes[1]));
  troupe_layout* decoded = nullptr;
  ASSERT_DONE(troupe_layout_decode(bytes[0], sizes[0], &decoded));
  troupe_layout_free(decoded);
  troupe_free(bytes[0]);
  troupe_free(bytes[1]);
  const std::uint64_t too_small = 16;
  EXPECT_REFUSED(troupe_layout_validate(raw, &too_small, 1), TROUPE_OUT_OF_RANGE, "");
}

TEST(c_arguments, the_sentence_is_that_of_the_calling_thread) {
  EXPECT_REFUSED(troupe_layout_check(nullptr), TROUPE_INVALID_CONFIG, "`layout` is NULL");
  std::thread{[] {
    EXPECT_STREQ(troupe_last_error(), "");
    EXPECT_REFUSED(troupe_engine_stop(nullptr), TROUPE_INVALID_CONFIG, "`engine` is NULL");
  }}.join();
  EXPECT_THAT(troupe_last_error(), HasSubstr("`layout` is NULL"));
}

TEST(c_arguments, codes_have_the_names_of_the_logs) {
  EXPECT_STREQ(troupe_status_name(TROUPE_OK), "ok");
  EXPECT_STREQ(troupe_status_name(TROUPE_PEER_LOST), "peer_lost");
  EXPECT_STREQ(troupe_status_name(TROUPE_INTERNAL), "internal");
  EXPECT_STREQ(troupe_status_name(TROUPE_TIMED_OUT), "timed_out");
  for (const troupe_status none : {-1, 22, 99, 101, 274})
    EXPECT_STREQ(troupe_status_name(none), "unknown");
  EXPECT_NE(troupe_protocol_version(), 0u);
  EXPECT_THAT(troupe_version(), HasSubstr("."));
}

TEST(c_arguments, a_log_level_that_is_none_changes_nothing) {
  troupe_log_options options{};
  options.size = sizeof options;
  options.level = "loud";
  EXPECT_REFUSED(troupe_log(&options), TROUPE_INVALID_CONFIG, "loud");
  options.level = "warn";
  EXPECT_EQ(troupe_log(&options), TROUPE_OK) << troupe_last_error();
}

}  // namespace

}  // namespace troupe::testing
