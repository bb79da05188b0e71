#include "troupe/actors/node/pool_manager.hpp"

#include <chrono>
#include <utility>

#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace {

using self_pointer = pool_manager_actor::stateful_pointer<pool_manager_state>;

/// Precision of deadlines for blocks and of times to live.
constexpr auto tick_interval = std::chrono::milliseconds{10};

void arm(self_pointer self) {
  auto& st = self->state;
  const bool values_expire = st.context->values && st.context->values->anything_expires();
  if (st.ticking || (st.line->empty() && !values_expire)) return;
  st.ticking = true;
  const auto interval = st.line->empty() ? tick_interval * 10 : tick_interval;
  self->delayed_send(self, interval, tick_atom::value);
}

void grant(self_pointer self, operation_id operation, result<kvcache::allocation> blocks) {
  self->send(self->state.runner, runner_event{blocks_granted{operation, std::move(blocks)}});
}

void serve(self_pointer self) {
  for (auto& served : self->state.line->serve(std::chrono::steady_clock::now()))
    grant(self, served.operation, std::move(served.blocks));
}

void on_wait_for_blocks(self_pointer self, const wait_for_blocks& order) {
  const auto waits = self->state.line->wait(order.operation, order.count, order.deadline);
  if (!waits) {
    grant(self, order.operation, fail(waits.error()));
    return;
  }
  serve(self);
}

void on_leave_line(self_pointer self, const leave_line& order) {
  self->state.line->leave(order.operation);
  serve(self);
}

}  // namespace

pool_manager_actor::behavior_type pool_manager(
    pool_manager_actor::stateful_pointer<pool_manager_state> self, context_ptr context,
    runner_actor runner) {
  set_log_handlers(*self, "pool");
  self->state.line.emplace(context->pool.get());
  self->state.context = std::move(context);
  self->state.runner = std::move(runner);
  return {
      [self](pool_command& command) {
        std::visit(overloaded{[self](wait_for_blocks& x) { on_wait_for_blocks(self, x); },
                              [self](leave_line& x) { on_leave_line(self, x); },
                              [self](pool_changed&) { serve(self); }},
                   command.what);
        arm(self);
      },
      [self](report_atom) {
        const auto& node = *self->state.context;
        pool_report report;
        report.device = node.cache_gpu               ? "gpu:" + std::to_string(*node.cache_gpu)
                        : node.cache_in_both.empty() ? "cpu"
                                                     : "gpu and cpu";
        report.memory = node.cache_memory;
        if (node.layout) {
          report.block_bytes = kvcache::bytes_per_block(*node.layout);
          report.blocks_total = node.layout->blocks;
        }
        if (node.pool) {
          const auto counters = node.pool->counters();
          report.blocks_total = counters.total;
          report.blocks_free = counters.free;
          report.blocks_quarantined = counters.quarantined;
          report.waiting = counters.waiters;
        }
        report.bytes = report.block_bytes * report.blocks_total;
        if (node.values) node.values->describe(report);
        return report;
      },
      [self](tick_atom) {
        auto& st = self->state;
        st.ticking = false;
        serve(self);
        if (st.context->values) st.context->values->expire(std::chrono::steady_clock::now());
        arm(self);
      },
  };
}

}  // namespace troupe::actors
