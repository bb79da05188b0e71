#include "troupe/actors/engine.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "troupe/actors/base/thread_cores.hpp"
#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/engine/engine_edge.hpp"
#include "troupe/actors/engine/engine_setup.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/leased_name.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/node/node.hpp"
#include "troupe/actors/node/node_end.hpp"
#include "troupe/actors/node/pool_manager.hpp"
#include "troupe/actors/operations/operation_outcome.hpp"
#include "troupe/actors/runner/runner.hpp"
#include "troupe/actors/runtime/file_size_signal.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/room_to_start.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/actors/values/value_regions.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/or_undo.hpp"

namespace troupe {

namespace {

using namespace actors;  // `engine` is the facade of that folder

class node_engine final : public engine {
 public:
  node_engine(node_settings settings, std::uint64_t incarnation, engine_options options,
              actor_host_options host)
      : host_{std::move(host)},
        units_{host_.system()},
        context_{std::make_shared<node_context>(std::move(settings))},
        polling_{options.polling} {
    context_->self.incarnation = incarnation;
    context_->self.pid = static_cast<std::uint32_t>(getpid());
    context_->on_call = std::move(options.on_call);
    if (options.watch) context_->events.watch_members(context_->self.name);
  }

  ~node_engine() override { stop(); }

  result<void> launch(const config::deployment& deployment, const engine_options& options) {
    auto furnished = furnish(*context_, deployment, options, [this] {
      if (polling_) return;  // `poll` runs them itself
      auto& unit = units_.of_this_thread();
      unit.adopt_this_thread();
      unit.run();
    });
    if (!furnished) return furnished;
    const caf_thread_scope visit;
    auto& system = host_.system();
    runner_ = system.spawn(runner_behavior, context_);
    host_.own(runner_);
    pool_ = system.spawn(pool_manager, context_, runner_);
    host_.own(pool_);
    // On a thread of its own: it calls the engine back (`on_call`), which must never happen inside
    // a call of the engine that runs actors itself.
    node_ = system.spawn<caf::detached>(node, context_, runner_, pool_, drain_);
    host_.own(node_);
    watch_essential(context_, runner_, "the operation runner");
    watch_essential(context_, pool_, "the pool manager");
    watch_essential(context_, node_, "the actor of the node");
    watch_network(context_, system);
    caf::anon_send(runner_, engine_command{connect_operations{node_, pool_}});
    if (context_->pool) {
      context_->pool->on_blocks_for_waiters(
          [pool = pool_] { tell(pool, pool_command{pool_changed{}}); });
    }
    auto bound =
        host_.publish(caf::actor_cast<node_actor>(node_), context_->self.host, context_->self.port);
    if (!bound) return fail(bound.error());
    context_->self.port = *bound;
    launched_ = true;
    logger("node")->info("{} listens at {}:{} (data port {}), incarnation {:016x}",
                         context_->self.name, context_->self.host, *bound,
                         context_->endpoint->data_port(), context_->self.incarnation);
    caf::anon_send(node_, tick_atom::value);
    return {};
  }

  void stop() override {
    // A second caller may reuse the memory as well, so it waits for the first.
    const std::lock_guard one_after_the_other{stopping_};
    if (stopped_.exchange(true)) return;
    // Each step runs even if an earlier one failed: memory may be short.
    constexpr std::string_view stopping{"stopping the node"};
    step(stopping, [this] { context_->events.end_watch(); });
    step(stopping, [this] { context_->search.stop(); });  // its thread tells the node what it found
    step(stopping, [this] { say_goodbye(); });
    step(stopping, [this] { end_actors(); });
    take_lent_memory_back();
    step(stopping, [this] {
      if (context_->endpoint) context_->endpoint->stop();  // null if it could not be made
      if (context_->pool) context_->pool->on_blocks_for_waiters({});
    });
    abort_what_is_left();
  }

  result<void> wait_registered(std::chrono::milliseconds timeout) override {
    auto why_not = context_->registration.wait(timeout);
    if (!why_not) return {};
    if (why_not->code != errc::deadline) return fail(std::move(*why_not));
    const auto& settings = context_->settings;
    auto where = context_->registration.asked();
    if (where.empty())
      where = settings.supervisor_host + ":" + std::to_string(settings.supervisor_port);
    return fail(errc::deadline, context_->self.name + " is not registered with the supervisor at " +
                                    where + " after " + std::to_string(timeout.count()) +
                                    " ms: " + why_not->message);
  }

