#include "troupe/deploy/reference_engine/calls.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include <nlohmann/json.hpp>

namespace troupe::reference {

namespace {

using nlohmann::json;

json to_value(const sampling& how) {
  return {
      {"temperature", how.temperature}, {"seed", how.seed}, {"printable_only", how.printable_only}};
}
json to_value(const generation& text) {
  return {{"tokens", text.tokens}, {"logits_checksum", text.logits_checksum}};
}

payload bytes_of(const json& value) {
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return {text.begin(), text.end()};
}

/// Replaces `into` by the member's value; a missing member leaves it unchanged.
template <class T>
void take(const json& object, const char* key, T& into) {
  if (const auto found = object.find(key); found != object.end()) into = found->get<T>();
}
void take(const json& object, const char* key, sampling& into) {
  const auto found = object.find(key);
  if (found == object.end()) return;
  take(*found, "temperature", into.temperature);
  take(*found, "seed", into.seed);
  take(*found, "printable_only", into.printable_only);
}
void take(const json& object, const char* key, generation& into) {
  const auto found = object.find(key);
  if (found == object.end()) return;
  take(*found, "tokens", into.tokens);
  take(*found, "logits_checksum", into.logits_checksum);
}

/// Parses an object and lets `fill` take its members. Exceptions of the library are caught here.
template <class T, class Fill>
result<T> parse(const char* what, const void* data, std::size_t size, Fill fill) {
  try {
    const auto* text = static_cast<const char*>(data);
    const json value = json::parse(text, text + size);
    if (!value.is_object())
      return fail(errc::invalid_config, std::string{what} + ": expected a JSON object");
    T into;
    fill(value, into);
    return into;
  } catch (const std::exception& e) {
    return fail(errc::invalid_config, std::string{what} + ": " + e.what());
  }
}
template <class T, class Fill>
result<T> parse(const char* what, std::span<const std::uint8_t> bytes, Fill fill) {
  return parse<T>(what, bytes.data(), bytes.size(), fill);
}

result<void> check_request(const char* what, const std::string& request,
                           const std::vector<token>& prompt) {
  if (request.empty() || request.size() > 256)
    return fail(errc::invalid_config, std::string{what} + ": `request` must be 1 to 256 bytes");
  if (prompt.empty() || prompt.size() > max_prompt_tokens)
    return fail(errc::invalid_config, std::string{what} + ": `prompt` must be 1 to " +
                                          std::to_string(max_prompt_tokens) +
                                          " token numbers, found " + std::to_string(prompt.size()));
  const auto foreign = std::find_if(prompt.begin(), prompt.end(), [](token t) {
    return t < 0 || t >= static_cast<token>(vocabulary);
  });
  if (foreign != prompt.end())
    return fail(errc::invalid_config, std::string{what} + ": token " + std::to_string(*foreign) +
                                          " is outside the vocabulary of " +
                                          std::to_string(vocabulary));
  return {};
}

}  // namespace

payload to_json(const prefill_call& call) {
  return bytes_of({{"request", call.request},
                   {"prompt", call.prompt},
                   {"chunk", call.chunk},
                   {"sampling", to_value(call.how)},
                   {"consumers", call.consumers},
                   {"deadline_ms", call.deadline_ms},
                   {"held_for", call.held_for}});
}

result<prefill_call> prefill_call_from(std::span<const std::uint8_t> bytes) {
  auto call = parse<prefill_call>("prefill", bytes, [](const json& value, prefill_call& into) {
    take(value, "request", into.request);
    take(value, "prompt", into.prompt);
    take(value, "chunk", into.chunk);
    take(value, "sampling", into.how);
    take(value, "consumers", into.consumers);
    take(value, "deadline_ms", into.deadline_ms);
    take(value, "held_for", into.held_for);
  });
  if (!call) return call;
  if (auto ok = check_request("prefill", call->request, call->prompt); !ok) return fail(ok.error());
  return call;
}

payload to_json(const prefill_reply& reply) {
  return bytes_of({{"prompt_tokens", reply.prompt_tokens},
                   {"first_token", reply.first_token},
                   {"bytes", reply.bytes},
                   {"started_ns", reply.started_ns},
                   {"computed_ns", reply.computed_ns},
                   {"done_ns", reply.done_ns}});
}

result<prefill_reply> prefill_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<prefill_reply>("prefill reply", bytes, [](const json& value, prefill_reply& into) {
    take(value, "prompt_tokens", into.prompt_tokens);
    take(value, "first_token", into.first_token);
    take(value, "bytes", into.bytes);
    take(value, "started_ns", into.started_ns);
    take(value, "computed_ns", into.computed_ns);
    take(value, "done_ns", into.done_ns);
  });
}

decode_call decode_at(const actors::placement& where) {
  decode_call call;
  call.request = where.request;
  for (const auto& node : where.prefill) call.sources.push_back(node.name);
  for (const auto& node : where.decode) call.replica.push_back(node.name);
  call.mode = where.mode;
  call.placed_by = where.supervisor_incarnation;
  call.placed_at = where.epoch;
  return call;
}

payload to_json(const decode_call& call) {
  return bytes_of({{"request", call.request},
                   {"sources", call.sources},
                   {"replica", call.replica},
                   {"mode", std::string{to_string(call.mode)}},
                   {"prompt", call.prompt},
                   {"max_tokens", call.max_tokens},
                   {"sampling", to_value(call.how)},
                   {"reuse_prefix", call.reuse_prefix},
                   {"deadline_ms", call.deadline_ms},
                   {"placed_by", call.placed_by},
                   {"placed_at", call.placed_at}});
}

