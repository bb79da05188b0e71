#include "engine_node.hpp"

#include <algorithm>
#include <string_view>
#include <utility>
#include <variant>

#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors::engine_simulation {

// -- a session

class engine_node::running_session final : public session_surroundings,
                                           public std::enable_shared_from_this<running_session> {
 public:
  running_session(engine_node& at, transfer_id transfer, std::uint64_t link,
                  std::unique_ptr<session> made)
      : at_{at}, transfer_{transfer}, link_{link}, session_{std::move(made)} {}

  void begin(microseconds pause) {
    put([this] { session_->begin(*this); }, pause);
  }
  void hear(session_event event) {
    put([this, what = std::make_shared<session_event>(std::move(event))] {
      session_->handle(*what);
    });
  }
  [[nodiscard]] std::uint64_t link() const noexcept { return link_; }
  [[nodiscard]] std::string_view name() const { return session_->name(); }
  void crash() { finished_ = true; }

  // -- session_surroundings

  [[nodiscard]] time_point now() const override { return at_.now(); }
  [[nodiscard]] session_actor this_session() const override { return {}; }
  void tell_link(link_command order) override { at_.order_link(link_, std::move(order)); }
  void tell_runner(runner_event event) override { at_.hear(std::move(event)); }
  void tell_pool(pool_command order) override { at_.tell_pool(std::move(order)); }
  void tell_itself(session_event event) override { hear(std::move(event)); }
  void finish() override {
    finished_ = true;
    const auto known = at_.sessions_.find(transfer_);
    if (known != at_.sessions_.end() && known->second.get() == this) at_.sessions_.erase(known);
  }

 private:
  void put(std::function<void()> what, microseconds pause = {}) {
    mailbox_.put(
        at_.world_.transports(), at_.shared_from_this(),
        [self = shared_from_this(), what = std::move(what)] {
          if (!self->finished_) what();
        },
        pause);
  }

  engine_node& at_;
  const transfer_id transfer_;
  const std::uint64_t link_;
  const std::unique_ptr<session> session_;
  mailbox mailbox_;
  bool finished_{false};
};

// -- the node

void engine_node::open() {
  runner_ = std::make_unique<operations::operation_runner>(*this, context);
  line_.emplace(context->pool.get());
  context->pool->on_blocks_for_waiters([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tell_pool(pool_command{pool_changed{}});
  });
}

void engine_node::take_apart() {
  node::take_apart();
  sessions_.clear();
}

void engine_node::here(microseconds after, std::function<void()> what) {
  auto& wires = world_.transports();
  wires.time.after(after, [self = shared_from_this(), what = std::move(what)] {
    self->world_.transports().in(self, what);
  });
}

void engine_node::put(std::function<void(operations::operation_runner&)> what) {
  to_runner_.put(world_.transports(), shared_from_this(),
                 [self = shared_from_this(), what = std::move(what)] {
                   what(*self->runner_);
                   self->world_.events_came(*self);
                 });
}

void engine_node::order(engine_command command) {
  put([what = std::make_shared<engine_command>(std::move(command))](auto& runner) {
    runner.handle(*what);
  });
}
void engine_node::hear(node_notice notice) {
  put([what = std::make_shared<node_notice>(std::move(notice))](auto& runner) {
    runner.handle(*what);
  });
}
void engine_node::hear(runner_event event) {
  put([what = std::make_shared<runner_event>(std::move(event))](auto& runner) {
    runner.handle(*what);
  });
}

void engine_node::hear_of_session(const end_ptr& from, transfer_id transfer, session_event event) {
  const auto found = sessions_.find(transfer);
  if (found == sessions_.end() || found->second->link() != from->id()) return;
  if (const auto* message = std::get_if<session_message>(&event.what)) {
    world_.said(*this,
                std::to_string(transfer.value) + " hears " + std::string{type_name(*message)});
  }
  found->second->hear(std::move(event));
}

void engine_node::link_ended(std::uint64_t link) {
  if (watched_.erase(link) == 0) return;
  put([link](auto& runner) { runner.on_link_ended(link, false); });
}

/// The session that fences for a crashed one is spared: what that one held would be held for ever.
bool engine_node::crash_a_session(dice& chance) {
  std::vector<transfer_id> may_crash;
  for (const auto& [transfer, session] : sessions_) {
    if (session->name() != "session_fence") may_crash.push_back(transfer);
  }
  if (may_crash.empty()) return false;
  const auto transfer = may_crash[chance.next() % may_crash.size()];
  world_.said(*this, std::to_string(transfer.value) + " crashes here");
  sessions_.extract(transfer).mapped()->crash();
  put([transfer](auto& runner) { runner.on_session_crashed(transfer, "planted"); });
  return true;
}

// -- the pool, as its manager's actor serves it

