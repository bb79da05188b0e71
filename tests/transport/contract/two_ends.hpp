#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "pair.hpp"

namespace troupe::transport::contract {

/// Two nodes of this process with GPUs that are none, for tests of one backend's own. The leaf makes and
/// joins them.
struct two_ends {
  explicit two_ends(std::uint32_t workers) : threads{workers} {}

  void make(end& e, incarnation self, xgmi_options gpus) const {
    e.self = self;
    endpoint_options options;
    options.self = self;
    options.num_workers = threads;
    options.xgmi = std::move(gpus);
    e.place = endpoint::create(std::move(options)).value();
  }
  /// Once both links are open; returns when they are up.
  void connect() {
    contract::join(a, b);
    EXPECT_TRUE(until([&] { return a.sink->ups == 1 && b.sink->ups == 1; }));
  }
  bool until(const std::function<bool()>& done, std::chrono::milliseconds limit) const {
    const auto last = clock::now() + limit;
    while (!done()) {
      if (clock::now() > last) return false;
      if (threads == 0) {
        a.place->poll();
        b.place->poll();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds{100});
      }
    }
    return true;
  }
  bool until(const std::function<bool()>& done) const { return until(done, longest); }
  /// Of the transfer that the first piece's grant was given for.
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
  std::chrono::milliseconds longest{patience()};  ///< that `until` waits
  std::uint64_t last_batch{0};
  end a;
  end b;
};

}  // namespace troupe::transport::contract
