/// What the C ABI must refuse, with the right code: null, wrong sizes, numbers out of range,
/// contradictions.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>

#include "c_fixture.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

/// No supervisor listens at this port; engines start anyway.
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
  const std::string too_much(65'537, 'x');
  EXPECT_REFUSED(troupe_engine_seal(node.get(), 1, 1, too_much.data(), too_much.size()),
                 TROUPE_OUT_OF_RANGE, "`aux` has 65537 bytes; at most 65536 can travel");
  EXPECT_REFUSED(troupe_engine_seal(node.get(), 1, 1, "x", SIZE_MAX), TROUPE_OUT_OF_RANGE,
                 "`aux` has 18446744073709551615 bytes");
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
  troupe_members_free(nullptr);
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

  // The library fills fields that it does not know with 0.
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
                 "`geometry` uses fields that this release of libtroupe does not know");
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
                 "`options.regions[0]` is NULL or empty");
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
  auto geometry = geometry_of("mine");
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

/// Bytes that identify a model; more than one of them is 0.
constexpr std::array<std::uint8_t, 32> a_model{0xab, 0, 0xcd};

constexpr troupe_layer_shape attention{TROUPE_LAYER_ATTENTION, 2, 8};
constexpr troupe_layer_shape opaque{TROUPE_LAYER_OPAQUE, 2, 0};

/// The details of an opaque layer.
troupe_layer_details packed(const char* packing) {
  troupe_layer_details details{};
  details.size = sizeof details;
  details.unit = TROUPE_OPAQUE_BLOCK_HEAD;
  details.packing = packing;
  return details;
}

/// The details of a layer whose V is smaller than its K and whose type is its own.
troupe_layer_details own_type() {
  troupe_layer_details details{};
  details.size = sizeof details;
  details.value_dim = 4;
  details.dtype = "fp8";
  return details;
}

/// A layer whose V is smaller than its K, of a type of its own, and a layer with 24 packed bytes
/// per head of a block: two regions.
layout_handle packed_layout(const char* packing, const std::uint8_t* model) {
  auto geometry = geometry_of("bf16");
  geometry.model = model;
  troupe_layout* raw = nullptr;
  EXPECT_EQ(troupe_layout_new(&geometry, &raw), TROUPE_OK) << troupe_last_error();
  layout_handle layout{raw};
  const auto typed = own_type();
  const troupe_plane keys_and_values[] = {{0, 2, 0, 96, 16, 8, 8}, {0, 2, 64, 96, 8, 4, 4}};
  EXPECT_EQ(troupe_layout_add_layer_with(raw, &attention, &typed, keys_and_values, 2), TROUPE_OK)
      << troupe_last_error();
  const auto by_heads = packed(packing);
  const troupe_plane heads_of_blocks{1, 2, 0, 48, 0, 24, 24};
  EXPECT_EQ(troupe_layout_add_layer_with(raw, &opaque, &by_heads, &heads_of_blocks, 1), TROUPE_OK)
      << troupe_last_error();
  return layout;
}

