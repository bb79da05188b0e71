#include "node.hpp"

#include <chrono>

#include "values.hpp"
#include "waiting.hpp"
#include "wrong_calls.hpp"

namespace troupe::engine_fuzz {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

struct transfer {
  part what{part::send};
  std::uint32_t request{0};
  std::vector<block_id> blocks;  ///< none yet where the pool chooses them
  std::optional<kvcache::block_owner> owner;
  std::uint32_t slot{0};
  token_span tokens;
  std::size_t freed{0};             ///< so many of the first blocks were given back before
  std::vector<std::uint32_t> told;  ///< receive: per layer, up to which token
  int outcomes{0};
  bool failed{false};
  bool sealed{false};
};

class local_node final : public fuzz_node {
 public:
  local_node(const scenario& s, std::uint32_t node)
      : s_{s}, node_{node}, its_{s.side_of(node)}, dice_{s.seed * 1000 + node} {}
  ~local_node() override { stop(); }

  bool start(int supervisor_port) override {
    const auto deployment = deployment_of(s_, supervisor_port);
    if (!deployment) return found(to_string(deployment.error()));
    engine_options options;
    options.polling = its_.polling;
    if (!its_.pooled) {
      options.layout = s_.layout_of(node_);
      for (const auto bytes : kvcache::region_sizes(*options.layout)) memory_.emplace_back(bytes);
      for (auto& one : memory_) options.regions.emplace_back(one);
    }
    auto started = engine::start(*deployment, s_.name_of(node_), std::move(options));
    if (!started) return found("does not start: " + to_string(started.error()));
    engine_ = std::move(*started);
    if (auto in = engine_->wait_registered(testing::wait_limit); !in)
      return found("is not taken in: " + to_string(in.error()));
    std::vector<std::span<std::byte>> regions;
    for (std::size_t i = 0;; ++i) {
      auto region = engine_->region(i);
      if (!region) break;
      regions.push_back(*region);
    }
    model_ = std::make_unique<cache_model>(engine_->layout(), regions, s_.seed * 77 + node_);
    const finder finds = [this](const std::string& what) { found(what); };
    values_ = std::make_unique<value_stories>(*engine_, finds, counts_, dice_);
    wrong_calls_ = std::make_unique<wrong_calls>(s_, node_, *engine_, finds, counts_, dice_);
    if (!its_.pooled) {
      for (std::uint32_t i = 0; i < its_.blocks; ++i) free_.push_back(block_id{i});
    } else if (engine_->layout().blocks != its_.blocks) {
      return found("has " + std::to_string(engine_->layout().blocks) + " blocks, not " +
                   std::to_string(its_.blocks));
    }
    return true;
  }

  void begin_round(std::uint32_t index) override {
    round_index_ = index;
    round_ = &s_.rounds[index];
    ended_.clear();
  }

  void carry_out(std::uint32_t act_index) override {
    const auto& one = round_->acts[act_index];
    switch (one.what) {
      case act_kind::send: send(one.request); break;
      case act_kind::compute: compute(one); break;
      case act_kind::seal: seal(one.request); break;
      case act_kind::receive: receive(one.request, part::receive); break;
      case act_kind::receive_again: receive_again(one.request); break;
      case act_kind::receive_late: receive(one.request, part::receive_late); break;
      case act_kind::abort_send: abort(one.request, part::send); break;
      case act_kind::abort_receive: abort(one.request, part::receive); break;
      case act_kind::call_wrongly: wrong_calls_->make(one.a, some_live_send()); break;
      case act_kind::put:
        values_->put(s_.name_of(one.a),
                     "v" + std::to_string(round_index_) + "-" + std::to_string(act_index) + "-" +
                         std::to_string(node_),
                     s_.seed * 31 + act_index, one.b, one.c);
        break;
      case act_kind::wait_for_outcome:
      case act_kind::wait_for_sends:
      case act_kind::break_links:
      case act_kind::pause:
      case act_kind::die:
      case act_kind::stand:
      case act_kind::wake: break;
    }
  }

