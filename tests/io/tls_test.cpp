#include <fstream>

#include <sys/stat.h>

#include "troupe/actors/door/certificates.hpp"

#include "agents.hpp"
#include "scratch_folder.hpp"

// Agents of one authority, which encrypt their messages.
namespace troupe::io {

using transport::direction;

namespace {

struct files_of_agent {
  testing::scratch_folder folder;

  files_of_agent(const actors::certificate_pair& authority, const actors::certificate_pair& own) {
    write("ca", authority.certificate, 0644);
    write("certificate", own.certificate, 0644);
    write("key", own.key, 0600);
    write("secret", std::string(64, 's'), 0600);
  }
  void write(const std::string& name, const std::string& text, mode_t mode) const {
    const auto path = folder.path() + "/" + name;
    std::ofstream{path} << text;
    ::chmod(path.c_str(), mode);
  }
  [[nodiscard]] std::function<void(agent_options&)> use() const {
    return [where = folder.path()](agent_options& options) {
      options.security = {actors::door_security::mode::tls, "test",         where + "/secret",
                          where + "/certificate",           where + "/key", where + "/ca"};
    };
  }
};

actors::certificate_life today() {
  const auto now = std::chrono::system_clock::now();
  return {now - 1h, now + 24h};
}

}  // namespace

TEST(tls_test, agents_of_one_authority_reach_each_other_and_no_others) {
  const way how{transport::backend_kind::tcp, 1};
  const auto authority = actors::make_authority("test", today()).value();
  const auto other_authority = actors::make_authority("test", today()).value();
  const files_of_agent ours{authority,
                            actors::make_node_certificate(authority, "test", today()).value()};
  const files_of_agent others{
      other_authority, actors::make_node_certificate(other_authority, "test", today()).value()};
  agent_node a{"a", how, ours.use()};
  const agent_node b{"b", how, ours.use()};
  const agent_node stranger{"stranger", how, others.use()};
  const auto end_with = [&](const agent_node& other) {
    const auto peer = a.self->add_peer(other.self->describe(std::vector{other.kv}).value()).value();
    const auto over = a.self->session(a.kv, peer, other.kv.value).value();
    const auto sent = a.self->move(direction::write, over, std::vector<segment>{{0, 0, 65'536}},
                                   bytes_of("sealed"), 0ms);
    EXPECT_EQ(a.self->wait(std::vector{*sent}, wait_for::all, long_time), 1U);
    return a.self->status_of(*sent).value();
  };
  a.fill(1);
  const auto good = end_with(b);
  EXPECT_EQ(good.now, state::done) << (good.why ? to_string(*good.why) : "");
  EXPECT_EQ(std::memcmp(a.memory.data(), b.memory.data(), 65'536), 0);
  ASSERT_TRUE(testing::comes_true([&] { return b.self->take_notices(1).size() == 1; }));
  const auto bad = end_with(stranger);
  ASSERT_EQ(bad.now, state::failed);
  EXPECT_EQ(bad.why->code, errc::unauthorized) << to_string(*bad.why);
}

}  // namespace troupe::io