TEST(c_arguments, what_layers_and_the_model_say_comes_back) {
  const auto made = packed_layout("tiles", a_model.data());
  const std::uint64_t sizes[] = {8 * 96, 8 * 48};
  ASSERT_DONE(troupe_layout_validate(made.get(), sizes, 2));
  void* bytes = nullptr;
  std::size_t byte_count = 0;
  ASSERT_DONE(troupe_layout_encode(made.get(), &bytes, &byte_count));
  troupe_layout* raw = nullptr;
  ASSERT_DONE(troupe_layout_decode(bytes, byte_count, &raw));
  troupe_free(bytes);
  const layout_handle decoded{raw};
  for (const auto* layout : {made.get(), decoded.get()}) {
    troupe_layer_shape shape{};
    troupe_layer_details details{};
    details.size = sizeof details;
    troupe_plane planes[2]{};
    std::size_t count = 0;
    ASSERT_DONE(troupe_layout_layer(layout, 0, &shape, planes, 2, &count));
    EXPECT_EQ(count, 2u);
    ASSERT_DONE(troupe_layout_layer_details(layout, 0, &details));
    EXPECT_EQ(details.size, sizeof details);
    EXPECT_EQ(details.value_dim, 4u);
    EXPECT_STREQ(details.dtype, "fp8");
    EXPECT_EQ(details.element_size, 1u) << "what is known of fp8 is filled in";
    EXPECT_EQ(details.unit, 0u);
    EXPECT_STREQ(details.packing, "");
    ASSERT_DONE(troupe_layout_layer(layout, 1, &shape, planes, 2, &count));
    EXPECT_EQ(count, 1u);
    EXPECT_EQ(shape.kind, static_cast<std::uint32_t>(TROUPE_LAYER_OPAQUE));
    EXPECT_EQ(shape.kv_heads, 2u);
    EXPECT_EQ(shape.head_dim, 0u);
    ASSERT_DONE(troupe_layout_layer_details(layout, 1, &details));
    EXPECT_EQ(details.value_dim, 0u);
    EXPECT_STREQ(details.dtype, "");
    EXPECT_EQ(details.element_size, 0u);
    EXPECT_EQ(details.unit, static_cast<std::uint32_t>(TROUPE_OPAQUE_BLOCK_HEAD));
    EXPECT_STREQ(details.packing, "tiles");
    EXPECT_EQ(planes[0].head_bytes, 24u);
    troupe_cache_geometry geometry{};
    geometry.size = sizeof geometry;
    ASSERT_DONE(troupe_layout_geometry(layout, &geometry));
    ASSERT_NE(geometry.model, nullptr);
    EXPECT_EQ(std::memcmp(geometry.model, a_model.data(), a_model.size()), 0);
  }
  // Any token of an opaque block stands for all of it.
  const troupe_cache_place place{1, 0, 6, 1};
  troupe_region_bytes at{};
  ASSERT_DONE(troupe_layout_locate(made.get(), sent_blocks, 3, &place, &at));
  EXPECT_EQ(at.region, 1u);
  EXPECT_EQ(at.offset, 24u);
  EXPECT_EQ(at.length, 24u);
}

TEST(c_arguments, layers_that_are_packed_otherwise_and_other_models_are_named) {
  const auto here = packed_layout("tiles", a_model.data());
  const auto other_packing = packed_layout("planes", a_model.data());
  EXPECT_REFUSED(troupe_layout_compatible(here.get(), other_packing.get()), TROUPE_LAYOUT_MISMATCH,
                 "layer 1 packing is 'tiles' here and 'planes'");
  auto model = a_model;
  model[0] = 0xef;
  const auto other_model = packed_layout("tiles", model.data());
  EXPECT_REFUSED(troupe_layout_compatible(here.get(), other_model.get()), TROUPE_LAYOUT_MISMATCH,
                 "the hash of the model is ab00cd0000000000... here and ef00");
  const std::array<std::uint8_t, 32> zeros{};
  for (const auto* not_said : {static_cast<const std::uint8_t*>(nullptr), zeros.data()}) {
    const auto there = packed_layout("tiles", not_said);
    EXPECT_EQ(troupe_layout_compatible(here.get(), there.get()), TROUPE_OK) << troupe_last_error();
    troupe_cache_geometry geometry{};
    geometry.size = sizeof geometry;
    ASSERT_DONE(troupe_layout_geometry(there.get(), &geometry));
    EXPECT_EQ(geometry.model, nullptr);
  }
}

TEST(c_arguments, a_geometry_of_an_earlier_program_says_no_model) {
  troupe_cache_geometry geometry{};
  geometry.size = offsetof(troupe_cache_geometry, model);
  geometry.dtype = "bf16";
  geometry.block_tokens = 4;
  geometry.blocks = 8;
  geometry.model = a_model.data();  // beyond the end of the struct: not read
  const troupe_layer_shape shape{TROUPE_LAYER_ATTENTION, 2, 8};
  troupe_layout* raw = nullptr;
  ASSERT_DONE(troupe_layout_make(&geometry, &shape, 1, nullptr, &raw));
  const layout_handle layout{raw};
  troupe_cache_geometry seen{};
  seen.size = sizeof seen;
  ASSERT_DONE(troupe_layout_geometry(raw, &seen));
  EXPECT_EQ(seen.model, nullptr);
  const auto with_model = packed_layout("tiles", a_model.data());
  seen.size = offsetof(troupe_cache_geometry, model);
  ASSERT_DONE(troupe_layout_geometry(with_model.get(), &seen));
  EXPECT_EQ(seen.model, nullptr) << "written behind the end of an earlier struct";
  EXPECT_EQ(seen.blocks, 8u);
}