  void give_up(std::uint32_t request) override {
    if (!ended_.contains({request, part::send})) abort(request, part::send);
  }

  void pump() override {
    if (its_.polling) {
      for (int i = 0; i < 4; ++i) (void)engine_->poll();
    }
    for (auto& e : engine_->take()) {
      ++progress_;
      take(e);
    }
    values_->pump();
  }

  bool idle() override { return transfers_.empty() && values_->empty(); }
  bool settled() override {
    return values_->empty() &&
           std::ranges::all_of(transfers_, [](const auto& one) { return one.second.outcomes > 0; });
  }
  std::uint64_t progress() override { return progress_; }
  int port() override { return engine_->report().node.port; }

  void audit() override {
    if (auto wrong = model_->audit(); !wrong.empty()) found(wrong);
    counts_.bytes += model_->compared() - compared_before_;
    compared_before_ = model_->compared();
    actors::node_report report;
    const auto whole = [&] {
      if (its_.polling) (void)engine_->poll();
      report = engine_->report();
      return !its_.pooled || (report.pool.blocks_free == report.pool.blocks_total &&
                              report.pool.blocks_quarantined == 0);
    };
    if (!testing::comes_true(whole)) {
      found(std::to_string(report.pool.blocks_free) + " of " +
            std::to_string(report.pool.blocks_total) + " blocks are free, " +
            std::to_string(report.pool.blocks_quarantined) + " in quarantine");
    }
    if (s_.may_break || s_.may_freeze) return;
    for (const auto& link : report.links) {
      if (link.rebuilds > 0 || !link.last_break.empty())
        found("the link with " + link.peer + " broke: " + link.last_break);
    }
  }

  std::string open_operations() override {
    std::string all;
    for (const auto& [id, t] : transfers_) {
      all += " " + std::string{to_string(t.what)} + " of request " + std::to_string(t.request) +
             (t.outcomes > 0 ? " (not unpinned)" : "");
    }
    all += values_->open();
    const auto report = engine_->report();
    for (const auto& t : report.transfers)
      all += "; " + t.side + " of " + t.request + " with " + t.peer + " " + t.state;
    for (const auto& link : report.links)
      all += "; link with " + link.peer + " " + link.state + " " + link.last_break;
    return all;
  }

  void stop() override {
    if (engine_) engine_->stop();
    engine_.reset();
  }

 private:
  // -- what is wrong

  bool found(const std::string& what) {
    findings_.push_back(s_.name_of(node_) + ": " + what);
    return false;
  }
  bool found(const transfer& t, const std::string& what) {
    return found(std::string{to_string(t.what)} + " of request " + std::to_string(t.request) +
                 " in round " + std::to_string(round_index_) + ": " + what);
  }
  void check(const transfer& t, const std::string& wrong) {
    if (!wrong.empty()) found(t, wrong);
  }

  // -- blocks

  [[nodiscard]] std::uint32_t needed(std::uint32_t tokens) const {
    return (tokens + s_.model.block_tokens - 1) / s_.model.block_tokens;
  }
  void shuffle(std::vector<block_id>& blocks) {
    for (std::size_t i = blocks.size(); i > 1; --i)
      std::swap(blocks[i - 1], blocks[dice_.roll(0, static_cast<std::uint32_t>(i) - 1)]);
  }
  void take_blocks(transfer& t, std::uint32_t count) {
    if (its_.pooled) {
      auto got = engine_->allocate_blocks(count);
      if (!got) {
        found(t, "no blocks: " + to_string(got.error()));
        return;
      }
      t.owner = got->owner;
      t.blocks = std::move(got->blocks);
      shuffle(t.blocks);
      return;
    }
    if (count > free_.size()) {
      found(t, "the scenario has too few blocks");
      return;
    }
    shuffle(free_);
    t.blocks.assign(free_.end() - count, free_.end());
    free_.resize(free_.size() - count);
  }
  [[nodiscard]] static std::vector<block_id> held(const transfer& t) {
    return {t.blocks.begin() + static_cast<std::ptrdiff_t>(t.freed), t.blocks.end()};
  }
  void give_back(transfer& t) {
    const auto those = held(t);
    if (!its_.pooled) {
      free_.insert(free_.end(), those.begin(), those.end());
    } else if (t.owner && !those.empty()) {
      if (auto freed = engine_->free_blocks(*t.owner, those); !freed)
        found(t, "its blocks are not taken back: " + to_string(freed.error()));
    }
    t.freed = t.blocks.size();
  }

