#pragma once

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/door/door.hpp"
#include "troupe/transport/owned_fd.hpp"

#include "open_descriptors.hpp"
#include "process_memory.hpp"
#include "sanitized.hpp"
#include "scratch_folder.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {

using namespace std::chrono_literals;
using transport::owned_fd;
using clock = std::chrono::steady_clock;
using troupe::testing::comes_true;
using troupe::testing::end_of_wait;
using troupe::testing::open_descriptors;
using troupe::testing::resident_bytes;
using troupe::testing::wait_limit;

/// A scratch folder, removed at the end of the test.
class scratch {
 public:
  [[nodiscard]] std::string path(const std::string& name) const {
    return folder_.path() + "/" + name;
  }
  std::string write(const std::string& name, const std::string& text, mode_t mode = 0600) const {
    const auto where = path(name);
    std::ofstream{where, std::ios::trunc} << text;
    ::chmod(where.c_str(), mode);
    return where;
  }

 private:
  troupe::testing::scratch_folder folder_{"door"};
};

/// A door under test. Collects the connections it admits and the notices it gives.
class listening_door {
 public:
  explicit listening_door(door_options options = {}) {
    options.notice = [this](const std::string& sentence) {
      const std::lock_guard lock{mutex_};
      notices_.push_back(sentence);
    };
    options.credentials.renewed = [this](const std::string&) { ++renewed; };
    options.credentials.failed = [this](const std::string& sentence) {
      const std::lock_guard lock{mutex_};
      alarms_.push_back(sentence);
    };
    auto made = door::create(std::move(options));
    EXPECT_TRUE(made) << to_string(made.error());
    if (!made) return;
    it = std::move(*made);
    const auto bound = it->listen("127.0.0.1", 0, [this](door_socket fd) {
      const std::lock_guard lock{mutex_};
      admitted_.emplace_back(fd);
    });
    EXPECT_TRUE(bound) << to_string(bound.error());
    if (bound) port = *bound;
  }

  /// The next admitted connection. Empty if none comes in time.
  owned_fd admitted() {
    owned_fd first;
    (void)comes_true([&] {
      const std::lock_guard lock{mutex_};
      if (admitted_.empty()) return false;
      first = std::move(admitted_.front());
      admitted_.erase(admitted_.begin());
      return true;
    });
    return first;
  }
  /// Waits a moment. Returns whether one more connection was admitted.
  bool admits_another() {
    std::this_thread::sleep_for(100ms);
    const std::lock_guard lock{mutex_};
    return !admitted_.empty();
  }
  [[nodiscard]] std::vector<std::string> notices() {
    const std::lock_guard lock{mutex_};
    return notices_;
  }
  [[nodiscard]] std::vector<std::string> alarms() {
    const std::lock_guard lock{mutex_};
    return alarms_;
  }
  bool noticed(const std::string& part) {
    return comes_true([&] {
      for (const auto& one : notices())
        if (one.find(part) != std::string::npos) return true;
      return false;
    });
  }

  std::atomic<int> renewed{0};
  std::uint16_t port{0};

 private:
  std::mutex mutex_;
  std::vector<std::string> notices_, alarms_;
  std::vector<owned_fd> admitted_;

 public:
  std::unique_ptr<door> it;  // declared last: its thread uses the members above
};

/// Connects and waits for the outcome, which comes at the deadline at the latest.
inline result<owned_fd> connect_from(door& from, std::uint16_t port,
                                     const std::string& host = "127.0.0.1",
                                     std::chrono::milliseconds deadline = wait_limit) {
  auto told = std::make_shared<std::promise<result<owned_fd>>>();
  auto when = told->get_future();
  from.connect(host, port, clock::now() + deadline, [told](result<door_socket> how) {
    if (how) {
      told->set_value(owned_fd{*how});
    } else {
      told->set_value(fail(how.error()));
    }
  });
  if (when.wait_for(deadline + wait_limit) != std::future_status::ready)
    return fail(errc::internal, "the door did not call back");
  return when.get();
}

inline bool connect_raw(const owned_fd& fd, std::uint16_t port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
}

/// A raw TCP connection to the port, without the door's handshake.
inline owned_fd dial_raw(std::uint16_t port) {
  owned_fd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  return connect_raw(fd, port) ? std::move(fd) : owned_fd{};
}

inline bool readable(int fd, std::chrono::milliseconds limit = wait_limit) {
  pollfd what{fd, POLLIN, 0};
  return ::poll(&what, 1, static_cast<int>(limit.count())) > 0;
}

/// Reads `size` bytes. Returns fewer if the connection ends or falls silent.
inline std::string read_exactly(int fd, std::size_t size) {
  std::string text(size, '\0');
  std::size_t got = 0;
  while (got < size && readable(fd)) {
    const auto n = ::recv(fd, text.data() + got, size - got, 0);
    if (n <= 0) break;
    got += static_cast<std::size_t>(n);
  }
  text.resize(got);
  return text;
}

/// Whether the other end closes the connection. Bytes that arrive before that are dropped.
inline bool hangs_up(int fd) {
  char piece[4096];
  const auto is_closed = [&] {
    if (!readable(fd, 50ms)) return false;
    const auto n = ::recv(fd, piece, sizeof piece, MSG_DONTWAIT);
    if (n == 0) return true;
    return n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
  };
  return comes_true(is_closed, 0ms);
}

inline void send_all(int fd, const std::string& text) {
  std::size_t sent = 0;
  while (sent < text.size()) {
    const auto n = ::send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd what{fd, POLLOUT, 0};
      if (::poll(&what, 1, static_cast<int>(std::chrono::milliseconds{wait_limit}.count())) <= 0)
        return;
    } else {
      return;
    }
  }
}

/// Whether bytes arrive in both directions between two ends.
inline bool talk(int one, int other) {
  send_all(one, "there");
  send_all(other, "and back");
  return read_exactly(other, 5) == "there" && read_exactly(one, 8) == "and back";
}

/// CPU time that this process has used.
inline std::chrono::microseconds cpu_time() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return std::chrono::seconds{used.ru_utime.tv_sec + used.ru_stime.tv_sec} +
         std::chrono::microseconds{used.ru_utime.tv_usec + used.ru_stime.tv_usec};
}

/// The share of one core that the process uses while this thread sleeps (1 is a whole core).
inline double busy_for(std::chrono::milliseconds time) {
  const auto began = clock::now();
  const auto used = cpu_time();
  std::this_thread::sleep_for(time);
  return std::chrono::duration<double>{cpu_time() - used} / (clock::now() - began);
}

}  // namespace troupe::actors::testing