  // -- the cache

  const kvcache::cache_layout& layout() const override {
    static const kvcache::cache_layout none{};
    return context_->layout ? *context_->layout : none;
  }

  result<std::span<std::byte>> region(std::size_t index) const override {
    if (index >= context_->regions.size()) {
      return fail(errc::out_of_range, "the cache has " + std::to_string(context_->regions.size()) +
                                          " regions, there is no region " + std::to_string(index));
    }
    return context_->endpoint->bytes(context_->regions[index]);
  }

  result<kvcache::allocation> allocate_blocks(std::uint32_t count) override {
    if (auto has = need_pool(*context_); !has) return fail(has.error());
    return context_->pool->allocate(count);
  }

  result<void> free_blocks(kvcache::block_owner owner, std::span<const block_id> blocks) override {
    if (auto has = need_pool(*context_); !has) return has;
    auto freed = context_->pool->free(owner, blocks);
    if (!freed) return fail(freed.error());
    return {};
  }

  // -- transfers

  result<operation_id> send(send_spec spec) override {
    if (auto fine = check_request(spec.request); !fine) return fail(fine.error());
    if (auto runs = need_running(); !runs) return fail(runs.error());
    if (auto fine = check_tables(*context_, spec.blocks, spec.groups, spec.state_slot); !fine)
      return fail(fine.error());
    if (auto known = check_nodes(*context_, spec.held_for); !known) return fail(known.error());
    if (std::ranges::find(spec.held_for, context_->self.name) != spec.held_for.end()) {
      return fail(errc::invalid_config,
                  "`held_for` names " + context_->self.name +
                      ", which is the node that sends; name the nodes that receive");
    }
    const auto room = std::uint64_t{spec.blocks.size()} * layout().block_tokens;
    operation_table::entry what{operation_kind::send, spec.request, operation_table::room_of(room),
                                false, spec.grows};
    for (std::uint32_t i = 0; i < spec.groups.size(); ++i) {
      const auto& group = spec.groups[i];
      const auto tokens = group.blocks.size() * kvcache::block_tokens_of(layout(), i);
      // A part of a model needs no blocks of a group none of whose layers it has.
      const auto reach = kvcache::serves_layers(layout(), i)
                             ? group.first_token + tokens
                             : std::numeric_limits<std::uint64_t>::max();
      what.by_group.push_back(operation_table::room_of(reach));
    }
    if (!what.by_group.empty()) what.token_capacity = *std::ranges::min_element(what.by_group);
    const std::span<const block_id> blocks{spec.blocks};
    return begin_pinned(std::move(what), blocks, start_send{{}, std::move(spec)},
                        [this](engine_command&& order) { command(std::move(order)); });
  }

  result<void> add_blocks(operation_id send, std::vector<block_id> blocks,
                          std::uint32_t group) override {
    if (group >= kvcache::block_tables(layout())) {
      return fail(errc::out_of_range, "group " + std::to_string(group) + " of layers, of " +
                                          std::to_string(kvcache::block_tables(layout())));
    }
    if (auto grows = context_->operations.grow(send, 0, group); !grows) return grows;
    if (auto fine = check_blocks(*context_, blocks, 0); !fine) return fine;
    if (context_->pool) {
      if (auto pinned = context_->pool->pin(blocks); !pinned) return fail(pinned.error());
    }
    // The runner gets the blocks before any call may report them ready.
    const auto tokens = std::uint64_t{blocks.size()} * kvcache::block_tokens_of(layout(), group);
    const std::span<const block_id> added{blocks};
    engine_command order{send_grew{send, {std::move(blocks), group}}};
    or_undo([&] { command(std::move(order)); }, [&] { unpin(added); });
    return context_->operations.grow(send, tokens, group);
  }