  // -- sends

  [[nodiscard]] const request_plan& plan(std::uint32_t request) const {
    return round_->requests[request];
  }
  [[nodiscard]] std::string name(std::uint32_t request) const {
    return plan(request).name(s_.seed, round_index_ * 100 + request);
  }
  [[nodiscard]] std::pair<const std::uint64_t, transfer>* find(std::uint32_t request, part what) {
    for (auto& one : transfers_)
      if (one.second.request == request && one.second.what == what) return &one;
    return nullptr;
  }
  [[nodiscard]] verdict verdict_of(const transfer& t) const {
    return verdict_on(s_, *round_, t.request, node_, t.what);
  }

  void send(std::uint32_t request) {
    const auto& r = plan(request);
    transfer t;
    t.request = request;
    // Room for what the decode ranks want, or only for what there is.
    take_blocks(t, needed(r.seed % 2 == 0 ? std::max(r.tokens, r.source_tokens) : r.source_tokens));
    t.slot = 7 - r.slot;
    t.tokens = {0, r.source_tokens};
    send_spec spec;
    spec.request = name(request);
    spec.blocks = t.blocks;
    spec.state_slot = t.slot;
    spec.consumers = r.two_replicas ? 2 * s_.decode.ranks : 0;
    auto sent = engine_->send(std::move(spec));
    if (!sent) {
      found(t, "is refused: " + to_string(sent.error()));
      give_back(t);
      return;
    }
    transfers_.emplace(sent->value, std::move(t));
  }

  /// What the engine is told of a live operation, which may have ended where it may fail.
  void expect_taken(const transfer& t, const result<void>& said) {
    if (said) return;
    if (said.error().code == errc::not_found && !verdict_of(t).is_certain()) return;
    found(t, to_string(said.error()));
  }

  void compute(const act& one) {
    auto* entry = find(one.request, part::send);
    if (entry == nullptr) return;
    auto& t = entry->second;
    const auto& r = plan(one.request);
    const auto begin = one.c == 0 ? 0 : r.chunks[one.c - 1];
    const auto end = r.chunks[one.c];
    model_->compute(t.blocks, {one.a, one.b}, {begin, end}, r.seed);
    expect_taken(t, engine_->layers_ready(operation_id{entry->first}, one.a, one.b, end));
  }

  void seal(std::uint32_t request) {
    auto* entry = find(request, part::send);
    if (entry == nullptr) return;
    auto& t = entry->second;
    const auto& r = plan(request);
    if (r.chunks.empty())
      model_->compute(t.blocks, model_->all_layers(), {0, r.source_tokens}, r.seed);
    model_->compute_state(t.slot, r.seed);
    std::vector<std::byte> aux(r.aux_bytes);
    pattern(r.seed + 5, aux);
    expect_taken(t, engine_->seal(operation_id{entry->first}, r.source_tokens, std::move(aux)));
    t.sealed = true;
    if (r.frees_early && its_.pooled) give_back(t);
  }

  [[nodiscard]] std::optional<live_send> some_live_send() const {
    for (const auto& [id, t] : transfers_) {
      if (t.what == part::send && !t.sealed && verdict_of(t).is_certain())
        return live_send{operation_id{id}, name(t.request),
                         static_cast<std::uint32_t>(t.blocks.size())};
    }
    return std::nullopt;
  }

