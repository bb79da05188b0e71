// A node whose cache is in memory of a GPU dials a peer that takes any link: whether a backend joins the
// two is then for the dialling side to say, which alone knows what GPUs it sees and reaches.

#include <functional>

#include <gmock/gmock.h>

#include "dialling_node.hpp"
#include "gpu_double.hpp"

namespace troupe::actors::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using transport::backend_kind;

/// What the peer was asked for, and told.
struct heard {
  inbox<link_request> requests;
  inbox<link_notice> notices;
  std::function<void()> meanwhile = [] {};  ///< what happens while it is asked
};

/// The peer's end of a link: it takes what goes over GPUs, as one whose cache is on `gpus`, and refuses
/// everything else.
link_actor::behavior_type accepting_end(link_actor::pointer, std::shared_ptr<heard> ear,
                                        std::vector<std::string> gpus) {
  return {
      [](link_command&) {},
      [](link_event&) {},
      [ear, gpus](const link_request& request) {
        ear->requests.put(request);
        ear->meanwhile();
        link_reply reply;
        if (request.backend == static_cast<std::uint8_t>(backend_kind::xgmi)) {
          reply.gpus = gpus;
        } else {
          reply.failed = static_cast<std::uint8_t>(errc::backend_unavailable);
          reply.sentence = "only GPUs here";
        }
        return reply;
      },
      [ear](const link_notice& notice) { ear->notices.put(notice); },
      [](report_atom) { return link_report{}; },
  };
}

node_actor::behavior_type accepting_node(node_actor::pointer self, link_actor end) {
  return {
      [](members_atom, const membership&) {},
      [](rejoin_atom) {},
      [self, end](const link_request& request) { return self->delegate(end, request); },
      [](report_atom) { return node_report{}; },
      [](const call_request&) { return call_reply{}; },
  };
}

/// It sees two GPUs, and its cache is on the first one.
class node_with_gpus : public dialling_node {
 protected:
  std::shared_ptr<heard> ear = std::make_shared<heard>();
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
  /// Dials a peer whose cache is on those GPUs, and says why no link came.
  troupe::error dial(const std::vector<std::string>& theirs) {
    end = there.system().spawn(accepting_end, ear, theirs);
    there.own(end);
    start(there.system().spawn(accepting_node, end));
    EXPECT_TRUE(context->endpoint->allocate_on_gpu(0, 4096, "cache"));
    show(9);
    need();
    const auto told = gone->at(0);
    if (!told) return {errc::deadline, "nobody said that no link comes"};
    return told->why;
  }
  [[nodiscard]] std::vector<backend_kind> asked_for() const {
    std::vector<backend_kind> kinds;
    for (std::size_t i = 0; i < ear->requests.size(); ++i) {
      kinds.push_back(static_cast<backend_kind>(ear->requests.at(i)->backend));
    }
    return kinds;
  }
};

/// A peer that xgmi does not join with the node, and what is said of it.
struct apart {
  std::string name;
  std::vector<std::string> gpus;
  std::string why;
};

class out_of_reach : public node_with_gpus, public ::testing::WithParamInterface<apart> {
 protected:
  void SetUp() override { gpus->cut(0, 1); }
};

TEST_P(out_of_reach, is_found_out_before_it_is_connected_to_and_left_to_the_next_backend) {
  const auto why = dial(GetParam().gpus);
  const auto first = ear->requests.at(0);
  ASSERT_TRUE(first);
  EXPECT_THAT(first->gpus, ElementsAre("0000:0a:00.0"));
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::xgmi, backend_kind::tcp));
  EXPECT_THAT(ear->requests.at(1)->reason,
              AllOf(HasSubstr("xgmi failed: backend_unavailable: "), HasSubstr(GetParam().why)));
  // Its half of the link would wait until the time to connect is over.
  const auto notice = ear->notices.at(0);
  ASSERT_TRUE(notice) << "the acceptor was told nothing";
  EXPECT_EQ(notice->ended, 1);
  EXPECT_THAT(notice->why, HasSubstr(GetParam().why));

  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, AllOf(HasSubstr("no backend joins this node with prefill-0"),
                                 HasSubstr(GetParam().why),
                                 HasSubstr("; tcp failed: backend_unavailable: only GPUs here")));
}

