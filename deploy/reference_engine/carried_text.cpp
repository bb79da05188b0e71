#include "troupe/deploy/reference_engine/carried_text.hpp"

#include <memory>

namespace troupe::reference {

actors::carried_request carried_text(const text_order& what) {
  const auto order = std::make_shared<const text_order>(what);
  actors::carried_request request;
  request.request = order->request;
  request.from = order->from;
  request.to = order->to;
  request.deadline = order->deadline;
  request.prefill = [order](const actors::carried_attempt& now, const actors::node_info&) {
    prefill_call call;
    call.request = now.source;
    call.prompt = order->prompt;
    call.chunk = order->chunk;
    call.how = order->how;
    call.deadline_ms = static_cast<std::uint32_t>(now.left.count());
    for (const auto& node : now.where.decode) call.held_for.push_back(node.name);
    return actors::call_request{"prefill", to_json(call), 0};
  };
  request.decode = [order](const actors::carried_attempt& now, const actors::node_info&) {
    auto call = decode_at(now.where);
    call.request = now.source;
    call.prompt = order->prompt;
    call.max_tokens = order->max_tokens;
    call.how = order->how;
    call.deadline_ms = static_cast<std::uint32_t>(now.left.count());
    return actors::call_request{"decode", to_json(call), 0};
  };
  request.abort = [](const actors::carried_attempt& now, const actors::node_info&) {
    return actors::call_request{"abort", abort_to_json(now.source), 0};
  };
  return request;
}

}  // namespace troupe::reference