  // -- receives

  void receive_again(std::uint32_t request) {
    const auto first = ended_.find({request, part::receive});
    if (first != ended_.end() && first->second != "done") receive(request, part::receive_again);
  }

  void receive(std::uint32_t request, part what) {
    const auto& r = plan(request);
    transfer t;
    t.what = what;
    t.request = request;
    const auto wanted = what == part::receive_again ? r.source_tokens : r.tokens;
    t.slot = r.slot + (what == part::receive ? 0 : 4);
    if (!s_.model.states.empty()) t.slot %= s_.model.state_slots;
    t.tokens = {r.prefix, wanted};
    t.told.assign(s_.model.layers.size(), r.prefix);
    if (r.names_blocks) take_blocks(t, needed(wanted));
    receive_spec spec;
    spec.request = name(request);
    for (std::uint32_t p = 0; p < s_.prefill.ranks; ++p) spec.sources.push_back(s_.name_of(p));
    if (r.seed % 3 == 0) std::ranges::reverse(spec.sources);
    spec.mode = s_.reads ? actors::transfer_mode::read : actors::transfer_mode::write;
    spec.tokens = wanted;
    spec.prefix_tokens = r.prefix;
    spec.blocks = t.blocks;
    spec.state_slot = t.slot;
    if (what == part::receive && r.what == mishap::decode_deadline && r.rank == s_.rank_of(node_))
      spec.deadline = milliseconds{1 + r.seed % 60};
    auto asked = engine_->receive(std::move(spec));
    if (!asked) {
      found(t, "is refused: " + to_string(asked.error()));
      give_back(t);
      return;
    }
    const auto in_prefix = r.prefix / s_.model.block_tokens;
    if (its_.pooled && r.frees_early && in_prefix > 0) free_prefix(t, in_prefix);
    transfers_.emplace(asked->value, std::move(t));
  }

  /// Blocks that hold the prefix only are nobody's but the engine's: free at once.
  void free_prefix(transfer& t, std::uint32_t blocks) {
    const auto before = engine_->report().pool;
    const std::vector<block_id> those{t.blocks.begin(), t.blocks.begin() + blocks};
    if (auto freed = engine_->free_blocks(*t.owner, those); !freed)
      found(t, "the blocks of its prefix are not taken back: " + to_string(freed.error()));
    if (engine_->report().pool.blocks_quarantined > before.blocks_quarantined)
      found(t, "the blocks of its prefix are pinned");
    t.freed = blocks;
  }

  void abort(std::uint32_t request, part what) {
    auto* entry = find(request, what);
    if (entry == nullptr || entry->second.outcomes > 0) return;
    // The outcome may wait in the queue.
    (void)engine_->abort(operation_id{entry->first}, "fuzz");
  }

  // -- events

  void take(event& e) {
    if (values_->take(e)) return;
    const auto entry = transfers_.find(e.operation.value);
    if (entry == transfers_.end()) {
      found("an event of an operation that is over");
      return;
    }
    auto& t = entry->second;
    if (auto* a = std::get_if<event_allocated>(&e.what)) {
      t.owner = a->blocks.owner;
      t.blocks = std::move(a->blocks.blocks);
    } else if (const auto* l = std::get_if<event_layers>(&e.what)) {
      take_layers(t, l->slice);
    } else if (auto* d = std::get_if<event_done>(&e.what)) {
      take_done(t, *d);
    } else if (const auto* f = std::get_if<event_failed>(&e.what)) {
      take_failed(t, f->why);
    } else if (std::get_if<event_unpinned>(&e.what) != nullptr) {
      take_unpinned(t);
      transfers_.erase(entry);
    } else {
      found(t, "an event of another kind of operation");
    }
  }