void engine_node::handle(const pool_command& command) {
  if (const auto* order = std::get_if<wait_for_blocks>(&command.what)) {
    const auto waits = line_->wait(order->operation, order->count, order->deadline);
    if (!waits) return hear(runner_event{blocks_granted{order->operation, fail(waits.error())}});
  } else if (const auto* left = std::get_if<leave_line>(&command.what)) {
    line_->leave(left->operation);
  }
  serve_pool();
  arm_pool();
}

void engine_node::serve_pool() {
  for (auto& served : line_->serve(now()))
    hear(runner_event{blocks_granted{served.operation, std::move(served.blocks)}});
}

void engine_node::arm_pool() {
  if (pool_ticks_ || line_->empty()) return;
  pool_ticks_ = true;
  here(milliseconds{10}, [this] {
    pool_ticks_ = false;
    serve_pool();
    arm_pool();
  });
}

std::string engine_node::leftovers() const {
  const auto left = runner_->report();
  const auto pool = context->pool->counters();
  if (!left.transfers.empty()) {
    return "transfer of " + left.transfers.front().request + " (" + left.transfers.front().side +
           ", " + left.transfers.front().state + ")";
  }
  if (!left.parked.empty()) return "a parked request";
  if (left.waiting_for_link != 0) return "an operation that waits for a link";
  if (!sessions_.empty()) return "a session";
  if (context->operations.open() != 0) return "an operation";
  if (pool.pinned != 0) return "a pinned block";
  if (pool.free != pool.total || pool.waiters != 0) return "a block that is not free";
  if (!line_->empty()) return "an operation in line for blocks";
  if (context->counters.active_transfers != 0) return "a transfer that is counted";
  return {};
}

// -- operations::runner_surroundings

time_point engine_node::now() const {
  return world_.transports().time.now();
}

std::uint64_t engine_node::draw() {
  return world_.transports().chance.next();
}

void engine_node::wake_after(std::chrono::nanoseconds pause) {
  here(std::chrono::ceil<microseconds>(pause),
       [this] { put([](operations::operation_runner& runner) { runner.tick(); }); });
}

void engine_node::do_elsewhere(std::function<runner_event()> work) {
  here(world_.transports().between(microseconds{0}, milliseconds{20}),
       [this, work = std::move(work)] { hear(work()); });
}

void engine_node::need_link(actors::need_link what) {
  here(microseconds{100}, [this, what = std::move(what)] { world_.need_link(*this, what); });
}

void engine_node::tell_pool(pool_command what) {
  to_pool_.put(world_.transports(), shared_from_this(),
               [self = shared_from_this(), what = std::move(what)] { self->handle(what); });
}

void engine_node::tell_link(const link_handle& link, link_command what) {
  order_link(link.id, std::move(what));
}

/// To an actor that has ended, it vanishes.
void engine_node::order_link(std::uint64_t link, link_command what) {
  const auto found = std::ranges::find_if(ends, [&](const auto& end) { return end->id() == link; });
  if (found == ends.end() || (*found)->finished()) return;
  if (const auto* words = std::get_if<say>(&what.what)) {
    world_.said(*this, std::to_string(route_of(words->message).value) + " says " +
                           std::string{type_name(words->message)} + " over link " +
                           std::to_string(link));
    if (std::holds_alternative<store_commit>(words->message)) {
      world_.last_word_of_put((*found)->peer()->name);
    }
  }
  (*found)->order(std::move(what));
}

void engine_node::watch_link(const link_handle& link) {
  watched_.insert(link.id);
  const auto lives = [&](const end_ptr& end) { return end->id() == link.id && !end->finished(); };
  if (!std::ranges::any_of(ends, lives)) link_ended(link.id);
}

void engine_node::begin(transfer_id transfer, const link_handle& link,
                        std::unique_ptr<session> made, microseconds pause) {
  const auto begun = std::make_shared<running_session>(*this, transfer, link.id, std::move(made));
  sessions_[transfer] = begun;
  begun->begin(pause);
}

session_actor engine_node::begin_session(transfer_id transfer, const link_handle& link,
                                         std::unique_ptr<session> made) {
  begin(transfer, link, std::move(made), microseconds{0});
  return {};
}

session_actor engine_node::begin_session_elsewhere(transfer_id transfer, const link_handle& link,
                                                   std::unique_ptr<session> made) {
  begin(transfer, link, std::move(made),
        world_.transports().between(microseconds{0}, milliseconds{20}));
  return {};
}

void engine_node::tell_session(transfer_id transfer, const session_actor& /*to*/,
                               session_event event) {
  const auto found = sessions_.find(transfer);
  if (found != sessions_.end()) found->second->hear(std::move(event));
}

}  // namespace troupe::actors::engine_simulation
