#pragma once

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pair.hpp"

namespace troupe::transport::shm_test {

/// A two-way pipe for the content of cluster messages: offers and grants.
class channel {
 public:
  explicit channel(int fd) : fd_{fd} {}
  channel(const channel&) = delete;
  channel& operator=(const channel&) = delete;
  ~channel() { ::close(fd_); }

  void send(std::span<const std::byte> bytes) {
    const std::uint64_t size = bytes.size();
    if (::write(fd_, &size, sizeof size) < 0 ||
        (size != 0 && ::write(fd_, bytes.data(), size) < 0)) {
      std::abort();
    }
  }
  std::vector<std::byte> receive() {
    std::uint64_t size = 0;
    if (::recv(fd_, &size, sizeof size, MSG_WAITALL) != sizeof size) ::_exit(3);
    std::vector<std::byte> bytes(size);
    if (size != 0 && ::recv(fd_, bytes.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
      ::_exit(3);
    }
    return bytes;
  }
  template <class T>
  void send_value(const T& value) {
    send(std::as_bytes(std::span{&value, 1}));
  }
  template <class T>
  T receive_value() {
    const auto bytes = receive();
    T value{};
    std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
    return value;
  }

  void send_grant(const remote_grant& grant) {
    send_value(grant.id);
    send_value(grant.region);
    send_value(grant.owner);
    send_value(grant.transfer);
    send_value(grant.rights);
    send_value(grant.region_size);
    send(std::as_bytes(std::span{grant.permitted.extents()}));
    send(grant.key);
  }
  remote_grant receive_grant() {
    remote_grant grant;
    grant.id = receive_value<std::uint64_t>();
    grant.region = receive_value<region_id>();
    grant.owner = receive_value<incarnation>();
    grant.transfer = receive_value<transfer_id>();
    grant.rights = receive_value<access>();
    grant.region_size = receive_value<std::uint64_t>();
    const auto listed = receive();
    std::vector<extent> permitted(listed.size() / sizeof(extent));
    std::memcpy(permitted.data(), listed.data(), listed.size());
    grant.permitted = std::move(permitted);
    grant.key = receive();
    return grant;
  }

 private:
  int fd_;
};

/// Brings up the link of `self` to the process at the other end of `line`.
inline void join(node& self, incarnation peer, link_role role, channel& line) {
  self.open(peer, role);
  const auto offer = self.to_peer->offer();
  line.send(offer.payload);
  const link_offer theirs{.kind = backend_kind::shm, .owner = peer, .payload = line.receive()};
  if (auto ok = self.to_peer->connect(theirs); !ok) std::abort();
  if (!eventually([&] { return self.said->ups() == 1; })) std::abort();
}

/// Another process that runs `body` and then waits to be killed. Create it before this process has
/// any thread.
class other_process {
 public:
  explicit other_process(const std::function<void(channel&)>& body) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      channel line{ends[1]};
      body(line);
      while (true) ::pause();
    }
    ::close(ends[1]);
    line_ = std::make_unique<channel>(ends[0]);
  }
  other_process(const other_process&) = delete;
  other_process& operator=(const other_process&) = delete;
  ~other_process() { kill(); }

  [[nodiscard]] channel& line() { return *line_; }
  void signal(int number) const { ::kill(pid_, number); }
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    ::waitpid(pid_, &status, WUNTRACED);
  }
  void go_on() const { signal(SIGCONT); }
  void kill() {
    if (pid_ <= 0) return;
    signal(SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
  }

 private:
  pid_t pid_{0};
  std::unique_ptr<channel> line_;
};

}  // namespace troupe::transport::shm_test
