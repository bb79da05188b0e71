#pragma once

/// The two engines of the tests: how they handle one request, step by step, and what they check
/// meanwhile. Everything that must never happen is a line in a file to which all processes of a
/// test append.
///
///   prefill: send -> computes layer by layer -> seals -> outcome -> unpinned -> spoils its blocks
///   decode:  receive -> outcome -> looks at the bytes, uses them for a time, looks again -> unpinned
///            -> spoils the blocks, waits, looks whether anyone else wrote -> frees
///
/// The seed of the request decides whether an engine frees its blocks as soon as there is an
/// outcome, so that the pool must keep them in quarantine, or only when they are unpinned.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cache_bytes.hpp"
#include "orders.hpp"

namespace troupe::testing {

/// Appends whole lines to a file that other processes also append to.
class violation_file {
 public:
  violation_file(const std::string& path, std::string node);
  ~violation_file();
  violation_file(const violation_file&) = delete;
  violation_file& operator=(const violation_file&) = delete;
  void say(const std::string& request, const std::string& what) const;

 private:
  int fd_;
  std::string node_;
};

using job_clock = std::chrono::steady_clock;
using call_reply_to = std::function<void(result<std::vector<std::uint8_t>>)>;

class job;

struct job_surroundings {
  engine& node;
  cache_bytes& cache;
  violation_file& violations;
  engine_counters& counters;
  std::function<void(const job&)> outcome;  ///< called once with the job
  /// Total time for which this process has been stopped; an outcome is not late because of it.
  const std::chrono::milliseconds& stood_still;
};

/// One operation of the engine.
class job {
 public:
  virtual ~job() = default;
  void hear(const event& e);
  /// Does what is due at `now`. Returns false once it is over and everything is given back.
  [[nodiscard]] bool advance(job_clock::time_point now);
  [[nodiscard]] operation_id id() const { return id_; }
  [[nodiscard]] const std::string& request() const { return request_; }
  /// Empty if it was done or has not ended.
  [[nodiscard]] const std::optional<error>& failure() const { return failed_; }

 protected:
  job(job_surroundings& around, std::string request, std::uint64_t seed,
      std::chrono::milliseconds deadline);
  virtual void allocated(const kvcache::allocation&) {}
  virtual void ended() = 0;
  /// Runs the next step, which is due. Returns false if the job is over.
  virtual bool step(job_clock::time_point now) = 0;

  void begin(operation_id id);
  void conclude();
  void give_back();
  [[nodiscard]] bool frees_early() const { return (seed_ >> 5U) % 2 == 0; }
  void violated(const std::string& what);

  job_surroundings& around_;
  std::string request_;
  std::uint64_t seed_;
  operation_id id_;
  kvcache::allocation blocks_;
  bool holds_{false};
  bool unpinned_{false};
  std::optional<event_done> done_;
  std::optional<error> failed_;
  job_clock::time_point due_{};

 private:
  std::chrono::milliseconds deadline_;
  job_clock::time_point late_{};
  std::chrono::milliseconds still_before_{0};
  bool called_late_{false};
};

/// Returns null if the call was answered with an error.
[[nodiscard]] std::unique_ptr<job> begin_prefill(job_surroundings& around,
                                                 const prefill_order& order, call_reply_to reply);
[[nodiscard]] std::unique_ptr<job> begin_decode(job_surroundings& around, const decode_order& order,
                                                call_reply_to reply);

}  // namespace troupe::testing