TEST(c_arguments, a_layout_is_made_with_details_of_some_of_its_layers) {
  auto geometry = geometry_of("bf16");
  const troupe_layer_shape shapes[] = {attention, attention};
  const auto typed = own_type();
  const troupe_layer_details* const of_the_second[] = {nullptr, &typed};
  for (const auto* details : {static_cast<const troupe_layer_details* const*>(nullptr),
                              static_cast<const troupe_layer_details* const*>(of_the_second)}) {
    troupe_layout* raw = nullptr;
    ASSERT_DONE(troupe_layout_make_with(&geometry, shapes, details, 2, nullptr, &raw));
    const layout_handle layout{raw};
    troupe_layer_details seen{};
    seen.size = sizeof seen;
    ASSERT_DONE(troupe_layout_layer_details(raw, 0, &seen));
    EXPECT_EQ(seen.value_dim, 0u);
    EXPECT_STREQ(seen.dtype, "");
    ASSERT_DONE(troupe_layout_layer_details(raw, 1, &seen));
    EXPECT_EQ(seen.value_dim, details ? 4u : 0u);
    EXPECT_STREQ(seen.dtype, details ? "fp8" : "");
    const troupe_status with_a_plain_one = details ? TROUPE_LAYOUT_MISMATCH : TROUPE_OK;
    EXPECT_EQ(troupe_layout_compatible(raw, small_layout().get()), with_a_plain_one);
  }
}

/// A program that was compiled against a later header, with one more field.
struct later_details {
  troupe_layer_details known;
  std::uint64_t added;
};

TEST(c_arguments, details_of_a_later_program_are_taken_while_what_was_added_is_not_used) {
  const auto layout = small_layout();
  const troupe_plane heads_of_blocks{1, 2, 0, 48, 0, 24, 24};
  const auto add = [&](const later_details& details) {
    return troupe_layout_add_layer_with(layout.get(), &opaque, &details.known, &heads_of_blocks, 1);
  };
  later_details details{packed("tiles"), 1};
  details.known.size = sizeof details;
  EXPECT_REFUSED(add(details), TROUPE_VERSION_MISMATCH,
                 "`details` uses fields that this release of libtroupe does not know");
  details.added = 0;
  ASSERT_DONE(add(details));
  later_details seen{{}, 77};
  seen.known.size = sizeof seen;
  ASSERT_DONE(troupe_layout_layer_details(layout.get(), 2, &seen.known));
  EXPECT_EQ(seen.known.size, sizeof seen);
  EXPECT_STREQ(seen.known.packing, "tiles");
  EXPECT_EQ(seen.added, 0u);
}

