#include <gtest/gtest.h>

#include "troupe/transport/rdma/device.hpp"

// Which device, port and address is chosen, and the error when none is suitable.
namespace troupe::transport::rdma {

namespace {

gid_entry gid(std::uint32_t index, std::uint32_t type, std::initializer_list<int> head,
              bool mapped_v4 = false) {
  gid_entry made{.index = index, .type = type, .gid = {}};
  std::size_t at = 0;
  for (const int byte : head) made.gid.raw[at++] = static_cast<std::uint8_t>(byte);
  if (mapped_v4) made.gid.raw[10] = made.gid.raw[11] = 0xff;
  return made;
}

device_view device_of(std::string name, bool active, std::uint8_t speed) {
  device_view made;
  made.name = std::move(name);
  port_view port;
  port.number = 1;
  port.attributes.state = active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  port.attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
  port.attributes.active_speed = speed;
  port.attributes.active_width = 2;
  port.gids = {gid(0, 2, {0xfe, 0x80}), gid(3, 2, {}, true)};
  made.ports.push_back(port);
  return made;
}

const std::vector<device_view> three{device_of("slow_0", true, 4), device_of("fast_0", true, 64),
                                     device_of("down_0", false, 128)};

std::string chosen(const rdma_options& options, const std::vector<device_view>& devices = three) {
  const auto places = choose_places(options, devices);
  if (!places) return "error: " + places.error().message;
  std::string text;
  for (const auto& place : *places)
    text += place.device + "/" + std::to_string(place.gid_index) + " ";
  return text;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(device_choice, auto_takes_the_fastest_port_that_is_up) {
  EXPECT_EQ(chosen({}), "fast_0/3 ");
}

TEST(device_choice, a_caret_leaves_devices_out) {
  EXPECT_EQ(chosen({.device = "^fast_0"}), "slow_0/3 ");
  const auto none = chosen({.device = "^fast_0,slow_0"});
  EXPECT_TRUE(has(none, "fast_0: excluded")) << none;
  EXPECT_TRUE(has(none, "down_0: port 1 is not active")) << none;
}

TEST(device_choice, named_devices_are_taken_in_their_order) {
  EXPECT_EQ(chosen({.device = "slow_0,fast_0"}), "slow_0/3 fast_0/3 ");
}

TEST(device_choice, a_name_that_is_not_there_is_an_error_that_says_which_are) {
  const auto said = chosen({.device = "mlx5_0"});
  EXPECT_TRUE(has(said, "'mlx5_0'")) << said;
  EXPECT_TRUE(has(said, "slow_0, fast_0, down_0")) << said;
  EXPECT_EQ(choose_places({.device = "mlx5_0"}, three).error().code, errc::no_device);
}

TEST(device_choice, a_named_device_that_is_down_is_an_error) {
  const auto said = chosen({.device = "down_0"});
  EXPECT_TRUE(has(said, "down_0")) << said;
  EXPECT_TRUE(has(said, "not active")) << said;
}

TEST(device_choice, a_configured_address_is_taken_or_refused) {
  EXPECT_EQ(chosen({.device = "slow_0", .gid_index = 0}), "slow_0/0 ");
  const auto said = chosen({.device = "slow_0", .gid_index = 7});
  EXPECT_TRUE(has(said, "gid_index 7")) << said;
}

TEST(device_choice, a_configured_port_is_taken_or_refused) {
  const auto said = chosen({.device = "slow_0", .port = 2});
  EXPECT_TRUE(has(said, "no port 2")) << said;
}

TEST(device_choice, without_a_device_it_says_where_it_looked_and_what_to_do) {
  const auto places = choose_places({}, {});
  ASSERT_FALSE(places);
  EXPECT_EQ(places.error().code, errc::no_device);
  EXPECT_TRUE(has(places.error().message, "ibverbs-providers")) << places.error().message;
}

TEST(device_choice, what_cannot_be_opened_says_why) {
  device_view closed;
  closed.name = "odd_0";
  closed.trouble = "it cannot be opened (Permission denied)";
  const auto said = chosen({}, {closed});
  EXPECT_TRUE(has(said, "odd_0")) << said;
  EXPECT_TRUE(has(said, "Permission denied")) << said;
}

TEST(device_choice, of_several_that_cannot_be_used_what_they_lack_comes_before_what_to_do) {
  device_view closed;
  closed.name = "odd_0";
  closed.trouble = "it cannot be opened (Permission denied); is /dev/infiniband there?";
  const auto said =
      chosen({}, {closed, device_of("down_0", false, 4), device_of("off_0", false, 4)});
  // `troupe status` shows the sentence up to the first semicolon.
  const auto what = said.substr(0, said.find(';'));
  for (const auto* part : {"odd_0: it cannot be opened", "down_0: port 1 is not active",
                           "off_0: port 1 is not active"}) {
    EXPECT_TRUE(has(what, part)) << said;
  }
  EXPECT_TRUE(has(said, "; is /dev/infiniband there?; is its network interface up?")) << said;
}

TEST(device_choice, what_a_choice_passes_over_is_said_with_the_reason) {
  const auto over = passed_over({}, three);
  ASSERT_EQ(over.size(), 1U);
  EXPECT_TRUE(has(over[0], "RDMA device down_0: port 1 is not active")) << over[0];
  EXPECT_EQ(passed_over({.device = "auto"}, three).size(), 1U);
  EXPECT_EQ(passed_over({.device = "^slow_0"}, three).size(), 1U);
  EXPECT_TRUE(passed_over({.device = "^down_0"}, three).empty()) << "nobody wants it";
  EXPECT_TRUE(passed_over({.device = "fast_0"}, three).empty()) << "nobody asks about it";
}

/// Three equally fast devices at these distances.
std::vector<device_view> at_distances(std::optional<std::uint32_t> a,
                                      std::optional<std::uint32_t> b,
                                      std::optional<std::uint32_t> c) {
  std::vector<device_view> made{device_of("a_0", true, 64), device_of("b_0", true, 64),
                                device_of("c_0", true, 64)};
  made[0].distance = a;
  made[1].distance = b;
  made[2].distance = c;
  return made;
}

TEST(device_choice, of_equally_fast_ports_the_nearest_is_taken_then_the_first) {
  EXPECT_EQ(chosen({}, at_distances(21, 10, 10)), "b_0/3 ");
  EXPECT_EQ(chosen({.device = "^b_0"}, at_distances(21, 10, 10)), "c_0/3 ");
  EXPECT_EQ(chosen({}, at_distances(10, 10, 10)), "a_0/3 ");
}

TEST(device_choice, where_one_distance_is_not_known_none_counts) {
  EXPECT_EQ(chosen({}, at_distances(21, {}, 10)), "a_0/3 ");
  EXPECT_EQ(chosen({}, at_distances({}, {}, {})), "a_0/3 ");
  EXPECT_EQ(chosen({.device = "^b_0"}, at_distances(21, {}, 10)), "c_0/3 ");
}

TEST(device_choice, a_faster_port_is_taken_however_far_it_is) {
  auto devices = at_distances(10, 21, 10);
  devices[1].ports[0].attributes.active_speed = 128;
  EXPECT_EQ(chosen({}, devices), "b_0/3 ");
  devices[1].distance.reset();
  EXPECT_EQ(chosen({}, devices), "b_0/3 ");
}

TEST(device_choice, infiniband_goes_before_ethernet_and_neither_when_it_is_down) {
  auto devices = at_distances(10, 10, 21);
  devices[2].ports[0].attributes.link_layer = IBV_LINK_LAYER_INFINIBAND;
  devices[2].ports[0].attributes.active_speed = 4;
  EXPECT_EQ(chosen({}, devices), "c_0/3 ");
  devices[2].ports[0].attributes.state = IBV_PORT_DOWN;
  EXPECT_EQ(chosen({}, devices), "a_0/3 ");
}

TEST(device_choice, named_devices_are_taken_however_far_they_are) {
  EXPECT_EQ(chosen({.device = "c_0,a_0"}, at_distances(10, 10, 21)), "c_0/3 a_0/3 ");
}

TEST(device_choice, the_line_of_a_device_says_where_it_is) {
  auto device = device_of("mlx5_0", true, 64);
  EXPECT_FALSE(has(describe(device), "PCI")) << describe(device);
  EXPECT_FALSE(has(describe(device), "NUMA")) << describe(device);
  device.at = {.numa_node = 1, .pci_path = {"pci0000:80", "0000:80:01.0", "0000:81:00.0"}};
  EXPECT_TRUE(has(describe(device), ", PCI 0000:81:00.0, NUMA node 1")) << describe(device);
}

TEST(device_choice, roce_v2_goes_before_v1_and_ipv4_before_ipv6_before_link_local) {
  port_view port;
  EXPECT_EQ(best_gid(port), nullptr);
  const auto expect_best = [&](std::uint32_t index) {
    const auto* best = best_gid(port);
    ASSERT_NE(best, nullptr);
    EXPECT_EQ(best->index, index);
  };
  port.gids = {gid(0, 1, {}, true)};
  expect_best(0);
  port.gids.push_back(gid(1, 2, {0xfe, 0x80}));
  expect_best(1);
  port.gids.push_back(gid(2, 2, {0x20, 0x01}));
  expect_best(2);
  port.gids.push_back(gid(3, 2, {}, true));
  expect_best(3);
}

TEST(device_choice, many_devices_are_more_than_nothing_to_look_at) {
  // On any machine, looking does not fail, and every device found can be described.
  for (const auto& device : look_at_devices()) EXPECT_FALSE(describe(device).empty());
}

}  // namespace troupe::transport::rdma
