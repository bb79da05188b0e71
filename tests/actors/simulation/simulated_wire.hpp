#pragma once

/// A transport whose time is virtual and whose links fail when they are told to.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "troupe/transport/endpoint.hpp"

#include "simulation_scenario.hpp"
#include "timeline.hpp"

namespace troupe::actors::link_simulation {

using cluster_simulation::microseconds;
using cluster_simulation::milliseconds;
using cluster_simulation::moment;
using cluster_simulation::timeline;
using simulation::dice;

/// Memory that a process has registered with its endpoint, or was given by it.
struct later_region {
  std::span<std::byte> bytes{};
  std::shared_ptr<void> given{};  ///< null: it is the process's own
};

/// One life of a process. Events that come while it is frozen run when it wakes.
struct process {
  std::string name;
  std::uint64_t incarnation{0};
  bool alive{true};
  moment frozen_until{};
  std::deque<std::function<void()>> held_up;
  /// Its regions: number `i` of them is at `i - 1`. None: batches move no bytes.
  std::vector<std::vector<std::byte>> memory{};
  /// Regions that came later, by their numbers.
  std::map<std::uint32_t, later_region> later{};

  /// Empty: there is no such region.
  [[nodiscard]] std::span<std::byte> bytes_of(region_id region);
};

/// Bytes of a region that the transport reads or has written.
struct touch {
  std::size_t region{0};  ///< its number - 1, as an index in `process::memory`
  std::uint64_t offset{0}, length{0};
  bool written{false};
};

/// What the transport needs of the simulation, and what it tells it.
struct wire_world {
  timeline& time;
  dice& chance;
  std::function<void(const std::shared_ptr<process>&, std::function<void()>)> in;
  /// Bytes of the transfer were read in the memory of the one process and have reached the other's.
  std::function<void(const process& from, const process& to, transfer_id)> landed;
  /// The transport touches these bytes of the process for a transfer.
  std::function<void(const process& of, transfer_id, const touch&)> touched;
  /// A batch asks for what no right end asks for.
  std::function<void(const std::string&)> wrong;
  std::function<void()> refused;  ///< a batch came after a fence
  /// Nothing passes between the hosts of the two before.
  std::function<moment(const process&, const process&)> apart_until;
  bool calm{false};  ///< no call fails by chance any more, but for want of room

  [[nodiscard]] microseconds between(microseconds least, microseconds most) const {
    const auto room = static_cast<std::uint64_t>((most - least).count() + 1);
    return least + microseconds{chance.next() % room};
  }
};

/// The messages to one actor of a process: in order, each handled a little after it was sent.
class mailbox {
 public:
  void put(wire_world& wires, const std::shared_ptr<process>& at, std::function<void()> what,
           microseconds pause = {});

 private:
  moment last_{};
};

/// One end of a simulated transport link.
class wire final : public transport::link, public std::enable_shared_from_this<wire> {
 public:
  using registry = std::map<std::uint64_t, std::weak_ptr<wire>>;

  wire(wire_world& in, registry& all, std::shared_ptr<process> at, transport::backend_kind kind,
       const transport::link_options& options, std::shared_ptr<transport::link_sink> sink);

  // -- faults

  [[nodiscard]] bool is_up() const noexcept { return state_ == state::up; }
  [[nodiscard]] std::shared_ptr<wire> peer() const { return peer_.lock(); }
  [[nodiscard]] transport::link_role role() const noexcept { return options_.role; }
  /// Nothing that this end has sent arrives any more. It sees that after the time; empty: never.
  void breaks(std::optional<microseconds> seen_after);
  /// Nothing that this end sends arrives before.
  void falls_silent(moment until) { silent_until_ = until; }
  void process_died() { state_ = state::closed; }
  /// Whether the peer was given anything for a transfer that is not fenced here.
  [[nodiscard]] bool gives() const noexcept { return !given_.empty(); }
  /// Whether a batch of this end, or one of the peer's, may touch that region here.
  [[nodiscard]] bool uses(region_id region) const;

  // -- transport::link

  [[nodiscard]] transport::backend_kind kind() const noexcept override { return kind_; }
  [[nodiscard]] transport::link_offer offer() const override;
  [[nodiscard]] result<void> connect(const transport::link_offer& peer) override;
  [[nodiscard]] result<transport::remote_grant> grant(region_id region, byte_set permitted,
                                                      transport::access rights,
                                                      transport::grant_scope scope) override;
  [[nodiscard]] std::vector<transfer_id> users_of(region_id) const override { return {}; }
  [[nodiscard]] result<void> post(transport::batch work) override;
  [[nodiscard]] result<std::shared_ptr<const transport::prepared_batch>> prepare(
      transport::direction, std::vector<transport::piece>) override {
    return fail(errc::backend_unavailable, "not simulated");
  }
  [[nodiscard]] result<void> send_frame(std::span<const std::byte> frame) override;
  transport::fence_state fence(transfer_id transfer) override;
  bool poll() override { return false; }
  void close() override;
  [[nodiscard]] transport::link_stats stats() const override { return stats_; }

