#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "troupe/actors/membership/drains.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/membership/router.hpp"

#include "world.hpp"

namespace troupe::actors::cluster_simulation {

/// One life of the supervisor: the real table and router in a shell that acts as the real actor.
struct supervisor_life : process, std::enable_shared_from_this<supervisor_life> {
  /// Starts from what the previous life has saved.
  supervisor_life(world& in, std::vector<expected_slot> slots,
                  const std::optional<membership_record>& left);

  using answer = std::function<void(const placement&)>;

  // -- messages
  registration take_in(const std::shared_ptr<connection>& over,
                       const registration_request& request);
  heartbeat_ack heard(const heartbeat& beat);
  void place(const placement_request& request, answer then);
  void placed_request_ended(const std::string& request);
  void connection_lost(const std::shared_ptr<connection>& which);
  void leaves(const std::string& name, std::uint64_t which);
  /// An operator drains a node.
  void drain(const std::string& name, milliseconds deadline);
  void tick();
  /// Called after each change of the table: logs, places, publishes.
  void settle();
  void take_apart() {
    held_up.clear();
    peers_.clear();
    waiting_.clear();
  }

  const std::uint32_t number;  ///< of this life among the supervisor's lives
  moment ticks_again{};        ///< its clock does not tick before then

  [[nodiscard]] const membership_table& members() const noexcept { return table_; }

 private:
  [[nodiscard]] moment clock() const { return world_.clock_of(*this); }
  void judge_drains();
  void order(const drain_list::rank& who, drain_step step);
  void broadcast();
  void deliver(std::vector<served_ticket> served);
  void check(const placement& given);
  void check_states();
  void keep();

  world& world_;
  membership_table table_;
  router routes_;
  drain_list drains_;
  std::map<std::string, std::shared_ptr<connection>> peers_;
  std::set<std::string> uninformed_;
  std::map<ticket_id, answer> waiting_;
  /// Lives that the judge knows to be replaced under their name.
  std::set<std::uint64_t> replaced_;
  std::set<std::uint64_t>
      failing_;                   ///< lives that have reported a failure and not registered again
  std::set<std::uint64_t> late_;  ///< lives told to leave because their drain deadline passed
  std::uint64_t last_epoch_{0};
  std::uint64_t kept_epoch_{0};
  moment kept_at_{};
};

}  // namespace troupe::actors::cluster_simulation
