#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "troupe/actors/operations/block_line.hpp"
#include "troupe/actors/runner/operation_runner.hpp"

#include "link_end.hpp"

namespace troupe::actors::engine_simulation {

using link_simulation::end_ptr;
using link_simulation::mailbox;
using link_simulation::microseconds;
using link_simulation::milliseconds;
using link_simulation::moment;
using link_simulation::wire_world;
using simulation::dice;

class engine_node;

/// What a node meets in the simulated cluster.
class node_world {
 public:
  virtual ~node_world() = default;
  [[nodiscard]] virtual wire_world& transports() = 0;
  virtual void need_link(engine_node& of, actors::need_link order) = 0;
  /// Something was told to the engine of the node, maybe.
  virtual void events_came(engine_node& of) = 0;
  virtual void said(const engine_node& of, const std::string& what) = 0;
  /// The store hears the last word of a put now, if it hears anything.
  virtual void last_word_of_put(const std::string& store) = 0;
};

/// One life of a node: the real runner and its real sessions, and what stands for their actors.
class engine_node final : public link_simulation::node,
                          public operations::runner_surroundings,
                          public std::enable_shared_from_this<engine_node> {
 public:
  explicit engine_node(node_world& in) : world_{in} {}

  /// Once the node has its context, with a cache.
  void open();
  void take_apart() override;

  void order(engine_command command);
  /// Runs it when the runner has taken what was ordered before.
  void behind_orders(std::function<void()> what) {
    put([what = std::move(what)](auto&) { what(); });
  }
  void hear(node_notice notice);
  void hear(runner_event event);
  void hear_of_session(const end_ptr& from, transfer_id transfer, session_event event);
  void link_ended(std::uint64_t link);
  /// The actor of one of its sessions crashes. Returns false if it has none.
  bool crash_a_session(dice& chance);
  /// Runs it in this process after a pause.
  void here(microseconds after, std::function<void()> what);
  [[nodiscard]] node_world& world() noexcept { return world_; }
  [[nodiscard]] transfer_reports report() const { return runner_->report(); }
  /// What is left of ended operations; empty: nothing.
  [[nodiscard]] std::string leftovers() const;

  // -- operations::runner_surroundings

  [[nodiscard]] time_point now() const override;
  [[nodiscard]] std::uint64_t draw() override;
  void wake_after(std::chrono::nanoseconds pause) override;
  void tell_itself(runner_event event) override { hear(std::move(event)); }
  void do_elsewhere(std::function<runner_event()> work) override;
  void connect(connect_operations& /*to*/) override {}
  void need_link(actors::need_link what) override;
  void tell_pool(pool_command what) override;
  void tell_link(const link_handle& link, link_command what) override;
  void watch_link(const link_handle& link) override;
  session_actor begin_session(transfer_id transfer, const link_handle& link,
                              std::unique_ptr<session> made) override;
  session_actor begin_session_elsewhere(transfer_id transfer, const link_handle& link,
                                        std::unique_ptr<session> made) override;
  void tell_session(transfer_id transfer, const session_actor& to, session_event event) override;

 private:
  class running_session;

  void put(std::function<void(operations::operation_runner&)> what);
  void begin(transfer_id transfer, const link_handle& link, std::unique_ptr<session> made,
             microseconds pause);
  void order_link(std::uint64_t link, link_command what);
  void handle(const pool_command& command);
  void serve_pool();
  void arm_pool();

  node_world& world_;
  std::unique_ptr<operations::operation_runner> runner_;
  std::optional<block_line> line_;
  bool pool_ticks_{false};
  mailbox to_runner_, to_pool_;
  std::map<transfer_id, std::shared_ptr<running_session>> sessions_;
  std::set<std::uint64_t> watched_;  ///< ids of links
};
using engine_node_ptr = std::shared_ptr<engine_node>;

}  // namespace troupe::actors::engine_simulation