  result<void> layers_ready(operation_id send, std::uint32_t layer_begin, std::uint32_t layer_end,
                            std::uint32_t token_end) override {
    if (auto fine = check_ready(*context_, send, layer_begin, layer_end, token_end); !fine)
      return fine;
    command(engine_command{send_progress{send, {layer_begin, layer_end, token_end}}});
    return {};
  }

  result<void> layers_ready(operation_id send, std::uint32_t layer_begin, std::uint32_t layer_end,
                            std::uint32_t token_end, transport::compute_point computed) override {
    if (auto fine = check_ready(*context_, send, layer_begin, layer_end, token_end); !fine)
      return fine;
    const auto point = ++last_point_;
    // The thread that learns of the point must not fail to tell: the send would wait for ever.
    const auto news = std::make_shared<ready_message<runner_event>>(
        runner_event{gpu_point_reached{send, point, {}}});
    auto waited = context_->endpoint->after_compute(
        computed, send.value, [runner = runner_, news](std::optional<troupe::error> failure) {
          std::get<gpu_point_reached>(news->content().what).failure = std::move(failure);
          news->tell_to(runner);
        });
    if (!waited) return waited;
    command(engine_command{send_progress{send, {layer_begin, layer_end, token_end}, point}});
    return {};
  }

  result<void> seal(operation_id send, std::uint32_t tokens, std::vector<std::byte> aux) override {
    auto entry = find_send(*context_, send);
    if (!entry) return fail(entry.error());
    if (auto fits = check_tokens(*entry, tokens); !fits) return fits;
    if (aux.size() > max_aux) {
      return fail(errc::out_of_range, "aux has " + std::to_string(aux.size()) + " bytes, at most " +
                                          std::to_string(max_aux) + " can travel with a transfer");
    }
    if (auto sealed = context_->operations.seal(send); !sealed) return sealed;
    or_undo(
        [&] {
          command(engine_command{send_sealed{send, {tokens, std::move(aux)}}});
        },
        [&] { context_->operations.unseal(send); });
    return {};
  }

  result<operation_id> receive(receive_spec spec) override {
    if (auto fine = check_request(spec.request); !fine) return fail(fine.error());
    if (auto runs = need_running(); !runs) return fail(runs.error());
    if (auto fine = check_receive(*context_, spec); !fine) return fail(fine.error());
    spec.fail_when_full = spec.fail_when_full || context_->settings.fail_when_full;
    operation_table::entry what{operation_kind::receive, spec.request, spec.tokens, false};
    const std::span<const block_id> blocks{spec.blocks};
    auto written = blocks;
    if (context_->pool) {
      written = blocks.last(blocks_written(spec, context_->layout->block_tokens).size());
      // Pinned only to check that they are allocated.
      const auto prefix = blocks.first(blocks.size() - written.size());
      if (auto allocated = context_->pool->pin(prefix); !allocated) return fail(allocated.error());
      unpin(prefix);
    }
    return begin_pinned(std::move(what), written, start_receive{{}, std::move(spec)},
                        [this](engine_command&& order) { command_here(std::move(order)); });
  }

  result<operation_id> release(std::string request, std::vector<std::string> sources,
                               std::vector<std::uint64_t> lives) override {
    return begin_words(
        {operation_kind::release, {}, 0, false},
        {{}, source_verb::release, std::move(request), std::move(sources), std::move(lives)});
  }
  result<operation_id> hold(std::string request, std::vector<std::string> sources,
                            std::vector<std::uint64_t> lives) override {
    operation_table::entry what{operation_kind::hold, request, 0, false};
    return begin_words(
        std::move(what),
        {{}, source_verb::hold, std::move(request), std::move(sources), std::move(lives)});
  }

  result<void> await_layers(operation_id receive, std::uint32_t layer_begin,
                            std::uint32_t layer_end, std::uint32_t token_end,
                            transport::compute_stream stream) override {
    const auto to_come = check_awaited(*context_, receive, layer_begin, layer_end, token_end);
    if (!to_come) return fail(to_come.error());
    if (!*to_come) return {};
    // Done at once: the caller's next work on the stream must stand behind the gate.
    auto gate = context_->endpoint->hold(stream);
    if (!gate) return fail(std::move(gate).error());
    command_here(engine_command{
        open_when_complete{receive, layer_begin, layer_end, token_end, std::move(*gate)}});
    return {};
  }

