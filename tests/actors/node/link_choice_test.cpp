// Which backends a node requests from a peer. If the peer is on another host, that is known before
// any request. If a cache is in GPU memory, a peer that accepts any link leaves the decision to the
// dialling side, which alone knows what GPUs it sees and reaches.

#include <algorithm>
#include <functional>
#include <ostream>
#include <sstream>

#include <gmock/gmock.h>
#include <spdlog/sinks/ostream_sink.h>

#include "troupe/actors/logging.hpp"

#include "dialling_node.hpp"
#include "gpu_double.hpp"

namespace troupe::actors::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using transport::backend_kind;
using troupe::testing::wait_limit;

/// The messages that the peer received.
struct heard_by_engine {
  inbox<link_request> requests;
  inbox<link_notice> notices;
  std::function<void()> meanwhile = [] {};  ///< runs while the peer handles a request
  bool refuses{true};
};

/// The peer's end of a link. Accepts a link over GPUs, as a peer whose cache is on `gpus`. Any
/// other request is refused or left unanswered.
link_actor::behavior_type accepting_end(link_actor::pointer self,
                                        std::shared_ptr<heard_by_engine> ear,
                                        std::vector<std::string> gpus) {
  return {
      [](link_command&) {},
      [](link_event&) {},
      [self, ear, gpus](const link_request& request) {
        ear->requests.put(request);
        ear->meanwhile();
        auto answer = self->make_response_promise<link_reply>();
        link_reply reply;
        if (request.backend == static_cast<std::uint8_t>(backend_kind::xgmi)) {
          reply.gpus = gpus;
          answer.deliver(std::move(reply));
        } else if (ear->refuses) {
          reply.failed = static_cast<std::uint8_t>(errc::backend_unavailable);
          reply.sentence = "only GPUs here";
          answer.deliver(std::move(reply));
        }
        return answer;
      },
      [ear](const link_notice& notice) { ear->notices.put(notice); },
      [](report_atom) { return link_report{}; },
  };
}

/// The backends requested from the peer, in order.
std::vector<backend_kind> asked_for(heard_by_engine& ear) {
  std::vector<backend_kind> kinds;
  for (std::size_t i = 0; i < ear.requests.size(); ++i) {
    kinds.push_back(static_cast<backend_kind>(ear.requests.at(i)->backend));
  }
  return kinds;
}

/// What a peer claims about its GPUs, and the expected error.
struct named_gpus {
  std::string name;
  std::vector<std::string> gpus;
  std::string why;
};
void PrintTo(const named_gpus& tested, std::ostream* out) {
  *out << tested.name;
}

/// A node that sees two GPUs and has its cache on the first one.
class node_with_gpus : public dialling_node {
 protected:
  std::shared_ptr<heard_by_engine> ear = std::make_shared<heard_by_engine>();
  transport::xgmi::gpu_double* gpus{nullptr};
  link_actor end;

  node_with_gpus() {
    auto runtime = std::make_unique<transport::xgmi::gpu_double>();
    gpus = runtime.get();
    place.xgmi.site = std::make_shared<transport::xgmi::gpu_site>(std::move(runtime));
    context->cache_gpu = 0;
    context->settings.backend = backend_kind::xgmi;
    context->settings.fallback = {backend_kind::tcp};
  }
  /// Dials a peer whose cache is on those GPUs.
  void dial(const std::vector<std::string>& theirs) {
    end = there.system().spawn(accepting_end, ear, theirs);
    there.own(end);
    start(there.system().spawn(accepting_node, end));
    EXPECT_TRUE(context->endpoint->allocate_on_gpu(0, 4096, "cache"));
    show(9);
    need();
  }
  /// Dials in the same way and returns the reason why no link came.
  troupe::error dial_in_vain(const std::vector<std::string>& theirs) {
    dial(theirs);
    const auto told = gone->at(0);
    if (!told) return {errc::deadline, "nobody said that no link comes"};
    return told->why;
  }
  [[nodiscard]] std::vector<backend_kind> asked_for() const { return testing::asked_for(*ear); }
};

