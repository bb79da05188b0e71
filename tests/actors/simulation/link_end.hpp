#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "troupe/actors/link/peer_link.hpp"

#include "simulated_wire.hpp"

namespace troupe::actors::link_simulation {

struct node;
class link_end;
using end_ptr = std::shared_ptr<link_end>;

/// What an end of a link meets in the simulated cluster.
class end_world {
 public:
  virtual ~end_world() = default;
  [[nodiscard]] virtual wire_world& wires() = 0;
  /// A message from one node to another: in order, late, or never if the other one is dead.
  virtual void mail(const std::shared_ptr<node>& from, const std::shared_ptr<node>& to,
                    std::function<void()> what) = 0;
  /// A node's answer to a request for a link; null if it refuses to make an end.
  [[nodiscard]] virtual end_ptr make_acceptor(const std::shared_ptr<node>& at,
                                              const link_request& request) = 0;
  virtual void to_runner(const end_ptr& of, runner_event event) = 0;
  virtual void to_session(const end_ptr& of, transfer_id transfer, session_event event) = 0;
  /// The actor of the end has ended.
  virtual void ended(const end_ptr& of) = 0;
};

/// One life of a node.
struct node : process {
  node() = default;
  node(const node&) = delete;
  node& operator=(const node&) = delete;
  virtual ~node() = default;

  context_ptr context;
  wire_endpoint* endpoint{nullptr};  ///< of the context
  std::vector<end_ptr> ends;

  /// Lets go of its ends, and they of each other.
  virtual void take_apart();
};
using node_ptr = std::shared_ptr<node>;

/// One end of a link: the real machine, and what stands for its actor.
class link_end final : public links::link_surroundings,
                       public std::enable_shared_from_this<link_end> {
 public:
  /// The end still has to `begin`.
  link_end(end_world& in, node_ptr at, node_ptr peer, transport::link_role role,
           std::uint64_t number, std::uint64_t asked);

  [[nodiscard]] const node_ptr& at() const noexcept { return at_; }
  [[nodiscard]] const node_ptr& peer() const noexcept { return peer_; }
  [[nodiscard]] bool finished() const noexcept { return finished_; }
  [[nodiscard]] links::peer_link& link() noexcept { return link_; }
  /// Runs it as the handling of a message from that end, if this one has not finished.
  void handle(const end_ptr& from, const std::function<void()>& what);
  /// An order of this process. `then` is called once the link has taken it.
  void order(link_command what, std::function<void()> then = {});
  /// The process of the peer is gone, as CAF tells it.
  void peer_process_died();
  /// Lets go of the other ends, which may hold this one.
  void take_apart() { current_ = newcomer_ = other_ = nullptr; }

  // -- links::link_surroundings

  [[nodiscard]] time_point now() const override;
  void later(std::chrono::nanoseconds pause, link_command what) override;
  void finish() override;
  [[nodiscard]] link_actor this_end() const override { return {}; }
  [[nodiscard]] std::uint64_t id() const override { return number_; }
  void tell_runner(runner_event event) override;
  void tell_session(transfer_id transfer, const session_actor& session,
                    session_event event) override;
  [[nodiscard]] std::function<void(link_event)> reporter() override;
  void read(transport::link& from, std::size_t polls) override;
  void reach_node() override;
  void ask_node(link_request request, std::function<void(const links::link_answer&)> then) override;
  void ask_end(links::far_end end, link_request request,
               std::function<void(const links::link_answer&)> then) override;
  void notify(links::far_end end, link_notice notice) override;
  void notify_and_wait(links::far_end end, link_notice notice, std::chrono::milliseconds patience,
                       std::function<void()> then) override;
  void ask_whether_alive(links::far_end end, std::function<void()> then) override;
  [[nodiscard]] links::far_end sender() override;
  void monitor(links::far_end end) override;
  void stop_monitoring(links::far_end end) override;

 private:
  /// The one answer to a question: the first call counts.
  using answer = std::function<void(const end_ptr& from, const links::link_answer&)>;
  [[nodiscard]] answer once(std::function<void(const links::link_answer&)> then,
                            std::chrono::milliseconds patience);
  void tell_end_down(const end_ptr& watcher);
  [[nodiscard]] end_ptr end_of(links::far_end end) const { return end == end_ ? other_ : nullptr; }
  /// Runs it in this process, at once or when it wakes.
  void here(microseconds after, std::function<void()> what);
  /// Puts it into the mailbox of the link's actor, which comes to it a little later.
  void put(std::function<void()> what);

  end_world& world_;
  const node_ptr at_, peer_;
  const std::uint64_t number_;
  bool finished_{false};
  bool reached_{false};  ///< the node of the peer, whose death is then told
  end_ptr current_;      ///< whose message is being handled
  end_ptr newcomer_;     ///< to whom `sender` gave the next number
  end_ptr other_;
  links::far_end end_;
  std::vector<std::weak_ptr<link_end>> watchers_;
  mailbox mailbox_;
  links::peer_link link_;
};

}  // namespace troupe::actors::link_simulation