  result<void> abort(operation_id operation, std::string reason) override {
    const auto entry = context_->operations.find(operation);
    if (!entry) return fail(entry.error());
    if (entry->kind == operation_kind::place) return abort_placement(operation, std::move(reason));
    command(engine_command{abort_operation{operation, std::move(reason)}});
    return {};
  }

  // -- keyed values

  result<operation_id> put(std::string peer, std::string key, std::span<const std::byte> value,
                           std::chrono::milliseconds ttl) override {
    if (ttl.count() < 0) return fail(errc::invalid_config, "a time to live is not negative");
    return value_operation({{},
                            std::move(peer),
                            value_verb::put,
                            std::move(key),
                            value,
                            static_cast<std::uint64_t>(ttl.count())});
  }
  result<operation_id> get(std::string peer, std::string key) override {
    return value_operation({{}, std::move(peer), value_verb::get, std::move(key), {}, 0});
  }
  result<operation_id> query(std::string peer, std::string key) override {
    return value_operation({{}, std::move(peer), value_verb::query, std::move(key), {}, 0});
  }
  result<operation_id> remove(std::string peer, std::string key) override {
    return value_operation({{}, std::move(peer), value_verb::remove, std::move(key), {}, 0});
  }

  // -- the cluster

  [[nodiscard]] std::uint64_t incarnation() const override { return context_->self.incarnation; }
  [[nodiscard]] std::uint64_t supervisor_incarnation() const override {
    return context_->registration.last().supervisor_incarnation;
  }
  result<operation_id> place(placement_request request) override {
    if (auto fine = check_request(request.request); !fine) return fail(fine.error());
    if (auto fine = check_affinity(request.affinity); !fine) return fail(fine.error());
    if (auto runs = need_running(); !runs) return fail(runs.error());
    auto operation = begin({operation_kind::place, {}, 0, false});
    if (!operation) return operation;
    or_undo(
        [&] {
          tell(node_, node_command{start_place{*operation, std::move(request)}});
        },
        [&] { context_->operations.take_back(*operation); });
    return operation;
  }

  void placed_request_ended(std::string request) override {
    if (!stopped_) tell(node_, node_command{actors::placed_request_ended{std::move(request)}});
  }

  [[nodiscard]] drain_standing draining() const override { return drain_->standing(); }
  void report_failure(std::string why) override {
    if (!stopped_) tell(node_, node_command{engine_failed{std::move(why)}});
  }
  void recover() override {
    if (!stopped_) tell(node_, node_command{engine_recovered{}});
  }
  void set_queue_length(std::uint32_t requests) override {
    context_->counters.queue_length.store(requests);
  }

  node_report report() const override {
    node_report report;
    report.node = context_->self;
    if (stopped_) return report;
    const caf_thread_scope visit;
    caf::scoped_actor self{host_.system()};
    self->request(node_, std::chrono::seconds{2}, report_atom::value)
        .receive([&](node_report& full) { report = std::move(full); }, [](const caf::error&) {});
    return report;
  }

  // -- events

  int event_fd() const override { return context_->events.fd(); }
  std::vector<event> take(std::size_t max) override { return context_->events.take(max); }

  std::vector<event> wait(std::chrono::milliseconds timeout, std::size_t max) override {
    timeout = std::clamp(timeout, std::chrono::milliseconds{0}, longest_wait);
    const auto until = std::chrono::steady_clock::now() + timeout;
    {
      const event_queue::consumer as_consumer{context_->events};
      if (polling_) {
        const auto goes_on = [&] { return !stopped_ && std::chrono::steady_clock::now() < until; };
        do {
          while (context_->events.empty() && goes_on()) poll_once();
          auto events = context_->events.take(max);
          if (!events.empty()) return events;
          // An event of a member that waited may have become void.
        } while (max != 0 && goes_on());
        if (!stopped_) return {};
      } else {
        const inline_executor::scope as_active{units_.of_this_thread()};
        context_->endpoint->drive(until, context_->events.fd(),
                                  [this] { return !context_->events.empty(); });
      }
      auto events = context_->events.take(max);
      if (!events.empty()) return events;
    }
    // Another thread of the engine makes the progress, or the node was stopped.
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    return context_->events.wait(std::max(left, std::chrono::milliseconds{0}), max);
  }

