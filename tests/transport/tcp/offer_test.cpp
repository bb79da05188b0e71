#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/tcp/socket.hpp"
#include "troupe/transport/tcp/wire.hpp"

// The address in an offer: found by whoever listens there, never looked up by the peer.
namespace troupe::transport::tcp {

namespace {

constexpr incarnation us{0x1111};
constexpr incarnation them{0x2222};

struct no_sink final : link_sink {
  void on_up() override {}
  void on_completion(completion) override {}
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override {}
};

std::unique_ptr<endpoint> node_at(const std::string& host, incarnation self) {
  endpoint_options options;
  options.self = self;
  options.host = host;
  return endpoint::create(std::move(options)).value();
}

std::shared_ptr<link> open(endpoint& place, link_role role, incarnation peer) {
  return place.open(backend_kind::tcp, {.role = role, .peer = peer}, std::make_shared<no_sink>())
      .value();
}

}  // namespace

TEST(tcp_offer, gives_the_address_of_a_node_that_is_configured_by_name) {
  const auto place = node_at("localhost", us);
  const auto wire = open(*place, link_role::acceptor, them);
  const auto said = decode_offer(wire->offer().payload).value();
  EXPECT_TRUE(said.host == "127.0.0.1" || said.host == "::1") << said.host;
  EXPECT_TRUE(offered_address(said.host, said.port));
  wire->close();
}

TEST(tcp_offer, a_name_is_refused_in_either_role_and_not_looked_up) {
  const auto place = node_at("127.0.0.1", us);
  for (const auto role : {link_role::initiator, link_role::acceptor}) {
    const auto wire = open(*place, role, them);
    const offer_payload theirs{.host = "localhost", .port = 1, .lanes = 1, .link = 5, .secret = {}};
    const auto ok = wire->connect({backend_kind::tcp, them, encode(theirs)});
    ASSERT_FALSE(ok);
    EXPECT_EQ(ok.error().code, errc::invalid_config);
    EXPECT_NE(ok.error().message.find("'localhost', which is not a numeric address"),
              std::string::npos)
        << ok.error().message;
    wire->close();
  }
}

}  // namespace troupe::transport::tcp