class out_of_reach : public node_with_gpus, public ::testing::WithParamInterface<named_gpus> {
 protected:
  void SetUp() override { gpus->cut(0, 1); }
};

TEST_P(out_of_reach, is_found_out_before_it_is_connected_to_and_left_to_the_next_backend) {
  ear->refuses = false;  // leave the next attempt unanswered, so that no outcome is reported
  dial(GetParam().gpus);
  const auto first = ear->requests.at(0);
  const auto second = ear->requests.at(1);
  ASSERT_TRUE(first && second);
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::xgmi, backend_kind::tcp));
  EXPECT_THAT(first->gpus, ElementsAre("0000:0a:00.0"));
  EXPECT_THAT(second->reason,
              AllOf(HasSubstr("xgmi failed: backend_unavailable: "), HasSubstr(GetParam().why)));
  // Without a notice, its half of the link would wait for the full connect timeout.
  const auto notice = ear->notices.at(0);
  ASSERT_TRUE(notice) << "the acceptor was told nothing";
  EXPECT_EQ(notice->fate, link_fate::ended);
  EXPECT_THAT(notice->why, HasSubstr(GetParam().why));
}

TEST_P(out_of_reach, is_the_reason_beside_that_of_the_next_backend_where_none_is_left) {
  const auto why = dial_in_vain(GetParam().gpus);
  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, AllOf(HasSubstr("no backend joins this node with prefill-0"),
                                 HasSubstr(GetParam().why),
                                 HasSubstr("; tcp failed: backend_unavailable: only GPUs here")));
}

TEST_P(out_of_reach, is_said_once_where_no_other_backend_may_be_used) {
  context->settings.fallback.clear();
  const auto why = dial_in_vain(GetParam().gpus);
  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, HasSubstr(GetParam().why));
  ASSERT_TRUE(ear->notices.at(0)) << "the acceptor was told nothing";
  EXPECT_EQ(ear->requests.size(), 1u) << "what cannot be is not tried again";
  EXPECT_EQ(ear->notices.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(
    of_a_node, out_of_reach,
    ::testing::Values(
        named_gpus{
            "unseen", {"0000:0c:00.0"}, "this process does not see the peer's GPU 0000:0c:00.0"},
        named_gpus{"no_peer_access",
                   {"0000:0b:00.0"},
                   "GPU 0000:0a:00.0 does not reach the peer's GPU 0000:0b:00.0"},
        named_gpus{"on_the_host",
                   {},
                   "the cache of prefill-0 is in memory of the host, all or a part of it, which "
                   "xgmi does not move"}),
    [](const auto& tested) { return tested.param.name; });

TEST_F(node_with_gpus, that_loses_them_while_it_dials_does_not_connect_either) {
  ear->meanwhile = [this] { gpus->lose(); };
  const auto why = dial_in_vain({"0000:0a:00.0"});
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::xgmi, backend_kind::tcp));
  EXPECT_THAT(why.message,
              AllOf(HasSubstr("xgmi failed: backend_unavailable: "), HasSubstr("GPU")));
  ASSERT_TRUE(ear->notices.at(0)) << "the acceptor was told nothing";
}

TEST_F(node_with_gpus, asks_nobody_for_a_backend_that_does_not_move_its_own_cache) {
  context->cache_gpu.reset();
  const auto why = dial_in_vain({"0000:0a:00.0"});
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::tcp));
  EXPECT_THAT(why.message,
              HasSubstr("xgmi failed: backend_unavailable: the cache of decode-0 is in memory of "
                        "the host, which xgmi does not move; tcp failed: "));
}

TEST_F(node_with_gpus, asks_nobody_for_a_backend_that_does_not_move_a_part_of_its_cache) {
  context->cache_gpu.reset();
  context->cache_in_both = "region 0 in memory of gpu:0 and region 1 in that of the host";
  const auto why = dial_in_vain({"0000:0a:00.0"});
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::tcp));
  EXPECT_THAT(why.message,
              HasSubstr("xgmi failed: backend_unavailable: the cache of decode-0 has region 0 in "
                        "memory of gpu:0 and region 1 in that of the host, and xgmi moves only"));
}