  result<outcome> wait(operation_id operation) override {
    const auto mine = context_->events.claim_events(operation);
    if (!mine) return fail(mine.error());
    for (;;) {
      make_progress_until(**mine, std::chrono::steady_clock::now() + longest_wait);
      if (auto over = outcome_of_claim(**mine)) return std::move(*over);
    }
  }

  std::optional<result<outcome>> wait(operation_id operation,
                                      std::chrono::milliseconds timeout) override {
    const auto mine = context_->events.claim_events(operation);
    if (!mine) return fail(mine.error());
    timeout = std::clamp(timeout, std::chrono::milliseconds{0}, longest_wait);
    make_progress_until(**mine, std::chrono::steady_clock::now() + timeout);
    return outcome_of_claim(**mine);
  }

  bool poll() override { return !stopped_ && poll_once(); }

 private:
  static constexpr std::chrono::milliseconds longest_wait = std::chrono::hours{24};

  /// Drives the links until the operation is over, or until `until`.
  void make_progress_until(event_queue::claim& mine, std::chrono::steady_clock::time_point until) {
    if (polling_) {
      while (!mine.is_over() && !stopped_ && std::chrono::steady_clock::now() < until) poll_once();
    } else if (mine.fd() >= 0 && !mine.is_over()) {
      const inline_executor::scope as_active{units_.of_this_thread()};
      context_->endpoint->drive(until, mine.fd(), [&mine] { return mine.is_over(); });
    }
    // Another thread makes the progress, or the node was stopped.
    mine.wait_until(until);
  }

  [[nodiscard]] std::optional<result<outcome>> outcome_of_claim(event_queue::claim& mine) {
    auto events = mine.take();
    if (!events) return std::nullopt;
    if (!*events) return fail(events->error());
    return outcome_of(std::move(**events), context_->pool.get());
  }

  template <class Step>
  static void step(std::string_view doing, Step what) noexcept {
    if (const auto done = or_error(doing, what); !done) {
      (void)or_error("", [&] { logger("node")->error("{}", to_string(done.error())); });
    }
  }

  // -- the steps of a stop

  /// Tells both sides of the live operations before the links close.
  void say_goodbye() {
    if (!launched_) return;
    caf::anon_send(runner_, engine_command{stop_runner{}});
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{1};
    do {
      if (polling_) poll_once();
      std::this_thread::sleep_for(std::chrono::milliseconds{2});
    } while (!may_leave() && std::chrono::steady_clock::now() < until);
    caf::anon_send(node_, node_command{stop_node{}});
  }

  void end_actors() {
    if (!host_.shutdown([this] {
          if (polling_) poll_once();
        })) {
      // The actors hold the context: its threads must not call this object from here on.
      logger("node")->error(
          "{}: some actors did not end in time, since a peer may still touch what they hold",
          context_->self.name);
    }
  }

