#pragma once

/// The opaque types of troupe.h.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/deploy/c/arguments.hpp"
#include "troupe/deploy/c/call_inbox.hpp"
#include "troupe/deploy/c/process_life.hpp"
#include "troupe/deploy/c/status.hpp"
#include "troupe/kvcache/layout.hpp"

namespace troupe::c {

/// An engine and its parts. Shared by its handle, the calls in progress and the views of its
/// values; the last one destroys it.
struct engine_core {
  process_life life;
  std::unique_ptr<call_inbox> calls;  ///< null: calls of frontends are refused
  std::unique_ptr<engine> node;
  bool polling{false};
  bool watching{false};
  int events{-1};  ///< an epoll descriptor over events and calls; -1 without calls

  engine_core() = default;
  ~engine_core();
  engine_core(const engine_core&) = delete;
  engine_core& operator=(const engine_core&) = delete;
};

}  // namespace troupe::c

struct troupe_engine {
  std::shared_ptr<troupe::c::engine_core> core;
};

struct troupe_layout {
  troupe::kvcache::cache_layout layout;
};

struct troupe_placement {
  explicit troupe_placement(troupe::actors::placement placed);
  troupe_placement(const troupe_placement&) = delete;
  troupe_placement& operator=(const troupe_placement&) = delete;

  const troupe::actors::placement where;
  /// The labels of each rank, as C sees them. Their texts belong to `where`.
  const std::vector<std::vector<troupe_label>> prefill_labels, decode_labels;
};

/// The variable part of an event or an outcome.
struct troupe_detail {
  std::shared_ptr<troupe::c::engine_core> keeper;  ///< owner of `view`, destroyed after it
  troupe::value_view view;
  std::vector<std::byte> aux;
  std::vector<std::uint8_t> payload;
  std::string reason, method, node, stage;
  std::vector<troupe::actors::node_label> labels;
  std::vector<troupe_label> labels_seen;  ///< `labels` as C sees them
  troupe::kvcache::allocation blocks;
  std::optional<troupe::actors::placement> where;
};

namespace troupe::c {

/// Runs the body of a call on an engine that belongs to this process.
template <class Body>
troupe_status on_engine(const troupe_engine* engine, Body&& body) noexcept {
  return guarded([&]() -> result<void> {
    if (auto here = present(engine, "engine"); !here) return here;
    const auto core = engine->core;  // keeps the engine if the handle is freed meanwhile
    if (auto ours = core->life.check("the engine"); !ours) return ours;
    return std::forward<Body>(body)(*core, core);
  });
}

/// Stores the id of an operation that a call began.
[[nodiscard]] inline result<void> begun(result<operation_id> started, troupe_operation* out) {
  if (!started) return fail(std::move(started).error());
  *out = started->value;
  return {};
}

}  // namespace troupe::c
