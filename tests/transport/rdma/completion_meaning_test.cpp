#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/rdma/queue_pair.hpp"

// The explanation of a bad completion, for the person who must find the cause.
namespace troupe::transport::rdma {

namespace {

struct expected {
  ibv_wc_status status{};
  errc code{errc::link_broken};
  std::vector<std::string> hints;
};

}  // namespace

TEST(rdma_completion, names_the_usual_causes_of_what_went_wrong) {
  const std::vector<expected> all{
      {IBV_WC_RETRY_EXC_ERR,
       errc::peer_lost,
       {"process ended", "wire is down", "firewall", "MTU", "gid_index"}},
      {IBV_WC_REM_ACCESS_ERR, errc::link_broken, {"grant", "not registered", "key"}},
      {IBV_WC_RNR_RETRY_EXC_ERR, errc::link_broken, {"no buffer"}},
      {IBV_WC_REM_INV_REQ_ERR, errc::link_broken, {"too long", "MTU"}},
      {IBV_WC_LOC_QP_OP_ERR, errc::link_broken, {"port down"}},
      {IBV_WC_LOC_PROT_ERR, errc::internal, {"our own memory"}},
      {IBV_WC_WR_FLUSH_ERR, errc::link_broken, {"error state"}},
      {IBV_WC_MW_BIND_ERR, errc::link_broken, {"windows"}}};
  for (const auto& one : all) {
    const auto said = meaning_of(one.status, {});
    EXPECT_EQ(said.code, one.code) << to_string(said);
    for (const auto& hint : one.hints) {
      EXPECT_NE(said.message.find(hint), std::string::npos) << hint << " in: " << said.message;
    }
  }
}

TEST(rdma_completion, names_the_status_whatever_it_is) {
  for (int status = IBV_WC_LOC_LEN_ERR; status <= IBV_WC_TM_RNDV_INCOMPLETE; ++status) {
    const auto which = static_cast<ibv_wc_status>(status);
    const auto said = meaning_of(which, {});
    EXPECT_NE(said.message.find(::ibv_wc_status_str(which)), std::string::npos) << said.message;
    EXPECT_GT(said.message.size(), std::string{::ibv_wc_status_str(which)}.size() + 10);
  }
}

TEST(rdma_completion, says_how_long_a_peer_was_waited_for) {
  rdma_options options;
  options.timeout = 18;
  options.retry_count = 6;
  const auto said = meaning_of(IBV_WC_RETRY_EXC_ERR, options);
  EXPECT_NE(said.message.find("7516 ms"), std::string::npos) << said.message;
}

}  // namespace troupe::transport::rdma
