#pragma once

#include <chrono>
#include <cstdint>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "troupe/transport/owned_fd.hpp"

#include "waiting.hpp"

namespace troupe::testing {

/// A port that accepts connections and never greets.
struct rude_host {
  transport::owned_fd listens;
  std::uint16_t port{0};

  rude_host() : listens{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    const int on = 1;
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const generic = reinterpret_cast<sockaddr*>(&at);
    socklen_t size = sizeof at;
    EXPECT_EQ(::setsockopt(listens.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    const timeval longest{std::chrono::duration_cast<std::chrono::seconds>(wait_limit).count(), 0};
    EXPECT_EQ(::setsockopt(listens.get(), SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest), 0);
    EXPECT_EQ(::bind(listens.get(), generic, size), 0);
    EXPECT_EQ(::listen(listens.get(), 8), 0);
    EXPECT_EQ(::getsockname(listens.get(), generic, &size), 0);
    port = ntohs(at.sin_port);
  }
  /// The next connection, closed with the object; invalid if the port is shut or nobody connects.
  [[nodiscard]] transport::owned_fd guest() const {
    return transport::owned_fd{::accept4(listens.get(), nullptr, nullptr, SOCK_CLOEXEC)};
  }
};

}  // namespace troupe::testing
