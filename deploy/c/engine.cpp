#include "troupe/actors/engine.hpp"

#include <cerrno>
#include <cstring>

#include <nlohmann/json.hpp>
#include <sys/epoll.h>
#include <unistd.h>

#include "troupe/deploy/c/deployment_source.hpp"
#include "troupe/deploy/c/handles.hpp"
#include "troupe/deploy/report_json.hpp"

namespace troupe::c {

engine_core::~engine_core() {
  if (!life.is_this_process()) {
    // Their destructors would wait for threads that only the parent has.
    (void)node.release();
    (void)calls.release();
    return;
  }
  node.reset();
  if (events >= 0) ::close(events);
}

namespace {

/// A descriptor that is readable while either of the two is.
result<int> either_of(int one, int other) {
  const int both = ::epoll_create1(EPOLL_CLOEXEC);
  for (const int descriptor : {one, other}) {
    epoll_event readable{};
    readable.events = EPOLLIN;
    if (both >= 0 && ::epoll_ctl(both, EPOLL_CTL_ADD, descriptor, &readable) == 0) continue;
    std::string why{"no descriptor for the events: "};
    why.append(std::strerror(errno)).append("; raise the limit of open files");
    if (both >= 0) ::close(both);
    return fail(errc::overloaded, std::move(why));
  }
  return both;
}

result<engine_options> memory_of(const troupe_engine_options& given) {
  engine_options out;
  out.polling = (given.flags & TROUPE_POLLING) != 0;
  out.watch = (given.flags & TROUPE_WATCH) != 0;
  const auto cores = numbers(given.cores, given.core_count, "options.cores");
  if (!cores) return fail(cores.error());
  out.cores.assign(cores->begin(), cores->end());
  if (given.layout) out.layout = given.layout->layout;
  if (given.region_count > kvcache::max_regions)
    return bad_argument("`options.region_count` is more than 4096");
  if (given.region_count != 0)
    if (auto here = present(given.regions, "options.regions"); !here) return fail(here.error());
  for (std::size_t i = 0; i < given.region_count; ++i) {
    const auto& region = given.regions[i];
    if (!region.data || region.size == 0) {
      std::string why{"`options.regions["};
      why.append(std::to_string(i)).append("]` is NULL or empty");
      return bad_argument(std::move(why));
    }
    out.regions.emplace_back(static_cast<std::byte*>(region.data), region.size);
  }
  if (auto known = in_range(given.allocate, 0, TROUPE_ALLOCATE_HUGE, "options.allocate"); !known)
    return fail(known.error());
  if (given.allocate != TROUPE_NO_ALLOCATION) {
    transport::host_memory_options how;
    how.pages = given.allocate == TROUPE_ALLOCATE_HUGE ? transport::page_choice::huge_if_available
                                                       : transport::page_choice::ordinary;
    if (given.numa_node_plus_1 != 0) how.numa_node = given.numa_node_plus_1 - 1;
    out.allocate = how;
  } else if (given.numa_node_plus_1 != 0) {
    return bad_argument("`options.numa_node_plus_1` is given without `options.allocate`");
  }
  return out;
}

result<std::vector<actors::node_label>> labels_of_join(const troupe_announcement& given) {
  if (given.label_count > actors::max_labels) {
    std::string why{"`options.join.label_count` is "};
    why.append(std::to_string(given.label_count)).append("; a node has at most ");
    return bad_argument(why.append(std::to_string(actors::max_labels)).append(" labels"));
  }
  if (given.label_count != 0)
    if (auto here = present(given.labels, "options.join.labels"); !here) return fail(here.error());
  std::vector<actors::node_label> out;
  for (std::uint32_t i = 0; i < given.label_count; ++i) {
    std::string entry{"options.join.labels["};
    entry.append(std::to_string(i)).append("]");
    auto key = text(given.labels[i].key, entry + ".key");
    if (!key) return fail(key.error());
    if (auto here = present(given.labels[i].value, entry + ".value"); !here)
      return fail(here.error());
    auto value = optional_text(given.labels[i].value, entry + ".value");
    if (!value) return fail(value.error());
    out.push_back({std::move(*key), std::move(*value)});
  }
  return out;
}

result<announcement> announcement_of(const troupe_announcement* given) {
  const auto join = read(given, "options.join");
  if (!join) return fail(join.error());
  auto stage = text(join->stage, "options.join.stage");
  if (!stage) return fail(stage.error());
  auto replica = text(join->replica, "options.join.replica");
  if (!replica) return fail(replica.error());
  auto labels = labels_of_join(*join);
  if (!labels) return fail(labels.error());
  announcement out;
  out.stage = std::move(*stage);
  out.replica = std::move(*replica);
  out.rank = join->rank;
  out.ranks = join->ranks ? join->ranks : 1;
  out.labels = std::move(*labels);
  return out;
}

/// The node's name; empty for a node that joins.
result<std::string> name_of(const troupe_engine_options& given) {
  if (!given.join) return text(given.node, "options.node");
  auto name = optional_text(given.node, "options.node");
  if (name && !name->empty())
    return bad_argument(
        "`options.node` and `options.join` are both given; a node that joins is called "
        "STAGE.REPLICA.RANK, as it announces");
  return name;
}

result<std::shared_ptr<engine_core>> start(const troupe_engine_options& given) {
  if (auto can = process_life::can_begin("an engine"); !can) return fail(can.error());
  constexpr uint32_t known = TROUPE_POLLING | TROUPE_CALLS | TROUPE_WATCH;
  if (auto flags = known_flags(given.flags, known, "options.flags"); !flags)
    return fail(flags.error());
  if (given.reserved != 0) return bad_argument("`options.reserved` is not 0");
  const auto name = name_of(given);
  if (!name) return fail(name.error());
  const auto deployment = load_deployment(
      {given.deployment_file, given.deployment_text, given.supervisor_host, given.supervisor_port});
  if (!deployment) return fail(deployment.error());
  auto options = memory_of(given);
  if (!options) return fail(options.error());
  if (given.join) {
    auto join = announcement_of(given.join);
    if (!join) return fail(join.error());
    options->join = std::move(*join);
  }

  auto core = std::make_shared<engine_core>();
  core->polling = options->polling;
  core->watching = options->watch;
  if ((given.flags & TROUPE_CALLS) != 0) {
    auto inbox = call_inbox::make();
    if (!inbox) return fail(inbox.error());
    core->calls = std::move(*inbox);
    // The engine ends before its inbox does.
    options->on_call = [inbox = core->calls.get()](call incoming) {
      inbox->put(std::move(incoming));
    };
  }
  auto node = engine::start(*deployment, *name, std::move(*options));
  if (!node) return fail(node.error());
  core->node = std::move(*node);
  if (core->calls) {
    auto both = either_of(core->node->event_fd(), core->calls->descriptor());
    if (!both) return fail(both.error());
    core->events = *both;
  }
  return core;
}

}  // namespace

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

troupe_status troupe_engine_start(const troupe_engine_options* options, troupe_engine** engine) {
  return guarded([&]() -> result<void> {
    if (auto out = present(engine, "engine"); !out) return out;
    const auto given = read(options, "options");
    if (!given) return fail(given.error());
    auto handle = std::make_unique<troupe_engine>();
    auto core = start(*given);
    if (!core) return fail(core.error());
    handle->core = std::move(*core);
    *engine = handle.release();
    return {};
  });
}

troupe_status troupe_engine_wait_registered(troupe_engine* engine, uint64_t timeout_ms) {
  return on_engine(engine, [&](engine_core& core, const auto&) {
    return core.node->wait_registered(milliseconds(timeout_ms));
  });
}

troupe_status troupe_engine_stop(troupe_engine* engine) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    core.node->stop();
    if (core.calls) core.calls->close();
    return {};
  });
}

