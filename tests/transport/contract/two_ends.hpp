#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "pair.hpp"

namespace troupe::transport::contract {

/// Two nodes of this process with GPU doubles, for tests specific to one backend. The derived class
/// creates and joins them.
struct two_ends {
  explicit two_ends(std::uint32_t workers) : threads{workers} {}

  void make(end& e, incarnation self, xgmi_options gpus) const {
    e.self = self;
    endpoint_options options;
    options.self = self;
    options.num_workers = threads;
    options.peer_silence = longer_than_any_wait;
    options.xgmi = std::move(gpus);
    e.place = endpoint::create(std::move(options)).value();
  }
  /// Call once both links are open. Returns when they are up.
  void connect() {
    contract::join(a, b);
    EXPECT_TRUE(until([&] { return a.sink->ups == 1 && b.sink->ups == 1; }));
  }
  /// Drives both ends until `done` returns true. Returns false if it never does.
  bool until(const std::function<bool()>& done) const {
    return comes_within(testing::wait_limit, done);
  }
  /// Like `until`, with a limit: for checking that something does not happen within it.
  bool comes_within(std::chrono::milliseconds limit, const std::function<bool()>& done) const {
    for (const auto last = clock::now() + limit; !done(); drive()) {
      if (clock::now() > last) return false;
    }
    return true;
  }
  void drive_for(std::chrono::milliseconds time) const {
    for (const auto last = clock::now() + time; clock::now() < last;) drive();
  }
  /// A batch of the transfer that the first piece's grant belongs to.
  batch work(direction dir, std::vector<piece> pieces) {
    batch made;
    made.id = batch_id{++last_batch};
    made.transfer = pieces.front().remote->transfer;
    made.dir = dir;
    made.pieces = std::move(pieces);
    return made;
  }
  completion run(end& from, batch what) {
    const auto id = what.id.value;
    const auto before = from.sink->completed();
    EXPECT_TRUE(from.wire->post(std::move(what)));
    EXPECT_TRUE(until([&] { return from.sink->completed() > before; }));
    return from.sink->outcome_of(id);
  }

  std::uint32_t threads;
  std::uint64_t last_batch{0};
  end a;
  end b;

 private:
  void drive() const {
    if (threads == 0) {
      a.place->poll();
      b.place->poll();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds{100});
    }
  }
};

}  // namespace troupe::transport::contract
