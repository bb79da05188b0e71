#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transfer.hpp"

namespace troupe::actors::cluster_simulation {

/// Sends requests: places each one, calls both engines, and places it again when an attempt fails,
/// a bounded number of times. A request has one outcome.
class frontend {
 public:
  explicit frontend(world& in);

  void begin();
  [[nodiscard]] bool all_have_ended() const noexcept;
  /// Drops attempts that have settled.
  void sweep();
  /// The requests and attempts that have not ended. Empty if all have.
  [[nodiscard]] std::string unsettled() const;

 private:
  static constexpr std::uint32_t most_attempts = 5;

  struct request {
    std::uint32_t attempts{0};
    std::uint64_t asked{0};  ///< placements asked for; identifies answers to a former one
    std::string as;          ///< the id under which it was last placed
    std::vector<std::string>
        lost;  ///< nodes of that placement that are gone; the request is placed once more
    std::uint32_t outcomes{0};
  };
  /// State of one attempt.
  struct progress {
    std::uint32_t request{0};
    std::string placed_as;
    std::shared_ptr<transfer> what;
    std::array<std::string, 2> nodes;
    bool ended{false};
  };

  void place(std::uint32_t number);
  void placed(std::uint32_t number, std::uint64_t asked, const std::string& as,
              const placement& where, std::uint32_t by);
  void call(const std::shared_ptr<progress>& attempt, side s);
  void told(const std::shared_ptr<progress>& attempt, side s, const std::optional<error>& why);
  void attempt_failed(const std::shared_ptr<progress>& attempt, side s, const error& why);
  void attempt_ended(const std::shared_ptr<progress>& attempt);
  void try_again(std::uint32_t number);
  void end(std::uint32_t number, bool well);
  void placed_request_ended(const std::string& as);

  world& world_;
  std::vector<request> requests_;
  std::map<std::uint64_t, std::shared_ptr<progress>> attempts_;
  std::uint64_t last_transfer_{0};
  std::uint64_t ended_{0};
};

}  // namespace troupe::actors::cluster_simulation