TEST(c_arguments, details_that_are_none_name_the_field) {
  const auto layout = small_layout();
  const troupe_plane heads_of_blocks{1, 2, 0, 48, 0, 24, 24};
  const auto add = [&](const troupe_layer_shape& shape, const troupe_layer_details& details) {
    return troupe_layout_add_layer_with(layout.get(), &shape, &details, &heads_of_blocks, 1);
  };
  auto details = packed("tiles");
  auto other_kind = opaque;
  other_kind.kind = TROUPE_LAYER_OPAQUE + 1;
  EXPECT_REFUSED(add(other_kind, details), TROUPE_INVALID_CONFIG,
                 "`shape.kind` is 5; it goes from 1 to 4");
  details.unit = 3;
  EXPECT_REFUSED(add(opaque, details), TROUPE_INVALID_CONFIG, "`details.unit` is 3");
  details = packed("tiles");
  details.size = 0;
  EXPECT_REFUSED(add(opaque, details), TROUPE_INVALID_CONFIG, "`details.size` is 0");
  details = own_type();
  details.dtype = "mine";
  EXPECT_REFUSED(add(attention, details), TROUPE_INVALID_CONFIG,
                 "`details.element_size` is 0 and the size of `mine` is not known");
  ASSERT_DONE(troupe_layout_check(layout.get()));  // nothing was added

  troupe_layer_details seen{};
  EXPECT_REFUSED(troupe_layout_layer_details(layout.get(), 0, nullptr), TROUPE_INVALID_CONFIG,
                 "`details` is NULL");
  EXPECT_REFUSED(troupe_layout_layer_details(layout.get(), 0, &seen), TROUPE_INVALID_CONFIG,
                 "`details.size` is 0");
  seen.size = sizeof seen;
  EXPECT_REFUSED(troupe_layout_layer_details(layout.get(), 2, &seen), TROUPE_OUT_OF_RANGE,
                 "there is no layer 2");
  EXPECT_EQ(seen.packing, nullptr);
}

TEST(c_arguments, states_are_spread_part_by_part) {
  const auto layout = small_layout();
  const troupe_state_part parts[] = {{32, TROUPE_STATE_SLICED, 0}, {8, TROUPE_STATE_REPLICATED, 0}};
  troupe_state_tensor state{};
  state.size = sizeof state;
  state.sharding = TROUPE_STATE_REPLICATED;
  state.name = "conv";
  state.region = 1;
  state.slots = 2;
  state.slot_stride = state.slot_bytes = 40;
  state.parts = parts;
  state.part_count = 2;
  ASSERT_DONE(troupe_layout_add_state(layout.get(), &state));
  ASSERT_DONE(troupe_layout_check(layout.get()));
  const auto whole = small_layout();
  state.part_count = 0;
  ASSERT_DONE(troupe_layout_add_state(whole.get(), &state));
  EXPECT_REFUSED(troupe_layout_compatible(layout.get(), whole.get()), TROUPE_LAYOUT_MISMATCH,
                 "state 0 parts is 2 here and 1");
  state.size = offsetof(troupe_state_tensor, parts);  // the size in an earlier release
  state.part_count = 7;
  ASSERT_DONE(troupe_layout_add_state(whole.get(), &state));
  state.size = sizeof state;
  state.part_count = 65;
  EXPECT_REFUSED(troupe_layout_add_state(whole.get(), &state), TROUPE_INVALID_CONFIG,
                 "`state.part_count` is more than 64");
  state.part_count = 1;
  ASSERT_DONE(troupe_layout_add_state(whole.get(), &state));
  EXPECT_REFUSED(troupe_layout_check(whole.get()), TROUPE_INVALID_CONFIG,
                 "slot_bytes is 40, expected the sum of its parts, 32");
}

/// The layers of the small layout, each in a group of its own.
layout_handle grouped_layout() {
  auto layout = small_layout();
  const std::uint32_t first = 0;
  const std::uint32_t second = 1;
  EXPECT_EQ(troupe_layout_add_group(layout.get(), &first, 1, 0), TROUPE_OK) << troupe_last_error();
  EXPECT_EQ(troupe_layout_add_group(layout.get(), &second, 1, 4), TROUPE_OK) << troupe_last_error();
  return layout;
}