  void take_layers(transfer& t, const actors::cache_slice& slice) {
    if (t.outcomes > 0) found(t, "layers after the outcome");
    for (auto l = slice.layer_begin; l < slice.layer_end; ++l) {
      if (t.told[l] != slice.token_begin) {
        found(t, "layer " + std::to_string(l) + " is told from token " +
                     std::to_string(slice.token_begin) + ", it was up to " +
                     std::to_string(t.told[l]));
      }
      t.told[l] = slice.token_end;
    }
    check(t, model_->is_there(t.blocks, {slice.layer_begin, slice.layer_end},
                              {slice.token_begin, slice.token_end}, plan(t.request).seed));
  }

  void count(transfer& t, const std::string& how) {
    if (++t.outcomes > 1) found(t, "another outcome: " + how);
    ended_[{t.request, t.what}] = how;
    ++counts_.transfers;
  }

  void take_done(transfer& t, const event_done& d) {
    count(t, "done");
    const auto& r = plan(t.request);
    if (!verdict_of(t).may_succeed) found(t, "is done, and must fail");
    if (t.what == part::send) return;
    ++counts_.arrived;
    for (std::size_t l = 0; l < t.told.size(); ++l) {
      if (t.told[l] != t.tokens.end && t.tokens.begin < t.tokens.end)
        found(t, "is done, and layer " + std::to_string(l) + " was told up to token " +
                     std::to_string(t.told[l]));
    }
    std::vector<std::byte> aux(r.aux_bytes);
    pattern(r.seed + 5, aux);
    if (d.aux != aux) found(t, "the engine's own data is not the prefill's");
    const bool moves_state = model_->has_states() && t.tokens.begin < t.tokens.end;
    check(t, model_->is_there(t.blocks, model_->all_layers(), t.tokens, r.seed));
    if (moves_state) check(t, model_->state_is_there(t.slot, r.seed));
    model_->arrived(t.blocks, t.tokens, slot_of(t), r.seed);
    // What is done is read and given back; the fence may still be out.
    if (its_.pooled && r.frees_early) give_back(t);
  }

  [[nodiscard]] std::optional<std::uint32_t> slot_of(const transfer& t) const {
    if (!model_->has_states() || t.tokens.begin >= t.tokens.end) return std::nullopt;
    return t.slot;
  }

  void take_failed(transfer& t, const troupe::error& why) {
    count(t, std::string{to_string(why.code)});
    ++counts_.failed;
    if (why.message.empty()) found(t, "failed without a sentence");
    if (!verdict_of(t).admits(why.code)) found(t, "failed: " + to_string(why));
  }

  void take_unpinned(transfer& t) {
    if (t.outcomes == 0) found(t, "is unpinned without an outcome");
    const auto how = ended_.find({t.request, t.what});
    const bool failed = how != ended_.end() && how->second != "done";
    if (t.what != part::send && failed && !t.blocks.empty())
      check(t, model_->torn(t.blocks, t.tokens, slot_of(t), plan(t.request).seed));
    // From here on nobody touches them: what comes late is found by the audit. Blocks that were given back
    // already may be another's.
    if (const auto mine = held(t); !mine.empty()) model_->reuse(mine, slot_of(t));
    give_back(t);
  }

  const scenario& s_;
  std::uint32_t node_;
  const side& its_;
  dice dice_;
  std::vector<std::vector<std::byte>> memory_;
  std::unique_ptr<engine> engine_;
  std::unique_ptr<value_stories> values_;
  std::unique_ptr<wrong_calls> wrong_calls_;
  std::unique_ptr<cache_model> model_;
  std::vector<block_id> free_;  ///< own memory
  std::map<std::uint64_t, transfer> transfers_;
  const round* round_{nullptr};
  std::uint32_t round_index_{0};
  std::uint64_t progress_{0};
  std::uint64_t compared_before_{0};
};

}  // namespace

std::unique_ptr<fuzz_node> make_local_node(const scenario& s, std::uint32_t node) {
  return std::make_unique<local_node>(s, node);
}

}  // namespace troupe::engine_fuzz
