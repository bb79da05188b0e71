#include "wrong_calls.hpp"

#include <chrono>
#include <type_traits>
#include <vector>

namespace troupe::engine_fuzz {

using std::chrono::milliseconds;

template <class Value>
void wrong_calls::expect_refused(const char* call, const result<Value>& answer, errc code) {
  if (answer) {
    found_(std::string{call} + " is taken");
    if constexpr (std::is_same_v<Value, operation_id>)
      (void)engine_.abort(*answer, "it should have been refused");
  } else if (answer.error().code != code) {
    found_(std::string{call} + " is refused with " + to_string(answer.error()));
  } else {
    ++counts_.wrong_calls;
  }
}

void wrong_calls::make(std::uint32_t which, const std::optional<live_send>& live) {
  constexpr std::uint32_t first_of_any = 15;
  if (s_.is_aside(node_)) {
    call_over_no_edge();
    return;
  }
  // No edge leads to a prefill.
  if (s_.is_prefill(node_) && which < first_of_any)
    which = first_of_any + which % (wrong_call_count - first_of_any);
  if (which < first_of_any) {
    receive(which);
  } else {
    other(which, live);
  }
}

void wrong_calls::receive(std::uint32_t which) {
  const auto per_block = s_.model.block_tokens;
  receive_spec spec;
  spec.request = "wrong";
  for (std::uint32_t p = 0; p < s_.prefill.ranks; ++p) spec.sources.push_back(s_.name_of(p));
  spec.mode = s_.reads ? actors::transfer_mode::read : actors::transfer_mode::write;
  spec.tokens = per_block;
  spec.blocks = {block_id{0}};
  const auto refused = [&](const char* call, errc code) {
    expect_refused(call, engine_.receive(spec), code);
  };
  switch (which) {
    case 0: spec.sources.clear(); return refused("a receive from nobody", errc::invalid_config);
    case 1:
      if (s_.prefill.ranks == 1) return;
      spec.sources.erase(spec.sources.begin() + dice_.roll(0, s_.prefill.ranks - 1));
      return refused("a receive without a rank", errc::invalid_config);
    case 2:
      spec.sources.push_back(spec.sources[dice_.roll(0, s_.prefill.ranks - 1)]);
      return refused("a receive from a rank twice", errc::invalid_config);
    case 3:
      // From whom decode gets nothing: the one aside, or itself.
      spec.sources = {s_.name_of(s_.has_aside ? s_.joined_nodes() : node_)};
      return refused("a receive over no edge", errc::invalid_config);
    case 4:
      spec.sources.front() = "nobody";
      return refused("a receive from no node", errc::not_found);
    case 5:
      spec.mode = s_.reads ? actors::transfer_mode::write : actors::transfer_mode::read;
      return refused("a receive in another mode", errc::invalid_config);
    case 6:
      spec.tokens = 2 * per_block;
      spec.blocks = {block_id{0}, block_id{0}};
      return refused("a receive into a block twice", errc::invalid_config);
    case 7:
      spec.blocks = {block_id{its_.blocks}};
      return refused("a receive into no block", errc::out_of_range);
    case 8:
      spec.prefix_tokens = spec.tokens + 1;
      return refused("a receive of less than its prefix", errc::out_of_range);
    case 9:
      spec.tokens = per_block + 1;
      return refused("a receive into too few blocks", errc::out_of_range);
    case 10: spec.request.clear(); return refused("a receive of no name", errc::invalid_config);
    case 11:
      spec.request.assign(257, 'x');
      return refused("a receive of a long name", errc::invalid_config);
    case 12:
      if (s_.model.states.empty()) return;
      spec.state_slot = s_.model.state_slots;
      return refused("a receive into no slot", errc::out_of_range);
    case 13:
      spec.blocks.clear();
      spec.prefix_tokens = 1;
      return refused("a receive with a prefix nowhere", errc::invalid_config);
    default:
      spec.blocks.clear();
      if (its_.pooled) spec.tokens = its_.blocks * per_block + 1;
      return refused("a receive that has no room",
                     its_.pooled ? errc::pool_exhausted : errc::invalid_config);
  }
}

void wrong_calls::other(std::uint32_t which, const std::optional<live_send>& live) {
  switch (which) {
    case 15: {
      send_spec spec;
      spec.request = "wrong";
      spec.blocks = {block_id{its_.blocks}};
      expect_refused("a send of no block", engine_.send(std::move(spec)), errc::out_of_range);
      break;
    }
    case 16: {
      send_spec spec;
      spec.request = "wrong";
      spec.held_for = {"nobody"};
      expect_refused("a send for no node", engine_.send(std::move(spec)), errc::not_found);
      break;
    }
    case 17:
      if (live) speak_of(*live);
      break;
    case 18:
      expect_refused("a put at no node", engine_.put("nobody", "k", {}), errc::not_found);
      break;
    case 19:
      expect_refused("a put of no key", engine_.put(s_.name_of(node_), "", {}),
                     errc::invalid_config);
      expect_refused("a put that ends before it begins",
                     engine_.put(s_.name_of(node_), "k", {}, milliseconds{-1}),
                     errc::invalid_config);
      break;
    case 20:
      expect_refused("an abort of nothing", engine_.abort(operation_id{1U << 30U}, "x"),
                     errc::not_found);
      break;
    case 21:
      if (its_.pooled) {
        const std::vector<block_id> one{block_id{0}};
        expect_refused("a free of another's block",
                       engine_.free_blocks(kvcache::block_owner{1U << 30U}, one), errc::not_found);
      } else {
        expect_refused("an allocation without a pool", engine_.allocate_blocks(1),
                       errc::invalid_config);
      }
      break;
    default:
      if (s_.has_aside) {
        call_values_of(s_.name_of(s_.joined_nodes()));
      } else {
        call_values_of("supervisor");
      }
  }
}

/// What a node may do whose stage no edge touches: nothing with others.
void wrong_calls::call_over_no_edge() {
  receive_spec spec;
  spec.request = "wrong";
  for (std::uint32_t p = 0; p < s_.prefill.ranks; ++p) spec.sources.push_back(s_.name_of(p));
  spec.mode = s_.reads ? actors::transfer_mode::read : actors::transfer_mode::write;
  spec.tokens = s_.model.block_tokens;
  spec.blocks = {block_id{0}};
  expect_refused("a receive by a node without an edge", engine_.receive(spec),
                 errc::invalid_config);
  expect_refused("a release by a node without an edge", engine_.release("wrong", spec.sources),
                 errc::invalid_config);
  expect_refused("a hold by a node without an edge", engine_.hold("wrong", spec.sources),
                 errc::invalid_config);
  call_values_of(s_.name_of(dice_.roll(0, s_.joined_nodes() - 1)));
}

/// Of a node that no edge joins with this one.
void wrong_calls::call_values_of(const std::string& peer) {
  constexpr auto code = errc::invalid_config;
  static const std::vector<std::byte> value(4);  // longer than a put that is taken
  expect_refused("a put over no edge", engine_.put(peer, "k", value), code);
  expect_refused("a get over no edge", engine_.get(peer, "k"), code);
  expect_refused("a query over no edge", engine_.query(peer, "k"), code);
  expect_refused("a remove over no edge", engine_.remove(peer, "k"), code);
}

void wrong_calls::speak_of(const live_send& live) {
  const auto layers = static_cast<std::uint32_t>(s_.model.layers.size());
  const auto room = live.blocks * s_.model.block_tokens;
  const auto send = live.operation;
  expect_refused("layers that are not there", engine_.layers_ready(send, 0, layers + 1, 1),
                 errc::out_of_range);
  expect_refused("no layers", engine_.layers_ready(send, 1, 1, 1), errc::out_of_range);
  expect_refused("tokens that have no block", engine_.layers_ready(send, 0, 1, room + 1),
                 errc::out_of_range);
  expect_refused("a seal of tokens that have no block", engine_.seal(send, room + 1),
                 errc::out_of_range);
  expect_refused("too much data of the engine",
                 engine_.seal(send, 1, std::vector<std::byte>(65'537)), errc::out_of_range);
  if (!live.grows) {
    expect_refused("blocks for a send that has all", engine_.add_blocks(send, {block_id{0}}),
                   errc::invalid_config);
  } else {
    expect_refused("a block that is none", engine_.add_blocks(send, {block_id{its_.blocks}}),
                   errc::out_of_range);
  }
  send_spec again;
  again.request = live.request;
  expect_refused("a send of a live request", engine_.send(std::move(again)), errc::already_exists);
}

}  // namespace troupe::engine_fuzz