result<decode_call> decode_call_from(std::span<const std::uint8_t> bytes) {
  std::string mode{to_string(transfer_mode::write)};
  auto call = parse<decode_call>("decode", bytes, [&mode](const json& value, decode_call& into) {
    take(value, "request", into.request);
    take(value, "sources", into.sources);
    take(value, "replica", into.replica);
    take(value, "mode", mode);
    take(value, "prompt", into.prompt);
    take(value, "max_tokens", into.max_tokens);
    take(value, "sampling", into.how);
    take(value, "reuse_prefix", into.reuse_prefix);
    take(value, "deadline_ms", into.deadline_ms);
    take(value, "placed_by", into.placed_by);
    take(value, "placed_at", into.placed_at);
  });
  if (!call) return call;
  if (auto ok = check_request("decode", call->request, call->prompt); !ok) return fail(ok.error());
  const auto known = transfer_mode_of(mode);
  if (!known)
    return fail(errc::invalid_config, "decode: `mode` must be write or read, found " + mode);
  call->mode = *known;
  if (call->sources.empty())
    return fail(errc::invalid_config, "decode: `sources` must name the nodes of a prefill replica");
  if (call->max_tokens == 0 || call->max_tokens > max_new_tokens)
    return fail(errc::invalid_config, "decode: `max_tokens` must be 1 to " +
                                          std::to_string(max_new_tokens) + ", found " +
                                          std::to_string(call->max_tokens));
  return call;
}

payload to_json(const decode_reply& reply) {
  return bytes_of({{"text", to_value(reply.text)},
                   {"bytes", reply.bytes},
                   {"prefix_tokens", reply.prefix_tokens},
                   {"started_ns", reply.started_ns},
                   {"received_ns", reply.received_ns},
                   {"done_ns", reply.done_ns},
                   {"computed_ns", reply.computed_ns},
                   {"landed_early", reply.landed_early}});
}

result<decode_reply> decode_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<decode_reply>("decode reply", bytes, [](const json& value, decode_reply& into) {
    take(value, "text", into.text);
    take(value, "bytes", into.bytes);
    take(value, "prefix_tokens", into.prefix_tokens);
    take(value, "started_ns", into.started_ns);
    take(value, "received_ns", into.received_ns);
    take(value, "done_ns", into.done_ns);
    take(value, "computed_ns", into.computed_ns);
    take(value, "landed_early", into.landed_early);
  });
}

payload to_json(const model_reply& reply) {
  json layers = json::array();
  for (const auto& layer : reply.model.layers)
    layers.push_back({{"kind", static_cast<std::uint8_t>(layer.kind)},
                      {"kv_heads", layer.kv_heads},
                      {"head_dim", layer.head_dim}});
  return bytes_of({{"layers", layers},
                   {"hidden", reply.model.hidden},
                   {"heads", reply.model.heads},
                   {"head_dim", reply.model.head_dim},
                   {"ffn", reply.model.ffn},
                   {"input_channels", reply.model.input_channels},
                   {"tied_head", reply.model.tied_head},
                   {"seed", reply.model.seed},
                   {"dtype", reply.dtype},
                   {"block_tokens", reply.block_tokens},
                   {"blocks", reply.blocks}});
}

result<model_reply> model_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<model_reply>("model reply", bytes, [](const json& value, model_reply& into) {
    for (const auto& layer : value.at("layers")) {
      kvcache::layer_shape shape;
      shape.kind = static_cast<kvcache::layer_kind>(layer.at("kind").get<std::uint8_t>());
      take(layer, "kv_heads", shape.kv_heads);
      take(layer, "head_dim", shape.head_dim);
      into.model.layers.push_back(shape);
    }
    take(value, "hidden", into.model.hidden);
    take(value, "heads", into.model.heads);
    take(value, "head_dim", into.model.head_dim);
    take(value, "ffn", into.model.ffn);
    take(value, "input_channels", into.model.input_channels);
    take(value, "tied_head", into.model.tied_head);
    take(value, "seed", into.model.seed);
    take(value, "dtype", into.dtype);
    take(value, "block_tokens", into.block_tokens);
    take(value, "blocks", into.blocks);
  });
}

payload to_json(const text_reply& reply) {
  return bytes_of({{"tokens", reply.tokens}});
}

result<text_reply> text_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<text_reply>("text reply", bytes, [](const json& value, text_reply& into) {
    take(value, "tokens", into.tokens);
  });
}

payload abort_to_json(const std::string& request) {
  return bytes_of({{"request", request}});
}

result<std::string> abort_from(std::span<const std::uint8_t> bytes) {
  return parse<std::string>("abort", bytes, [](const json& value, std::string& into) {
    into = value.at("request").get<std::string>();
  });
}

std::vector<std::byte> to_aux(const handoff& what) {
  const auto json_bytes =
      bytes_of({{"text", to_value(what.text)}, {"computed_ns", what.computed_ns}});
  const auto view = std::as_bytes(std::span{json_bytes});
  return {view.begin(), view.end()};
}

result<handoff> handoff_from(std::span<const std::byte> aux) {
  auto what =
      parse<handoff>("handoff", aux.data(), aux.size(), [](const json& value, handoff& into) {
        take(value, "text", into.text);
        take(value, "computed_ns", into.computed_ns);
      });
  if (what && what->text.tokens.size() != 1)
    return fail(errc::invalid_config, "handoff: the prefill engine sealed without a first token");
  return what;
}

}  // namespace troupe::reference