void troupe_engine_free(troupe_engine* engine) {
  if (!engine) return;
  if (engine->core->life.is_this_process()) (void)troupe_engine_stop(engine);
  delete engine;
}

troupe_status troupe_engine_identity(const troupe_engine* engine, troupe_identity* identity) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = writable(identity, "identity"); !out) return out;
    const auto report = core.node->report();
    const auto& node = report.node;
    write({0, node.pid, node.incarnation, report.epoch, node.replica, node.rank, node.ranks,
           node.port, core.node->supervisor_incarnation()},
          identity);
    return {};
  });
}

troupe_status troupe_engine_layout(const troupe_engine* engine, troupe_layout** layout) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(layout, "layout"); !out) return out;
    *layout = new troupe_layout{core.node->layout()};
    return {};
  });
}

troupe_status troupe_engine_region(const troupe_engine* engine, uint32_t index,
                                   troupe_memory* memory) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(memory, "memory"); !out) return out;
    const auto region = core.node->region(index);
    if (!region) return fail(region.error());
    *memory = {region->data(), region->size()};
    return {};
  });
}

troupe_status troupe_engine_allocate_blocks(troupe_engine* engine, uint32_t count, uint64_t* owner,
                                            uint32_t* out) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto here = present(owner, "owner"); !here) return here;
    if (count != 0)
      if (auto here = present(out, "blocks"); !here) return here;
    const auto given = core.node->allocate_blocks(count);
    if (!given) return fail(given.error());
    for (std::size_t i = 0; i < given->blocks.size(); ++i) out[i] = given->blocks[i].value;
    *owner = given->owner.value;
    return {};
  });
}

troupe_status troupe_engine_free_blocks(troupe_engine* engine, uint64_t owner,
                                        const uint32_t* given, size_t count) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    const auto ids = blocks(given, count, "blocks");
    if (!ids) return fail(ids.error());
    return core.node->free_blocks(kvcache::block_owner{owner}, *ids);
  });
}

troupe_status troupe_engine_set_queue_length(troupe_engine* engine, uint32_t requests) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    core.node->set_queue_length(requests);
    return {};
  });
}

troupe_status troupe_engine_draining(const troupe_engine* engine, uint32_t* standing) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(standing, "standing"); !out) return out;
    *standing = static_cast<uint32_t>(core.node->draining());
    return {};
  });
}

troupe_status troupe_engine_report_failure(troupe_engine* engine, const char* why) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    auto reason = text(why, "why");
    if (!reason) return fail(reason.error());
    core.node->report_failure(std::move(*reason));
    return {};
  });
}

troupe_status troupe_engine_recover(troupe_engine* engine) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    core.node->recover();
    return {};
  });
}

troupe_status troupe_engine_report(const troupe_engine* engine, char** json) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(json, "json"); !out) return out;
    *json = copy_for_c(deploy::text_of(deploy::to_json(core.node->report()), 2));
    return {};
  });
}
