#include "troupe/transport/endpoint.hpp"

#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fails_with.hpp"

namespace troupe::transport {

namespace {

using ::testing::HasSubstr;
using troupe::testing::fails_with;

std::unique_ptr<endpoint> make_endpoint() {
  endpoint_options options;
  options.self = incarnation{1};
  return endpoint::create(std::move(options)).value();
}

TEST(endpoint_test, every_backend_of_the_order_is_listed_with_a_reason) {
  const auto place = make_endpoint();
  const auto all = place->backends();
  ASSERT_EQ(all.size(), 4U);
  for (const auto& one : all) EXPECT_FALSE(one.state.reason.empty()) << to_string(one.kind);
  EXPECT_EQ(all.back().kind, backend_kind::tcp);
  EXPECT_TRUE(all.back().state.usable);
}

TEST(endpoint_test, another_host_is_joined_over_tcp_and_the_choice_says_why_not_the_others) {
  const auto place = make_endpoint();
  auto far = host_identity::of_this_process();
  far.boot_id = "another machine";
  const auto choice = place->choose(far, std::nullopt);
  ASSERT_TRUE(choice) << to_string(choice.error());
  EXPECT_EQ(choice->kind, backend_kind::tcp);
  EXPECT_THAT(choice->reason, ::testing::HasSubstr("shm: "));
  EXPECT_THAT(choice->reason, ::testing::HasSubstr("xgmi: not built"));
}

TEST(endpoint_test, a_backend_that_was_asked_for_is_never_replaced_silently) {
  const auto place = make_endpoint();
  const auto here = host_identity::of_this_process();
  const auto named = place->choose(here, backend_kind::tcp);
  ASSERT_TRUE(named);
  EXPECT_EQ(named->kind, backend_kind::tcp);
  EXPECT_THAT(named->reason, ::testing::HasSubstr("asked for"));
  const auto absent = place->choose(here, backend_kind::xgmi);
  ASSERT_THAT(absent,
              fails_with(errc::backend_unavailable, ::testing::HasSubstr("xgmi: not built")));
}

TEST(endpoint_test, excluded_backends_are_passed_over_by_name) {
  const auto place = make_endpoint();
  const auto here = host_identity::of_this_process();
  const std::vector excluded{backend_kind::shm, backend_kind::tcp};
  const auto none = place->choose(here, std::nullopt, excluded);
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message, ::testing::HasSubstr("tcp: excluded"));
}

TEST(endpoint_test, incarnation_0_is_refused) {
  const auto refused = endpoint::create({});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config);
}

TEST(endpoint_test, port_0_asks_the_os_and_tells_what_it_got) {
  EXPECT_NE(make_endpoint()->data_port(), 0);
}

TEST(endpoint_test, a_taken_port_and_a_foreign_address_fail_at_start_with_their_name) {
  endpoint_options options;
  options.self = incarnation{1};
  const auto first = endpoint::create(options).value();
  options.data_port = first->data_port();
  const auto second = endpoint::create(options);
  ASSERT_THAT(second,
              fails_with(errc::invalid_config, HasSubstr(std::to_string(options.data_port))));
  options.data_port = 0;
  for (const char* host : {"0.0.0.0", "192.0.2.1", "no such host"}) {
    options.host = host;
    const auto refused = endpoint::create(options);
    ASSERT_FALSE(refused) << host;
    EXPECT_NE(refused.error().message.find(host), std::string::npos) << refused.error().message;
  }
}

TEST(types_test, names_and_kinds_match) {
  for (const auto kind :
       {backend_kind::shm, backend_kind::tcp, backend_kind::rdma, backend_kind::xgmi}) {
    EXPECT_EQ(backend_kind_from(to_string(kind)), kind);
  }
  EXPECT_FALSE(backend_kind_from("infiniband"));
  const auto self = host_identity::of_this_process();
  EXPECT_EQ(self.boot_id.size(), 36U);
  EXPECT_NE(self.network_namespace, 0U);
  EXPECT_NE(self.pid_namespace, 0U);
  EXPECT_NE(self.user_namespace, 0U);
}

TEST(types_test, processes_share_memory_only_where_host_namespaces_and_user_are_the_same) {
  const auto self = host_identity::of_this_process();
  EXPECT_FALSE(why_apart(self, self));
  const auto why = [&](const std::function<void(host_identity&)>& otherwise) {
    auto peer = self;
    otherwise(peer);
    return why_apart(self, peer).value_or("not apart");
  };
  using id = host_identity;
  EXPECT_THAT(why([](id& x) { x.boot_id = "another"; }), ::testing::StartsWith("another host"));
  EXPECT_THAT(why([](id& x) { x.boot_id.clear(); }), ::testing::StartsWith("another host"));
  EXPECT_THAT(why([](id& x) { ++x.network_namespace; }), ::testing::HasSubstr("network namespace"));
  EXPECT_THAT(why([](id& x) { ++x.pid_namespace; }), ::testing::HasSubstr("pid namespace"));
  EXPECT_THAT(why([](id& x) { ++x.user_namespace; }), ::testing::HasSubstr("user namespace"));
  EXPECT_THAT(why([](id& x) { ++x.uid; }), ::testing::HasSubstr("within one user only"));
  EXPECT_EQ(why([](id& x) { ++x.pid; }), "not apart");
}

TEST(types_test, what_the_kernel_does_not_show_is_not_the_same) {
  auto blind = host_identity::of_this_process();
  blind.boot_id.clear();
  EXPECT_TRUE(why_apart(blind, blind));
  for (const auto hidden : {&host_identity::network_namespace, &host_identity::pid_namespace,
                            &host_identity::user_namespace}) {
    auto some = host_identity::of_this_process();
    some.*hidden = 0;
    EXPECT_TRUE(why_apart(some, some));
  }
}

}  // namespace

}  // namespace troupe::transport
