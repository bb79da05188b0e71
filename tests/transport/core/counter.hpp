#pragma once

/// A pollable that counts the calls of its progress engine.

#include <atomic>
#include <chrono>
#include <functional>

#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/transport/progress_engine.hpp"

#include "waiting.hpp"

namespace troupe::transport {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;
using troupe::testing::comes_true;
using troupe::testing::end_of_wait;
using troupe::testing::wait_limit;

struct counter final : pollable {
  counter() : fd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}
  ~counter() override { ::close(fd); }
  bool on_ready(std::uint64_t key, std::uint32_t) override {
    std::uint64_t value = 0;
    static_cast<void>(::read(fd, &value, sizeof value));
    last_key = key;
    if (when_ready) when_ready();
    ++ready;
    return true;
  }
  void on_timer(std::uint64_t key, steady_time) override {
    last_key = key;
    ++timers;
  }
  bool on_poll(steady_time) override {
    ++polls;
    return false;
  }
  bool before_sleep() override {
    ++sleeps;
    return true;
  }
  void after_sleep() override { ++wakes; }
  void ring() const {
    const std::uint64_t one = 1;
    static_cast<void>(::write(fd, &one, sizeof one));
  }
  int fd;
  std::function<void()> when_ready;
  std::atomic<int> ready{0}, timers{0}, polls{0}, sleeps{0}, wakes{0};
  std::atomic<std::uint64_t> last_key{0};
};

}  // namespace troupe::transport