 private:
  enum class state : std::uint8_t { opened, connecting, up, broken, closed };
  /// Runs it at this end's process, in the order of the calls.
  void report(microseconds after, std::function<void()> what);
  void come_up(const std::shared_ptr<wire>& with);
  void see_break(errc code, const std::string& why);
  /// When what is sent now and takes that long arrives at the process.
  [[nodiscard]] moment arrival(microseconds takes, const process& there) const;
  [[nodiscard]] moment arrival(microseconds takes) const { return arrival(takes, *there_); }
  void hear(std::vector<std::byte> frame);
  void land(std::uint64_t number);
  /// Moves the bytes, at most so many segments. Returns whether both ends permit it.
  bool move(const transport::batch& work, std::size_t segments);
  /// What is wrong with a batch, as a real backend checks at both its ends; empty: nothing.
  [[nodiscard]] std::string wrong_with(const transport::batch& work, const wire& other) const;
  void copy(const transport::piece& from, const segment& what, const transport::batch& of,
            wire& other);
  void complete(std::uint64_t number, std::optional<troupe::error> failure);
  void end_flights(errc code, const std::string& why);

  wire_world& world_;
  registry& all_;
  const std::shared_ptr<process> at_;
  const transport::backend_kind kind_;
  const transport::link_options options_;
  const std::shared_ptr<transport::link_sink> sink_;
  const std::uint64_t token_;
  state state_{state::opened};
  std::weak_ptr<wire> peer_;
  std::shared_ptr<process> there_;  ///< of the peer, once it is up
  bool cut_{false};
  moment silent_until_{};
  moment last_sent_{}, last_reported_{};
  std::uint64_t posted_{0};
  std::map<std::uint64_t, transport::batch> flights_;
  std::set<transfer_id> fencing_, fenced_;
  std::map<std::uint64_t, transport::remote_grant> given_;  ///< to the peer, by the grant's id
  transport::link_stats stats_;
};

/// The data plane of one process; only what links need of it works.
class wire_endpoint final : public transport::endpoint {
 public:
  /// The process owns the endpoint.
  wire_endpoint(wire_world& in, wire::registry& all, const std::shared_ptr<process>& at,
                transport::host_identity place)
      : world_{in}, all_{all}, at_{at}, place_{std::move(place)} {}

  /// The backend cannot be used until then.
  void fails(transport::backend_kind kind, moment until) { unusable_until_[kind] = until; }
  [[nodiscard]] const std::vector<std::weak_ptr<wire>>& opened() const noexcept { return opened_; }

  [[nodiscard]] std::vector<transport::backend_status> backends() const override;
  [[nodiscard]] transport::host_identity identity() const override;
  [[nodiscard]] result<transport::backend_choice> choose(
      const transport::host_identity& peer, std::optional<transport::backend_kind> wanted,
      std::span<const transport::backend_kind> excluded) const override;
  [[nodiscard]] result<std::shared_ptr<transport::link>> open(
      transport::backend_kind kind, const transport::link_options& options,
      std::shared_ptr<transport::link_sink> sink) override;

  [[nodiscard]] result<region_id> allocate(std::uint64_t size, std::string) override;
  [[nodiscard]] result<transport::allocated_regions> allocate(
      std::span<const std::uint64_t>, const std::string&,
      const transport::host_memory_options&) override {
    return none();
  }
  [[nodiscard]] result<region_id> allocate_on_gpu(std::uint32_t, std::uint64_t,
                                                  std::string) override {
    return none();
  }
  [[nodiscard]] std::optional<std::uint32_t> gpu_of(region_id) const override { return {}; }
  [[nodiscard]] result<std::optional<std::vector<std::byte>>> copy_of_gpu(
      std::span<const std::byte>) const override {
    return none();
  }
  [[nodiscard]] result<void> after_compute(
      const transport::compute_point&, std::uint64_t,
      std::function<void(std::optional<troupe::error>)>) override {
    return none();
  }
  [[nodiscard]] result<std::shared_ptr<transport::stream_gate>> hold(
      const transport::compute_stream&) override {
    return none();
  }
  [[nodiscard]] result<region_id> register_memory(std::span<std::byte> bytes,
                                                  std::string name) override;
  [[nodiscard]] result<region_id> register_memory(std::span<std::byte>, std::string,
                                                  const transport::exported_memory&) override {
    return none();
  }
  [[nodiscard]] result<void> deregister(region_id region) override;
  [[nodiscard]] result<void> withdraw(region_id, std::chrono::milliseconds) override {
    return none();
  }
  [[nodiscard]] result<std::span<std::byte>> bytes(region_id region) const override;
  bool poll() override { return false; }
  bool drive(std::chrono::steady_clock::time_point, int, const std::function<bool()>&) override {
    return false;
  }
  void stop() override {}
  [[nodiscard]] std::uint16_t data_port() const override { return 0; }

 private:
  static unexpected none() { return fail(errc::backend_unavailable, "not simulated"); }
  [[nodiscard]] bool usable(transport::backend_kind kind) const;

  wire_world& world_;
  wire::registry& all_;
  const std::weak_ptr<process> at_;
  const transport::host_identity place_;
  std::map<transport::backend_kind, moment> unusable_until_;
  std::vector<std::weak_ptr<wire>> opened_;
  std::uint32_t last_region_{1000};  ///< far behind those of `process::memory`
};

}  // namespace troupe::actors::link_simulation
