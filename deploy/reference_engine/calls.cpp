#include "troupe/deploy/reference_engine/calls.hpp"

#include <algorithm>
#include <concepts>
#include <exception>
#include <type_traits>

#include <nlohmann/json.hpp>

namespace troupe::reference {

namespace {

using nlohmann::json;

// The members of each struct, written and read alike: `visit` takes the key and the member.

template <class T, class Of>
concept maybe_const = std::same_as<std::remove_const_t<T>, Of>;

void members(maybe_const<sampling> auto& of, auto visit) {
  visit("temperature", of.temperature);
  visit("seed", of.seed);
  visit("printable_only", of.printable_only);
}
void members(maybe_const<generation> auto& of, auto visit) {
  visit("tokens", of.tokens);
  visit("logits_checksum", of.logits_checksum);
}
void members(maybe_const<prefill_call> auto& of, auto visit) {
  visit("request", of.request);
  visit("prompt", of.prompt);
  visit("chunk", of.chunk);
  visit("sampling", of.how);
  visit("consumers", of.consumers);
  visit("deadline_ms", of.deadline_ms);
  visit("held_for", of.held_for);
}
void members(maybe_const<prefill_reply> auto& of, auto visit) {
  visit("prompt_tokens", of.prompt_tokens);
  visit("first_token", of.first_token);
  visit("bytes", of.bytes);
  visit("started_ns", of.started_ns);
  visit("computed_ns", of.computed_ns);
  visit("done_ns", of.done_ns);
}
/// Without the mode, which is a word.
void members(maybe_const<decode_call> auto& of, auto visit) {
  visit("request", of.request);
  visit("sources", of.sources);
  visit("replica", of.replica);
  visit("prompt", of.prompt);
  visit("max_tokens", of.max_tokens);
  visit("sampling", of.how);
  visit("reuse_prefix", of.reuse_prefix);
  visit("deadline_ms", of.deadline_ms);
  visit("placed_by", of.placed_by);
  visit("placed_at", of.placed_at);
}
void members(maybe_const<decode_reply> auto& of, auto visit) {
  visit("text", of.text);
  visit("bytes", of.bytes);
  visit("prefix_tokens", of.prefix_tokens);
  visit("started_ns", of.started_ns);
  visit("received_ns", of.received_ns);
  visit("done_ns", of.done_ns);
  visit("computed_ns", of.computed_ns);
  visit("landed_early", of.landed_early);
}
/// Without the layers.
void members(maybe_const<model_reply> auto& of, auto visit) {
  visit("hidden", of.model.hidden);
  visit("heads", of.model.heads);
  visit("head_dim", of.model.head_dim);
  visit("ffn", of.model.ffn);
  visit("input_channels", of.model.input_channels);
  visit("tied_head", of.model.tied_head);
  visit("seed", of.model.seed);
  visit("dtype", of.dtype);
  visit("block_tokens", of.block_tokens);
  visit("blocks", of.blocks);
}
void members(maybe_const<text_reply> auto& of, auto visit) {
  visit("tokens", of.tokens);
}
void members(maybe_const<handoff> auto& of, auto visit) {
  visit("text", of.text);
  visit("computed_ns", of.computed_ns);
}

template <class T>
constexpr bool is_nested = std::same_as<T, sampling> || std::same_as<T, generation>;

template <class T>
json to_value(const T& from) {
  auto value = json::object();
  members(from, [&value]<class Member>(const char* key, const Member& member) {
    if constexpr (is_nested<Member>) {
      value[key] = to_value(member);
    } else {
      value[key] = member;
    }
  });
  return value;
}

payload bytes_of(const json& value) {
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return {text.begin(), text.end()};
}

/// Replaces the members of `into` that `object` has.
template <class T>
void take(const json& object, T& into) {
  members(into, [&object]<class Member>(const char* key, Member& member) {
    const auto found = object.find(key);
    if (found == object.end()) return;
    if constexpr (is_nested<Member>) {
      take(*found, member);
    } else {
      member = found->template get<Member>();
    }
  });
}

/// Parses an object and lets `fill` take its members. Exceptions of the library are caught here.
template <class T, class Byte, class Fill = void (*)(const json&, T&)>
result<T> parse(const char* what, std::span<Byte> bytes, Fill fill = &take<T>) {
  try {
    const auto* text = reinterpret_cast<const char*>(bytes.data());
    const json value = json::parse(text, text + bytes.size());
    if (!value.is_object())
      return fail(errc::invalid_config, std::string{what} + ": expected a JSON object");
    T into;
    fill(value, into);
    return into;
  } catch (const std::exception& e) {
    return fail(errc::invalid_config, std::string{what} + ": " + e.what());
  }
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
  return bytes_of(to_value(call));
}

result<prefill_call> prefill_call_from(std::span<const std::uint8_t> bytes) {
  auto call = parse<prefill_call>("prefill", bytes);
  if (!call) return call;
  if (auto ok = check_request("prefill", call->request, call->prompt); !ok) return fail(ok.error());
  return call;
}

payload to_json(const prefill_reply& reply) {
  return bytes_of(to_value(reply));
}

result<prefill_reply> prefill_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<prefill_reply>("prefill reply", bytes);
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
  auto value = to_value(call);
  value["mode"] = std::string{to_string(call.mode)};
  return bytes_of(value);
}

result<decode_call> decode_call_from(std::span<const std::uint8_t> bytes) {
  std::string mode{to_string(transfer_mode::write)};
  auto call = parse<decode_call>("decode", bytes, [&mode](const json& value, decode_call& into) {
    take(value, into);
    mode = value.value("mode", mode);
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
  return bytes_of(to_value(reply));
}

result<decode_reply> decode_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<decode_reply>("decode reply", bytes);
}

payload to_json(const model_reply& reply) {
  json layers = json::array();
  for (const auto& layer : reply.model.layers)
    layers.push_back({{"kind", static_cast<std::uint8_t>(layer.kind)},
                      {"kv_heads", layer.kv_heads},
                      {"head_dim", layer.head_dim}});
  auto value = to_value(reply);
  value["layers"] = layers;
  return bytes_of(value);
}

result<model_reply> model_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<model_reply>("model reply", bytes, [](const json& value, model_reply& into) {
    for (const auto& layer : value.at("layers")) {
      kvcache::layer_shape shape;
      shape.kind = static_cast<kvcache::layer_kind>(layer.at("kind").get<std::uint8_t>());
      shape.kv_heads = layer.value("kv_heads", shape.kv_heads);
      shape.head_dim = layer.value("head_dim", shape.head_dim);
      into.model.layers.push_back(shape);
    }
    take(value, into);
  });
}

payload to_json(const text_reply& reply) {
  return bytes_of(to_value(reply));
}

result<text_reply> text_reply_from(std::span<const std::uint8_t> bytes) {
  return parse<text_reply>("text reply", bytes);
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
  const auto json_bytes = bytes_of(to_value(what));
  const auto view = std::as_bytes(std::span{json_bytes});
  return {view.begin(), view.end()};
}

result<handoff> handoff_from(std::span<const std::byte> aux) {
  auto what = parse<handoff>("handoff", aux);
  if (what && what->text.tokens.size() != 1)
    return fail(errc::invalid_config, "handoff: the prefill engine sealed without a first token");
  return what;
}

}  // namespace troupe::reference
