#include <functional>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/c/handles.hpp"

using namespace troupe;
using namespace troupe::c;

namespace {

/// A call on a key of a node.
template <class Begin>
troupe_status keyed(troupe_engine* engine, const char* peer, const char* key,
                    troupe_operation* operation, Begin begin) noexcept {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(operation, "operation"); !out) return out;
    auto node = text(peer, "peer");
    if (!node) return fail(node.error());
    auto name = text(key, "key");
    if (!name) return fail(name.error());
    return begun(std::invoke(begin, *core.node, std::move(*node), std::move(*name)), operation);
  });
}

}  // namespace

troupe_status troupe_engine_put(troupe_engine* engine, const char* peer, const char* key,
                                const void* value, size_t value_size, uint64_t ttl_ms,
                                troupe_operation* operation) {
  return keyed(engine, peer, key, operation,
               [&](troupe::engine& node, std::string to, std::string name) -> result<operation_id> {
                 const auto given = bytes(value, value_size, "value");
                 if (!given) return fail(given.error());
                 return node.put(std::move(to), std::move(name), *given, milliseconds(ttl_ms));
               });
}

troupe_status troupe_engine_get(troupe_engine* engine, const char* peer, const char* key,
                                troupe_operation* operation) {
  return keyed(engine, peer, key, operation, &troupe::engine::get);
}

troupe_status troupe_engine_query(troupe_engine* engine, const char* peer, const char* key,
                                  troupe_operation* operation) {
  return keyed(engine, peer, key, operation, &troupe::engine::query);
}

troupe_status troupe_engine_remove(troupe_engine* engine, const char* peer, const char* key,
                                   troupe_operation* operation) {
  return keyed(engine, peer, key, operation, &troupe::engine::remove);
}