TEST_P(out_of_reach, is_said_once_where_no_other_backend_may_be_used) {
  context->settings.fallback.clear();
  const auto why = dial(GetParam().gpus);
  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, HasSubstr(GetParam().why));
  ASSERT_TRUE(ear->notices.at(0)) << "the acceptor was told nothing";
  EXPECT_EQ(ear->requests.size(), 1u) << "what cannot be is not tried again";
  EXPECT_EQ(ear->notices.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(
    of_a_node, out_of_reach,
    ::testing::Values(
        apart{"unseen", {"0000:0c:00.0"}, "this process does not see the peer's GPU 0000:0c:00.0"},
        apart{"no_peer_access",
              {"0000:0b:00.0"},
              "GPU 0000:0a:00.0 does not reach the peer's GPU 0000:0b:00.0"},
        apart{"on_the_host",
              {},
              "the cache of prefill-0 is in memory of the host, which xgmi does not "
              "move"}),
    [](const auto& tested) { return tested.param.name; });

TEST_F(node_with_gpus, that_loses_them_while_it_dials_does_not_connect_either) {
  ear->meanwhile = [this] { gpus->lose(); };
  const auto why = dial({"0000:0a:00.0"});
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::xgmi, backend_kind::tcp));
  EXPECT_THAT(why.message,
              AllOf(HasSubstr("xgmi failed: backend_unavailable: "), HasSubstr("GPU")));
  ASSERT_TRUE(ear->notices.at(0)) << "the acceptor was told nothing";
}

TEST_F(node_with_gpus, asks_nobody_for_a_backend_that_does_not_move_its_own_cache) {
  context->cache_gpu.reset();
  const auto why = dial({"0000:0a:00.0"});
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::tcp));
  EXPECT_THAT(why.message,
              HasSubstr("xgmi failed: backend_unavailable: the cache of decode-0 is in memory of "
                        "the host, which xgmi does not move; tcp failed: "));
}

TEST_F(node_with_gpus, ends_at_once_where_its_own_cache_is_out_of_the_way_of_its_only_backend) {
  context->cache_gpu.reset();
  context->settings.fallback.clear();
  const auto why = dial({"0000:0a:00.0"});
  EXPECT_EQ(why.code, errc::peer_unreachable);
  EXPECT_THAT(why.message, HasSubstr("the cache of decode-0 is in memory of the host"));
  EXPECT_EQ(ear->requests.size(), 0u);
}

// -- what no node says of its GPUs

class strange_gpus : public node_with_gpus,
                     public ::testing::WithParamInterface<std::vector<std::string>> {};

TEST_P(strange_gpus, end_the_link_without_being_looked_for_or_printed) {
  const auto why = dial(GetParam());
  EXPECT_EQ(why.code, errc::out_of_range) << to_string(why);
  EXPECT_THAT(why.message, AllOf(HasSubstr("prefill-0 names GPUs"), Not(HasSubstr("\033"))));
  EXPECT_THAT(asked_for(), ElementsAre(backend_kind::xgmi));
  ASSERT_TRUE(ear->notices.at(0)) << "the acceptor was told nothing";
}

INSTANTIATE_TEST_SUITE_P(are, strange_gpus,
                         ::testing::Values(std::vector<std::string>(65, "0000:0a:00.0"),
                                           std::vector<std::string>{"0000:0a:00.0", ""},
                                           std::vector<std::string>{std::string(33, 'a')},
                                           std::vector<std::string>{"0000:\033[2J"}));

TEST_F(node_with_gpus, looks_for_as_many_gpus_as_a_node_may_name) {
  const auto why = dial(std::vector<std::string>(64, "0000:0c:00.0"));
  EXPECT_EQ(why.code, errc::peer_unreachable) << to_string(why);
  EXPECT_THAT(why.message, HasSubstr("does not see the peer's GPU 0000:0c:00.0"));
}

}  // namespace
}  // namespace troupe::actors::testing
