#include "wrong_calls.hpp"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <vector>

namespace troupe::engine_fuzz {

using std::chrono::milliseconds;

template <class Value>
void wrong_calls::expect_refused(const std::string& call, const result<Value>& answer, errc code) {
  if (answer) {
    found_(call + " is taken");
    if constexpr (std::is_same_v<Value, operation_id>)
      (void)engine_.abort(*answer, "it should have been refused");
  } else if (answer.error().code != code) {
    found_(call + " is refused with " + to_string(answer.error()));
  } else {
    ++counts_.wrong_calls;
  }
}

// -- valid arguments

std::vector<std::string> wrong_calls::some_sources() const {
  std::vector<std::string> names;
  if (s_.is_mutual() && s_.is_prefill(node_)) {
    for (std::uint32_t rank = 0; rank < s_.decode.ranks; ++rank)
      names.push_back(s_.name_of(s_.decode_node(0, rank)));
  } else {
    for (std::uint32_t p = 0; p < s_.prefill.ranks; ++p) names.push_back(s_.name_of(p));
  }
  return names;
}

template <class Spec>
void wrong_calls::name_blocks(Spec& spec) const {
  if (s_.groups.empty()) {
    spec.blocks = {block_id{0}};
    return;
  }
  for (std::uint32_t t = 0; t < s_.tables(); ++t) spec.groups.push_back({0, {block_id{t}}});
}

receive_spec wrong_calls::a_receive() const {
  receive_spec spec;
  spec.request = "wrong";
  spec.sources = some_sources();
  spec.mode = s_.reads ? actors::transfer_mode::read : actors::transfer_mode::write;
  spec.tokens = s_.block_tokens(0);
  for (std::uint32_t t = 1; t < s_.tables(); ++t)
    spec.tokens = std::min(spec.tokens, s_.block_tokens(t));
  name_blocks(spec);
  return spec;
}

send_spec wrong_calls::a_send() const {
  send_spec spec;
  spec.request = "wrong";
  name_blocks(spec);
  return spec;
}

template <class Spec>
std::vector<block_id>& wrong_calls::some_blocks(Spec& spec) {
  if (spec.groups.empty()) return spec.blocks;
  return spec.groups[dice_.roll(0, s_.tables() - 1)].blocks;
}

// -- invalid calls

void wrong_calls::make(std::uint32_t which, const std::optional<live_send>& live) {
  constexpr std::uint32_t first_of_any = 15;
  if (s_.is_aside(node_)) {
    call_over_no_edge();
    return;
  }
  if (which >= wrong_call_count) {
    name_groups_wrongly(which - wrong_call_count);
    return;
  }
  // No edge leads to a prefill node.
  if (!may_receive() && which < first_of_any)
    which = first_of_any + which % (wrong_call_count - first_of_any);
  if (which < first_of_any) {
    receive(which);
  } else {
    other(which, live);
  }
}

void wrong_calls::receive(std::uint32_t which) {
  auto spec = a_receive();
  const auto per_block = spec.tokens;
  const auto ranks = static_cast<std::uint32_t>(spec.sources.size());
  const auto refused = [&](const char* call, errc code) {
    expect_refused(call, engine_.receive(spec), code);
  };
  switch (which) {
    case 0: spec.sources.clear(); return refused("a receive from nobody", errc::invalid_config);
    case 1:
      if (ranks == 1) return;
      // In an open stage only its nodes, when asked, tell that a replica has one rank more than
      // named: the last rank stays.
      spec.sources.erase(spec.sources.begin() + dice_.roll(0, ranks - (s_.is_open() ? 2 : 1)));
      return refused("a receive without a rank", errc::invalid_config);
    case 2:
      spec.sources.push_back(spec.sources[dice_.roll(0, ranks - 1)]);
      return refused("a receive from a rank twice", errc::invalid_config);
    case 3:
      // Sources that decode may not receive from: the node aside, or itself.
      spec.sources = {s_.name_of(s_.has_aside ? s_.joined_nodes() : node_)};
      return refused("a receive over no edge", errc::invalid_config);
    case 4:
      // Names a stage that does not exist, or an unknown node.
      spec.sources.front() = s_.is_open() && node_ % 2 == 0 ? "nowhere.p0.0" : "nobody";
      return refused("a receive from no node", errc::not_found);
    case 5:
      spec.mode = s_.reads ? actors::transfer_mode::write : actors::transfer_mode::read;
      return refused("a receive in another mode", errc::invalid_config);
    case 6:
      spec.tokens = s_.groups.empty() ? 2 * per_block : per_block;
      some_blocks(spec).assign(2, block_id{0});
      return refused("a receive into a block twice", errc::invalid_config);
    case 7:
      some_blocks(spec) = {block_id{its_.blocks}};
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
      spec.groups.clear();
      spec.prefix_tokens = 1;
      return refused("a receive with a prefix nowhere", errc::invalid_config);
    default:
      spec.blocks.clear();
      spec.groups.clear();
      if (its_.pooled) spec.tokens = its_.blocks * per_block + 1;
      return refused("a receive that has no room",
                     its_.pooled ? errc::pool_exhausted : errc::invalid_config);
  }
}

void wrong_calls::other(std::uint32_t which, const std::optional<live_send>& live) {
  switch (which) {
    case 15: {
      auto spec = a_send();
      some_blocks(spec) = {block_id{its_.blocks}};
      expect_refused("a send of no block", engine_.send(std::move(spec)), errc::out_of_range);
      break;
    }
    case 16: {
      auto spec = a_send();
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

/// The calls of a node whose stage no edge touches: it can do nothing with others.
void wrong_calls::call_over_no_edge() {
  const auto spec = a_receive();
  expect_refused("a receive by a node without an edge", engine_.receive(spec),
                 errc::invalid_config);
  expect_refused("a release by a node without an edge", engine_.release("wrong", spec.sources),
                 errc::invalid_config);
  expect_refused("a hold by a node without an edge", engine_.hold("wrong", spec.sources),
                 errc::invalid_config);
  call_values_of(s_.name_of(dice_.roll(0, s_.joined_nodes() - 1)));
}

/// Calls about values of a node that no edge joins with this one.
void wrong_calls::call_values_of(const std::string& peer) {
  constexpr auto code = errc::invalid_config;
  static const std::vector<std::byte> value(4);  // longer than a put that is accepted
  expect_refused("a put over no edge", engine_.put(peer, "k", value), code);
  expect_refused("a get over no edge", engine_.get(peer, "k"), code);
  expect_refused("a query over no edge", engine_.query(peer, "k"), code);
  expect_refused("a remove over no edge", engine_.remove(peer, "k"), code);
}

void wrong_calls::speak_of(const live_send& live) {
  const auto layers = static_cast<std::uint32_t>(s_.model.layers.size());
  const auto room = live.room;
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
  const auto last = s_.tables() - 1;
  if (!live.grows) {
    expect_refused("blocks for a send that has all", engine_.add_blocks(send, {block_id{0}}, last),
                   errc::invalid_config);
  } else {
    expect_refused("a block that is none", engine_.add_blocks(send, {block_id{its_.blocks}}, last),
                   errc::out_of_range);
  }
  expect_refused("a block of no group of layers", engine_.add_blocks(send, {block_id{0}}, last + 1),
                 errc::out_of_range);
  auto again = a_send();
  again.blocks.clear();  // a pool would look for blocks first
  again.request = live.request;
  expect_refused("a send of a live request", engine_.send(std::move(again)), errc::already_exists);
}

// -- groups of layers

void wrong_calls::name_groups_wrongly(std::uint32_t which) {
  auto offer = a_send();
  auto wish = a_receive();
  auto& groups = offer.groups;
  const auto some = dice_.roll(0, s_.tables() - 1);
  std::string what;
  auto code = errc::invalid_config;
  switch (which) {
    case 0:
      what = " with a table too few";
      groups.pop_back();
      break;
    case 1:
      what = " with a group twice";
      groups.push_back(groups[some]);
      break;
    case 2:
      if (s_.block_tokens(some) == 1) return;
      what = " from the middle of a block on";
      groups[some].first_token = dice_.roll(1, s_.block_tokens(some) - 1);
      break;
    case 3:
      what = " with blocks for all layers, and for each group";
      offer.blocks = groups[some].blocks;
      break;
    case 4:
      what = " with blocks for all layers";
      offer.blocks = groups[some].blocks;
      groups.clear();
      break;
    case 5:
      what = " with a block that is none";
      groups[some].blocks.push_back(block_id{its_.blocks});
      code = errc::out_of_range;
      break;
    case 6: return expect_no_receive_into_one_block_twice();
    default: return expect_no_receive_that_a_group_is_short_of();
  }
  wish.groups = groups;
  wish.blocks = offer.blocks;
  expect_refused("a send" + what, engine_.send(std::move(offer)), code);
  if (may_receive()) expect_refused("a receive" + what, engine_.receive(std::move(wish)), code);
}

/// Tries to receive into one block through two groups that lie over the same bytes.
void wrong_calls::expect_no_receive_into_one_block_twice() {
  if (!may_receive()) return;
  auto spec = a_receive();
  for (std::uint32_t t = 0; t < s_.tables(); ++t) {
    const auto first = its_.pools[t];
    if (first == t) continue;
    spec.groups[t].blocks = spec.groups[first].blocks;
    expect_refused("a receive into a block of another group", engine_.receive(spec),
                   errc::invalid_config);
    return;
  }
}

void wrong_calls::expect_no_receive_that_a_group_is_short_of() {
  if (!may_receive()) return;
  auto spec = a_receive();
  some_blocks(spec).clear();
  expect_refused("a receive that one group has no blocks for", engine_.receive(spec),
                 errc::out_of_range);
}

}  // namespace troupe::engine_fuzz