TEST(c_arguments, groups_of_layers_come_back) {
  const auto layout = grouped_layout();
  ASSERT_DONE(troupe_layout_check(layout.get()));
  std::uint32_t count = 0;
  ASSERT_DONE(troupe_layout_group_count(layout.get(), &count));
  ASSERT_EQ(count, 2u);
  for (std::uint32_t group = 0; group < count; ++group) {
    std::uint32_t layers[2] = {9, 9};
    std::size_t held = 0;
    std::uint32_t in_block = 0;
    ASSERT_DONE(troupe_layout_group(layout.get(), group, layers, 2, &held, &in_block));
    EXPECT_EQ(held, 1u);
    EXPECT_EQ(layers[0], group);
    EXPECT_EQ(layers[1], 9u) << "more was written than there is";
    EXPECT_EQ(in_block, 4u);
    ASSERT_DONE(troupe_layout_group(layout.get(), group, nullptr, 0, &held, &in_block));
  }
  std::size_t held = 0;
  EXPECT_REFUSED(troupe_layout_group(layout.get(), 2, nullptr, 0, &held, &count),
                 TROUPE_OUT_OF_RANGE, "there is no group 2; the layout has 2");
  const std::uint32_t twice = 1;
  ASSERT_DONE(troupe_layout_add_group(layout.get(), &twice, 1, 0));
  EXPECT_REFUSED(troupe_layout_check(layout.get()), TROUPE_INVALID_CONFIG, "group 2 layer is 1");
  EXPECT_REFUSED(troupe_layout_add_group(layout.get(), nullptr, 1, 0), TROUPE_INVALID_CONFIG,
                 "`layers` is NULL");
  EXPECT_REFUSED(troupe_layout_add_group(nullptr, &twice, 1, 0), TROUPE_INVALID_CONFIG, "`layout`");
  for (int i = 3; i < 64; ++i) ASSERT_DONE(troupe_layout_add_group(layout.get(), &twice, 1, 0));
  EXPECT_REFUSED(troupe_layout_add_group(layout.get(), &twice, 1, 0), TROUPE_INVALID_CONFIG,
                 "64 groups already");
}

TEST(c_arguments, a_part_of_a_model_comes_back) {
  const auto layout = small_layout();
  std::uint32_t first = 9;
  std::uint32_t total = 9;
  ASSERT_DONE(troupe_layout_part(layout.get(), &first, &total));
  EXPECT_EQ(first, 0u);
  EXPECT_EQ(total, 0u);
  ASSERT_DONE(troupe_layout_set_part(layout.get(), 3, 8));
  ASSERT_DONE(troupe_layout_check(layout.get()));
  void* bytes = nullptr;
  std::size_t byte_count = 0;
  ASSERT_DONE(troupe_layout_encode(layout.get(), &bytes, &byte_count));
  troupe_layout* raw = nullptr;
  ASSERT_DONE(troupe_layout_decode(bytes, byte_count, &raw));
  troupe_free(bytes);
  const layout_handle decoded{raw};
  ASSERT_DONE(troupe_layout_part(decoded.get(), &first, &total));
  EXPECT_EQ(first, 3u);
  EXPECT_EQ(total, 8u);
}

TEST(c_arguments, parts_that_are_none_or_of_another_model_are_refused) {
  const auto layout = small_layout();
  ASSERT_DONE(troupe_layout_set_part(layout.get(), 7, 8));
  EXPECT_REFUSED(troupe_layout_check(layout.get()), TROUPE_INVALID_CONFIG,
                 "first_layer is 7, expected 0 to 6");
  ASSERT_DONE(troupe_layout_set_part(layout.get(), 1, 0));
  EXPECT_REFUSED(troupe_layout_check(layout.get()), TROUPE_INVALID_CONFIG,
                 "first_layer is 1, expected 0 where total_layers is 0");
  ASSERT_DONE(troupe_layout_set_part(layout.get(), 6, 8));
  const auto other = small_layout();
  ASSERT_DONE(troupe_layout_set_part(other.get(), 0, 8));
  ASSERT_DONE(troupe_layout_compatible(layout.get(), other.get()));
  std::uint8_t one[16] = {};
  std::uint8_t another[16] = {};
  ASSERT_DONE(troupe_layout_fingerprint(layout.get(), one));
  ASSERT_DONE(troupe_layout_fingerprint(other.get(), another));
  EXPECT_TRUE(std::equal(one, one + 16, another)) << "of one model";
  ASSERT_DONE(troupe_layout_set_part(other.get(), 0, 9));
  EXPECT_REFUSED(troupe_layout_compatible(layout.get(), other.get()), TROUPE_LAYOUT_MISMATCH,
                 "number of layers is 8 here and 9");
  // Groups are those of the model: the second one has no layer in this part.
  const std::uint32_t both[] = {0, 1};
  ASSERT_DONE(troupe_layout_add_group(layout.get(), both, 2, 0));
  ASSERT_DONE(troupe_layout_add_group(layout.get(), nullptr, 0, 0));
  ASSERT_DONE(troupe_layout_check(layout.get()));
  std::uint32_t number = 0;
  EXPECT_REFUSED(troupe_layout_set_part(nullptr, 0, 8), TROUPE_INVALID_CONFIG, "`layout` is NULL");
  EXPECT_REFUSED(troupe_layout_part(layout.get(), nullptr, &number), TROUPE_INVALID_CONFIG,
                 "`first_layer` is NULL");
  EXPECT_REFUSED(troupe_layout_part(layout.get(), &number, nullptr), TROUPE_INVALID_CONFIG,
                 "`total_layers` is NULL");
}

