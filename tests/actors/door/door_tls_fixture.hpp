#pragma once

#include "troupe/actors/door/certificates.hpp"

#include "door_fixture.hpp"

namespace troupe::actors::testing {

/// A certificate lifetime that began an hour ago.
inline certificate_life lasting(std::chrono::seconds time) {
  const auto now = std::chrono::system_clock::now();
  return {now - 1h, now + time};
}

inline certificate_pair authority_of(const std::string& cluster) {
  auto made = make_authority(cluster, lasting(24h));
  EXPECT_TRUE(made) << to_string(made.error());
  return made ? *made : certificate_pair{};
}

inline certificate_pair node_of(const certificate_pair& authority, const std::string& cluster,
                                std::chrono::seconds time = 24h) {
  auto made = make_node_certificate(authority, cluster, lasting(time));
  EXPECT_TRUE(made) << to_string(made.error());
  return made ? *made : certificate_pair{};
}

/// The files of one node in mode tls, each of which a test can replace.
class node_files {
 public:
  node_files(const certificate_pair& authority, const certificate_pair& node,
             std::string cluster = "test")
      : cluster_{std::move(cluster)} {
    write(authority.certificate, node);
    files_.write("secret", std::string(64, 's'));
  }
  void write(const std::string& authorities, const certificate_pair& node) const {
    files_.write("ca", authorities, 0644);
    files_.write("key", node.key);
    files_.write("certificate", node.certificate, 0644);
  }
  [[nodiscard]] const scratch& files() const { return files_; }
  [[nodiscard]] door_options options() const {
    door_options made;
    made.security = {door_security::mode::tls,   cluster_,           files_.path("secret"),
                     files_.path("certificate"), files_.path("key"), files_.path("ca")};
    return made;
  }

 private:
  std::string cluster_;
  scratch files_;
};

/// Two doors of one cluster and a connection between them.
class encrypted_pair {
 public:
  encrypted_pair()
      : authority{authority_of("test")},
        files{authority, node_of(authority, "test")},
        at{files.options()},
        from{files.options()} {
    auto connected = connect_from(*from.it, at.port);
    EXPECT_TRUE(connected) << to_string(connected.error());
    if (connected) here = std::move(*connected);
    there = at.admitted();
    EXPECT_TRUE(there);
  }

  certificate_pair authority;
  node_files files;
  listening_door at, from;
  owned_fd here, there;  ///< the ends of the dialling and of the accepting side
};

}  // namespace troupe::actors::testing