TEST_F(node_with_gpus, ends_at_once_where_its_only_backend_does_not_move_its_own_cache) {
  context->cache_gpu.reset();
  context->settings.fallback.clear();
  const auto why = dial_in_vain({"0000:0a:00.0"});
  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, HasSubstr("the cache of decode-0 is in memory of the host"));
  EXPECT_EQ(ear->requests.size(), 0u);
}

// -- invalid lists of GPUs

class strange_gpus : public node_with_gpus, public ::testing::WithParamInterface<named_gpus> {};

TEST_P(strange_gpus, end_the_link_without_being_looked_for_or_printed) {
  const auto why = dial_in_vain(GetParam().gpus);
  EXPECT_EQ(why.code, errc::out_of_range) << to_string(why);
  EXPECT_THAT(why.message, AllOf(HasSubstr(GetParam().why), Not(HasSubstr("\033"))));
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::xgmi));
  ASSERT_TRUE(ear->notices.at(0)) << "the acceptor was told nothing";
}

constexpr auto no_gpus = "prefill-0 names invalid GPUs";
INSTANTIATE_TEST_SUITE_P(
    of_a_peer, strange_gpus,
    ::testing::Values(named_gpus{"too_many", std::vector<std::string>(65, "0000:0a:00.0"), no_gpus},
                      named_gpus{"one_without_a_name", {"0000:0a:00.0", ""}, no_gpus},
                      named_gpus{"a_name_too_long", {std::string(33, 'a')}, no_gpus},
                      named_gpus{"no_bus_id", {"0000:\033[2J"}, no_gpus}),
    [](const auto& tested) { return tested.param.name; });

TEST_F(node_with_gpus, looks_for_as_many_gpus_as_a_node_may_name) {
  const auto why = dial_in_vain(std::vector<std::string>(64, "0000:0c:00.0"));
  EXPECT_EQ(why.code, errc::peer_unreachable) << to_string(why);
  EXPECT_THAT(why.message, HasSubstr("does not see the peer's GPU 0000:0c:00.0"));
}

// -- hosts

/// What a peer claims about its host, and the expected error.
struct place_apart {
  std::string name;
  std::function<void(node_info&)> peer_is;
  std::string why;
};
void PrintTo(const place_apart& tested, std::ostream* out) {
  *out << tested.name;
}

/// Collects the lines logged about links. Construct it before the first link.
class lines_about_links {
 public:
  lines_about_links() { logger("link")->sinks().push_back(sink_); }
  ~lines_about_links() { std::erase(logger("link")->sinks(), sink_); }
  lines_about_links(const lines_about_links&) = delete;
  lines_about_links& operator=(const lines_about_links&) = delete;
  /// Call once nothing more is logged.
  [[nodiscard]] std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  spdlog::sink_ptr sink_ = std::make_shared<spdlog::sinks::ostream_sink_mt>(text_);
};

/// A node that dials a peer which refuses every request.
class node_that_is_refused : public dialling_node {
 protected:
  std::shared_ptr<heard_by_engine> ear = std::make_shared<heard_by_engine>();
  lines_about_links log;

  troupe::error dial_in_vain() {
    const auto end = there.system().spawn(accepting_end, ear, std::vector<std::string>{});
    there.own(end);
    start(there.system().spawn(accepting_node, end));
    show(9);
    need();
    const auto told = gone->at(0);
    if (!told) return {errc::deadline, "nobody said that no link comes"};
    return told->why;
  }
};

/// The machine that runs the test may have a NIC.
const auto only_over_a_wire =
    AllOf(Contains(backend_kind::tcp), Each(AnyOf(backend_kind::rdma, backend_kind::tcp)));

class node_elsewhere : public node_that_is_refused,
                       public ::testing::WithParamInterface<place_apart> {
 protected:
  void SetUp() override { peer_is = GetParam().peer_is; }
};

