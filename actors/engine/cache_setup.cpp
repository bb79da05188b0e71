#include "troupe/actors/engine/cache_setup.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/engine/engine_setup.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/kvcache/layout.hpp"

namespace troupe::actors {

namespace {

const char* const region_name = "cache region";

/// Checks the layout as one of this node, in regions of these sizes.
result<void> check_layout(const node_context& context, const kvcache::cache_layout& layout,
                          std::span<const std::uint64_t> sizes) {
  if (auto mine = check_layout_of(context.settings, context.self.name, layout); !mine) return mine;
  return kvcache::validate(layout, sizes);
}

/// The engine's own layout in its own memory.
result<void> adopt_memory(node_context& context, const engine_options& options) {
  std::vector<std::uint64_t> sizes;
  for (const auto& region : options.regions) sizes.push_back(region.size());
  if (auto fine = check_layout(context, *options.layout, sizes); !fine) return fine;
  for (const auto& bytes : options.regions) {
    auto region = context.endpoint->register_memory(
        bytes, std::string{region_name} + " " + std::to_string(context.regions.size()));
    if (!region) return fail(region.error());
    context.regions.push_back(*region);
  }
  context.layout = std::make_shared<const kvcache::cache_layout>(*options.layout);
  return {};
}

/// The sizes that the layout needs; 1 byte for a region that it leaves out.
std::vector<std::uint64_t> sizes_for(const kvcache::cache_layout& layout) {
  auto sizes = kvcache::region_sizes(layout);
  for (auto& size : sizes) size = std::max<std::uint64_t>(size, 1);
  return sizes;
}

result<void> allocate_on_host(node_context& context, const kvcache::cache_layout& layout,
                              const transport::host_memory_options& how) {
  const auto sizes = sizes_for(layout);
  auto made = context.endpoint->allocate(sizes, region_name, how);
  if (!made) return fail(made.error());
  context.regions = std::move(made->regions);
  context.cache_memory = std::move(made->pages);
  std::uint64_t bytes = 0;
  for (const auto size : sizes) bytes += size;
  logger("node")->info("{}: cache of {} bytes in {}: {}", context.self.name, bytes,
                       count_of(sizes.size(), "region"), context.cache_memory);
  return {};
}

/// The engine's own layout in memory that Troupe allocates.
result<void> allocate_for_layout(node_context& context, const engine_options& options) {
  const auto& layout = *options.layout;
  if (auto fine = kvcache::check(layout); !fine) return fine;
  if (auto fine = check_layout(context, layout, sizes_for(layout)); !fine) return fine;
  if (auto made = allocate_on_host(context, layout, *options.allocate); !made) {
    if (made.error().code != errc::pool_exhausted) return made;
    return fail(errc::pool_exhausted, made.error().message + "; give the layout less than its " +
                                          std::to_string(layout.blocks) + " blocks");
  }
  context.layout = std::make_shared<const kvcache::cache_layout>(layout);
  return {};
}

/// A cache of the node's own, from the deployment's model and pool.
result<void> make_pool(node_context& context, const config::deployment& deployment,
                       const config::stage_config& stage) {
  auto layout = layout_of(deployment, stage, context.self.rank);
  if (!layout) return fail(layout.error());
  if (const auto gpu = gpu_of(stage, context.self)) {
    for (const auto size : sizes_for(*layout)) {
      auto region = context.endpoint->allocate_on_gpu(
          *gpu, size, std::string{region_name} + " " + std::to_string(context.regions.size()));
      if (!region) return fail(region.error());
      context.regions.push_back(*region);
    }
  } else if (auto made =
                 allocate_on_host(context, *layout, {.pages = transport::page_choice::ordinary});
             !made) {
    return made;
  }
  context.pool = std::make_unique<cache_pool>(layout->blocks);
  context.layout = std::make_shared<const kvcache::cache_layout>(std::move(*layout));
  return {};
}

/// Whether the options agree with each other and with the deployment's stage.
result<void> check_options(const node_context& context, const config::stage_config& stage,
                           const engine_options& options) {
  const auto wrong = [](std::string what) { return fail(errc::invalid_config, std::move(what)); };
  const bool brings = !options.regions.empty();
  if (brings && options.allocate) {
    return wrong(
        "the engine's options have both `regions` (" + count_of(options.regions.size(), "region") +
        ") and `allocate`: leave `regions` empty for memory of Troupe's, or `allocate` for "
        "the engine's own");
  }
  if (!options.layout && options.allocate) {
    return wrong(
        "the engine's options have `allocate` and no `layout` to allocate for: set `layout`, or "
        "leave `allocate` out and have the cache made of the deployment's model and pool");
  }
  if (!options.layout && brings) {
    return wrong("the engine's options have " + count_of(options.regions.size(), "region") +
                 " and no `layout` that says how the cache lies in them: set `layout`");
  }
  if (options.layout && !brings && !options.allocate) {
    return wrong(
        "the engine's options have a `layout` and no memory: give `regions`, or set `allocate` for "
        "memory of Troupe's");
  }
  if (const auto gpu = gpu_of(stage, context.self); gpu && options.allocate) {
    return wrong("`allocate` makes memory of the host, and the deployment's stage `" + stage.name +
                 "` puts the cache of " + context.self.name + " on gpu:" + std::to_string(*gpu) +
                 ": register memory of the GPU by `regions`, or change the stage's pool.device");
  }
  return {};
}

/// Finds out whose memory the cache is in. Regions that the layout leaves out do not count.
void note_memory(node_context& context) {
  if (!context.layout) return;
  const auto sizes = kvcache::region_sizes(*context.layout);
  std::optional<std::size_t> on_gpu;
  std::optional<std::size_t> on_host;
  std::optional<std::uint32_t> gpu;
  for (std::size_t i = 0; i < std::min(sizes.size(), context.regions.size()); ++i) {
    if (sizes[i] == 0) continue;
    const auto found = context.endpoint->gpu_of(context.regions[i]);
    if (found && !on_gpu) {
      on_gpu = i;
      gpu = found;
    } else if (!found && !on_host) {
      on_host = i;
    }
  }
  if (on_gpu && on_host) {
    context.cache_in_both = "region " + std::to_string(*on_gpu) +
                            " in memory of gpu:" + std::to_string(*gpu) + " and region " +
                            std::to_string(*on_host) + " in that of the host";
  } else {
    context.cache_gpu = gpu;
  }
  if (on_host && context.cache_memory.empty()) context.cache_memory = "the engine's";
}

result<void> make_any_cache(node_context& context, const config::deployment& deployment,
                            const config::stage_config& stage, const engine_options& options) {
  if (options.layout) {
    return options.allocate ? allocate_for_layout(context, options)
                            : adopt_memory(context, options);
  }
  const bool is_store = stage.role == config::role::store;
  if (is_store || !stage.pool || !deployment.model) return {};
  return make_pool(context, deployment, stage);
}

}  // namespace

std::optional<std::uint32_t> gpu_of(const config::stage_config& stage, const node_info& node) {
  const auto slot = std::size_t{node.replica} * node.ranks + node.rank;
  if (!stage.pool || slot >= stage.pool->gpus.size()) return std::nullopt;
  return stage.pool->gpus[slot];
}

result<void> make_cache(node_context& context, const config::deployment& deployment,
                        const config::stage_config& stage, const engine_options& options) {
  if (auto fine = check_options(context, stage, options); !fine) return fine;
  if (auto made = make_any_cache(context, deployment, stage, options); !made) return made;
  note_memory(context);
  return {};
}

}  // namespace troupe::actors
