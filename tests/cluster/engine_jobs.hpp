#pragma once

/// The two engines of the tests: what they do with one request, one step at a time, and what they
/// watch meanwhile. Everything that must never happen is a line in a file that all processes of a
/// test append to.
///
///   prefill: send -> computes layer by layer -> seals -> outcome -> unpinned -> spoils its blocks
///   decode:  receive -> outcome -> looks at the bytes, uses them for a time, looks again -> unpinned
///            -> spoils the blocks, waits, looks whether anyone else wrote -> frees
///
/// Either frees its blocks as soon as there is an outcome (the pool must keep them in quarantine) or
/// only when they are unpinned, as the seed of the request says.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cache_bytes.hpp"
#include "orders.hpp"

namespace troupe::testing {

/// Appends lines, each whole, whoever else writes.
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
  std::function<void(const job&)> outcome;  ///< of the job; once
  /// For how long altogether this process stood still: no outcome is late for that.
  const std::chrono::milliseconds& stood_still;
};

/// One operation of the engine.
class job {
 public:
  virtual ~job() = default;
  void hear(const event& e);
  /// Does what is due at `now`. False: it is over and all is given back.
  [[nodiscard]] bool advance(job_clock::time_point now);
  [[nodiscard]] operation_id id() const { return id_; }
  [[nodiscard]] const std::string& request() const { return request_; }
  /// Nothing: it was done, or has not ended.
  [[nodiscard]] const std::optional<error>& failure() const { return failed_; }

 protected:
  job(job_surroundings& around, std::string request, std::uint64_t seed,
      std::chrono::milliseconds deadline);
  virtual void allocated(const kvcache::allocation&) {}
  virtual void ended() = 0;
  /// The next step of it is due. False: it is over.
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

/// Null: the call was answered with why not.
[[nodiscard]] std::unique_ptr<job> begin_prefill(job_surroundings& around,
                                                 const prefill_order& order, call_reply_to reply);
[[nodiscard]] std::unique_ptr<job> begin_decode(job_surroundings& around, const decode_order& order,
                                                call_reply_to reply);

}  // namespace troupe::testing