TEST(c_arguments, opaque_layers_need_details_and_planes) {
  auto geometry = geometry_of("bf16");
  const auto tiles = packed("tiles");
  const troupe_layer_details* const details[] = {&tiles};
  troupe_layout* none = nullptr;
  EXPECT_REFUSED(troupe_layout_make_with(&geometry, &opaque, details, 1, nullptr, &none),
                 TROUPE_INVALID_CONFIG, "layer 0 is opaque");
  EXPECT_EQ(none, nullptr);

  const troupe_plane heads_of_blocks{1, 2, 0, 48, 0, 24, 24};
  const auto without_packing = small_layout();
  const auto no_name = packed(nullptr);
  ASSERT_DONE(
      troupe_layout_add_layer_with(without_packing.get(), &opaque, &no_name, &heads_of_blocks, 1));
  EXPECT_REFUSED(troupe_layout_check(without_packing.get()), TROUPE_INVALID_CONFIG,
                 "layer 2 packing");
  const auto without_details = small_layout();
  ASSERT_DONE(troupe_layout_add_layer(without_details.get(), &opaque, &heads_of_blocks, 1));
  EXPECT_REFUSED(troupe_layout_check(without_details.get()), TROUPE_INVALID_CONFIG, "layer 2 unit");
}

TEST(c_arguments, layouts_have_one_fingerprint_if_they_are_of_one_shape) {
  const auto fingerprint_of = [](const char* dtype, const troupe_arrangement& how) {
    auto geometry = geometry_of(dtype);
    geometry.blocks += how.inner;  // need not be equal either
    const troupe_layer_shape shape{TROUPE_LAYER_ATTENTION, 2, 8};
    troupe_layout* raw = nullptr;
    EXPECT_EQ(troupe_layout_make(&geometry, &shape, 1, &how, &raw), TROUPE_OK)
        << troupe_last_error();
    const layout_handle layout{raw};
    std::vector<std::uint8_t> out(16);
    EXPECT_EQ(troupe_layout_fingerprint(raw, out.data()), TROUPE_OK) << troupe_last_error();
    return out;
  };
  const troupe_arrangement plain{};
  const troupe_arrangement other{TROUPE_BLOCKS_FIRST, TROUPE_KV_TOGETHER, TROUPE_HEAD_MAJOR,
                                 TROUPE_SINGLE_REGION};
  EXPECT_EQ(fingerprint_of("bf16", plain), fingerprint_of("bf16", other));
  EXPECT_NE(fingerprint_of("bf16", plain), fingerprint_of("fp16", plain));
  EXPECT_NE(fingerprint_of("bf16", plain), std::vector<std::uint8_t>(16));

  const auto layout = small_layout();
  EXPECT_REFUSED(troupe_layout_fingerprint(layout.get(), nullptr), TROUPE_INVALID_CONFIG,
                 "`fingerprint` is NULL");
  troupe_cache_geometry geometry{};
  geometry.size = sizeof geometry;
  ASSERT_DONE(troupe_layout_geometry(layout.get(), &geometry));
  troupe_layout* raw = nullptr;
  ASSERT_DONE(troupe_layout_new(&geometry, &raw));
  const layout_handle without_layers{raw};
  std::uint8_t fingerprint[16] = {};
  EXPECT_REFUSED(troupe_layout_fingerprint(raw, fingerprint), TROUPE_INVALID_CONFIG, "");
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
