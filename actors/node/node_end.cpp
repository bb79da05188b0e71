#include "troupe/actors/node/node_end.hpp"

#include <memory>
#include <new>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors {

void end_node(node_context& context, std::string_view what_happened) noexcept {
  const auto why = [what_happened] {
    return why_ended(errc::internal, what_happened,
                     " (see the log); this node no longer serves anybody, start it again");
  };
  (void)or_error("", [&] { logger("node")->error("{}: {}", context.self.name, why().message); });
  context.registration.end(why());
  context.events.close(why(), why());
}

troupe::error why_ended(errc code, std::string_view what, std::string_view then) noexcept {
  try {
    return {code, std::string{what}.append(then)};
  } catch (const std::bad_alloc&) {
    return {code, "out of memory"};  // short enough to need none
  }
}

void watch_essential(const context_ptr& context, const caf::strong_actor_ptr& actor,
                     std::string what) {
  what += " crashed";
  on_crash(actor, [context, what = std::move(what)] {  // touches only thread-safe objects
    end_node(*context, what);
  });
}

void watch_network(const context_ptr& context, caf::actor_system& system) {
  // Weak: the network lives as long as the system, which ends after the node.
  on_network_crash(system, [weak = std::weak_ptr{context}] {
    if (const auto held = weak.lock()) end_node(*held, "the network of this process crashed");
  });
}

}  // namespace troupe::actors