TEST_P(node_elsewhere, is_asked_by_auto_for_no_backend_of_one_host) {
  context->settings.backend.reset();
  const auto why = dial_in_vain();
  EXPECT_THAT(asked_for(*ear), only_over_a_wire);
  EXPECT_THAT(ear->requests.at(0)->reason,
              AllOf(HasSubstr("; shm: " + GetParam().why), Not(HasSubstr("failed"))));
  EXPECT_THAT(log.text(), Not(HasSubstr("over shm failed")));
  EXPECT_THAT(why.message, HasSubstr("; shm: " + GetParam().why));
}

TEST_P(node_elsewhere, is_asked_by_auto_for_none_of_those_that_a_fallback_names_either) {
  context->settings.backend.reset();
  context->settings.fallback = {backend_kind::shm};
  (void)dial_in_vain();
  EXPECT_THAT(asked_for(*ear), only_over_a_wire);
  EXPECT_THAT(log.text(), Not(HasSubstr("over shm failed")));
}

TEST_P(node_elsewhere, ends_a_link_at_once_that_was_to_be_over_shm) {
  context->settings.backend = backend_kind::shm;
  const auto why = dial_in_vain();
  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, HasSubstr("no backend joins this node with prefill-0; shm failed: "
                                     "backend_unavailable: " +
                                     GetParam().why));
  EXPECT_EQ(ear->requests.size(), 0u) << "it was known before";
  EXPECT_THAT(log.text(), HasSubstr("over shm ended"));
}

TEST_P(node_elsewhere,
       is_told_why_by_a_node_that_it_asks_for_shm_and_which_names_the_same_backend) {
  start(there.system().spawn(mute, [](const auto&, const auto&) {}));
  link_request request;
  request.cluster = "demo";
  request.from = request_of("prefill-0", 9, peer_port).node;
  peer_is(request.from);
  request.to_incarnation = context->self.incarnation;
  request.backend = static_cast<std::uint8_t>(backend_kind::shm);
  const auto reply = ask<link_reply>(here.system(), actor, "the node", wait_limit, request);
  ASSERT_TRUE(reply) << to_string(reply.error());
  EXPECT_EQ(reply->failed, static_cast<std::uint8_t>(errc::backend_unavailable));
  EXPECT_THAT(reply->sentence, HasSubstr(GetParam().why));
  EXPECT_THAT(log.text(), AllOf(HasSubstr("over shm ended"), Not(HasSubstr("over tcp"))));
}

INSTANTIATE_TEST_SUITE_P(
    of_a_peer, node_elsewhere,
    ::testing::Values(
        place_apart{"another_host", [](node_info& n) { n.boot_id = "5eed"; }, "another host"},
        place_apart{"unknown_host", [](node_info& n) { n.boot_id.clear(); }, "another host"},
        place_apart{"another_network", [](node_info& n) { ++n.network_namespace; },
                    "same host, another network namespace"},
        place_apart{"another_pid_namespace", [](node_info& n) { ++n.pid_namespace; },
                    "same host, another pid namespace"},
        place_apart{"another_user_namespace", [](node_info& n) { ++n.user_namespace; },
                    "same host, another user namespace"},
        place_apart{"another_user", [](node_info& n) { ++n.uid; }, "same host, user "}),
    [](const auto& tested) { return tested.param.name; });

TEST_F(node_that_is_refused, by_a_peer_of_its_own_host_has_asked_it_for_shm_first) {
  context->settings.backend.reset();
  (void)dial_in_vain();
  ASSERT_GT(ear->requests.size(), 1u);
  EXPECT_EQ(asked_for(*ear).front(), backend_kind::shm);
  EXPECT_EQ(asked_for(*ear).back(), backend_kind::tcp);
}

TEST_F(node_with_gpus, asks_no_peer_of_another_host_for_a_backend_between_gpus) {
  peer_is = [](node_info& n) { n.boot_id = "5eed"; };
  const auto why = dial_in_vain({"0000:0a:00.0"});
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::tcp));
  EXPECT_THAT(why.message, HasSubstr("xgmi failed: backend_unavailable: another host"));
}

}  // namespace
}  // namespace troupe::actors::testing