  /// The engine may reuse the memory of a put from here on, even if an actor is late. A copy always
  /// ends.
  void take_lent_memory_back() noexcept {
    context_->lent.shut_out();
    while (context_->lent.is_read()) {
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
  }

  /// Operations that calls of other threads began while the actors ended: no actor is left to end
  /// them.
  void abort_what_is_left() noexcept {
    constexpr std::string_view stopped{"the node was stopped"};
    context_->events.close(
        why_ended(errc::aborted, stopped),
        why_ended(errc::aborted, stopped,
                  "; a frozen peer may still touch the memory of the operation"));
  }

  bool poll_once() {
    auto& unit = units_.of_this_thread();
    const inline_executor::scope as_active{unit};
    const bool worked = context_->endpoint->poll();
    unit.run();
    return worked;
  }

  /// Hands an order to the runner, to be carried out by a thread of ours, or in `poll` if the
  /// engine polls. For orders that may copy bytes: the caller computes meanwhile.
  ///
  /// If memory runs out before the runner has the order, it throws and the order is as it was.
  void command(engine_command&& order) {
    if (polling_) {
      command_here(std::move(order));
    } else {
      tell(runner_, std::move(order));
    }
  }

  /// Hands an order to the runner and carries it out before it returns. For orders that end with a
  /// message to the other side, which would otherwise need a thread of ours to be woken. Throws as
  /// `command` does.
  void command_here(engine_command&& order) {
    auto& unit = units_.of_this_thread();
    const inline_executor::scope as_active{unit};
    tell(runner_, std::move(order));
    step("carrying out an order", [&] { unit.run(); });  // the runner has it: the call succeeded
  }

  /// Whether all live operations have ended at both sides.
  [[nodiscard]] bool may_leave() const {
    const auto& counters = context_->counters;
    return counters.runner_stops.load() && counters.local_copies.load() == 0 &&
           counters.active_transfers.load() == 0;
  }

  [[nodiscard]] result<void> need_running() const {
    if (stopped_) return fail(errc::aborted, "the node was stopped");
    return {};
  }

  /// Ends the placement at once: an answer of the supervisor that is on its way finds it ended.
  result<void> abort_placement(operation_id operation, std::string reason) {
    if (!context_->events.conclude({operation, event_failed{{errc::aborted, std::move(reason)}}})) {
      return fail(errc::not_found, "operation " + std::to_string(operation.value) + " has ended");
    }
    return {};
  }

  /// Refuses with `internal` if an actor that all operations need has crashed.
  [[nodiscard]] result<operation_id> begin(operation_table::entry what) {
    auto operation = context_->operations.begin(std::move(what));
    if (operation || operation.error().code != errc::aborted || stopped_) return operation;
    auto why = context_->registration.why_not();
    return why ? result<operation_id>{fail(std::move(*why))} : operation;
  }

  void unpin(std::span<const block_id> blocks) {
    // Waiters that could not be woken are served with the next blocks that come back.
    (void)or_error("", [&] {
      if (context_->pool) (void)context_->pool->unpin(blocks);
    });
  }

  /// Begins the operation that the order is for and hands the order over: both or, if memory runs
  /// out, neither. Pins the blocks, which are the order's own, so that an engine that frees them at
  /// once only quarantines them.
  template <class Order, class Hand>
  [[nodiscard]] result<operation_id> begin_pinned(operation_table::entry what,
                                                  std::span<const block_id> blocks, Order order,
                                                  Hand hand_over) {
    if (context_->pool) {
      if (auto pinned = context_->pool->pin(blocks); !pinned) return fail(pinned.error());
    }
    result<operation_id> operation{operation_id{}};  // 0: none
    engine_command handed{std::move(order)};
    or_undo(
        [&] {
          operation = begin(std::move(what));
          if (!operation) return;
          std::get<Order>(handed.what).operation = *operation;
          hand_over(std::move(handed));
        },
        [&] {
          if (operation) context_->operations.take_back(*operation);
          unpin(blocks);
        });
    if (!operation) unpin(blocks);
    return operation;
  }

  [[nodiscard]] result<operation_id> begin_words(operation_table::entry what, start_word order) {
    if (auto runs = need_running(); !runs) return fail(runs.error());
    if (auto fine = check_words(*context_, order.request, order.sources, order.lives); !fine)
      return fail(fine.error());
    return begin_pinned(std::move(what), {}, std::move(order),
                        [this](engine_command&& handed) { command_here(std::move(handed)); });
  }

  [[nodiscard]] result<operation_id> value_operation(start_value order) {
    if (auto runs = need_running(); !runs) return fail(runs.error());
    if (auto fine = check_key(order.key); !fine) return fail(fine.error());
    if (auto joined = check_value_edge(*context_, order.peer); !joined) return fail(joined.error());
    if (auto copied = copy_from_gpu(order); !copied) return fail(copied.error());
    if (!order.copy) order.pinned = pool_blocks_of(*context_, order.value);
    const std::span<const block_id> pinned{order.pinned};
    return begin_pinned({operation_kind::value, {}, 0, false}, pinned, std::move(order),
                        [this](engine_command&& handed) { command_here(std::move(handed)); });
  }

  /// A store keeps its values in host memory, and the host cannot read a GPU's.
  [[nodiscard]] result<void> copy_from_gpu(start_value& order) const {
    if (order.verb != value_verb::put) return {};
    auto copy = context_->endpoint->copy_of_gpu(order.value);
    if (!copy) return fail(std::move(copy).error());
    if (!*copy) return {};
    order.copy = std::make_shared<const std::vector<std::byte>>(std::move(**copy));
    order.value = *order.copy;
    return {};
  }

  // Destroyed in reverse: the context (with the endpoint and its threads), the units those threads
  // run actors with, the actor system.
  mutable actor_host host_;
  inline_executors units_;
  context_ptr context_;
  node_drain_ptr drain_{std::make_shared<node_drain>()};
  runner_actor runner_;
  pool_manager_actor pool_;
  local_node_actor node_;
  const bool polling_;
  bool launched_{false};
  std::mutex stopping_;
  std::atomic<bool> stopped_{false};
  std::atomic<std::uint64_t> last_point_{0};
};

/// With `supervisor.begin`: finds the supervisor that lives now, or begins one if there is none.
result<void> find_supervisor_for(node_settings& settings, const config::deployment& deployment) {
  if (!deployment.supervisor.begin) return {};
  // The deployment as given: if it says port 0, the next supervisor that is begun may have another
  // port. The environment as it is now: threads of the engine look again later, when it may be
  // changing.
  auto terms = std::make_shared<const begun_terms>(begun_terms_of(deployment));
  auto found = find_or_begin_supervisor(*terms);
  if (!found) return fail(std::move(found).error());
  settings.supervisor_host = std::move(found->host);
  settings.supervisor_port = found->port;
  settings.begun_from = std::move(terms);
  return {};
}

result<std::unique_ptr<engine>> start_as(const config::deployment& deployment,
                                         std::string_view name, std::uint64_t incarnation,
                                         engine_options options) {
  if (options.join && !name.empty()) {
    return fail(errc::invalid_config, "node `" + std::string{name} +
                                          "` is named, and `join` announces another; a node that "
                                          "joins is called as it announces, so leave the name out");
  }
  auto settings = options.join ? actors::settings_to_join(deployment, options)
                               : actors::settings_of(deployment, name);
  if (!settings) return fail(settings.error());
  if (auto found = find_supervisor_for(*settings, deployment); !found) return fail(found.error());
  const auto on_cores = actors::thread_cores::keep(options.cores);
  if (!on_cores) return fail(on_cores.error());
  if (auto room = actors::check_room(actors::room_of_a_node); !room) return fail(room.error());
  auto host = actors::host_options_of(deployment);
  if (!host) return fail(host.error());
  auto started =
      std::make_unique<node_engine>(std::move(*settings), incarnation, options, std::move(*host));
  if (auto launched = started->launch(deployment, options); !launched)
    return fail(launched.error());
  return actors::with_edge(std::move(started));
}

/// Same, but throws nothing.
result<std::unique_ptr<engine>> start_or_error(const config::deployment& deployment,
                                               std::string_view name, std::uint64_t incarnation,
                                               engine_options options) {
  const file_size_signal handled;
  return or_error("the node cannot start",
                  [&] { return start_as(deployment, name, incarnation, std::move(options)); });
}

}  // namespace

receive_spec receive_spec::of(const actors::placement& where, std::uint32_t tokens,
                              std::vector<block_id> blocks) {
  receive_spec spec;
  spec.request = where.request;
  for (const auto& rank : where.prefill) spec.sources.push_back(rank.name);
  spec.mode = where.mode;
  spec.tokens = tokens;
  spec.blocks = std::move(blocks);
  spec.placed_by = where.supervisor_incarnation;
  spec.placed_at = where.epoch;
  return spec;
}

result<std::unique_ptr<engine>> engine::start(const config::deployment& deployment,
                                              std::string_view name, engine_options options) {
  return start_or_error(deployment, name, actors::draw_incarnation(), std::move(options));
}

result<std::unique_ptr<engine>> actors::start_with_name(const config::deployment& deployment,
                                                        const leased_name& slot,
                                                        engine_options options) {
  return start_or_error(deployment, slot.name(), slot.incarnation(), std::move(options));
}

}  // namespace troupe
