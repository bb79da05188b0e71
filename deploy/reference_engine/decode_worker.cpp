#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <utility>

#include "troupe/deploy/reference_engine/decode_request.hpp"
#include "troupe/deploy/reference_engine/kept_prefixes.hpp"
#include "troupe/deploy/reference_engine/worker.hpp"

namespace troupe::reference {

namespace {

using request_state = decode_request::state;

constexpr std::size_t max_kept_prefixes = 16;
constexpr std::chrono::milliseconds gather_retry{5};

class decode_worker final : public worker {
 public:
  explicit decode_worker(worker_context& context) : context_{context} {}

  void on_call(call what) override {
    auto parsed = decode_call_from(what.payload);
    if (!parsed) return what.reply(fail(parsed.error()));
    auto request = std::make_unique<decode_request>();
    request->what = std::move(*parsed);
    if (auto ok = check_call(*request); !ok) return what.reply(fail(ok.error()));
    request->reply = std::move(what.reply);
    request->deadline = clock::now() + (request->what.deadline_ms == 0
                                            ? context_.default_deadline
                                            : std::chrono::milliseconds{request->what.deadline_ms});
    request->times.started_ns = clock_ns();
    waiting_.push_back(std::move(request));
    admit();
  }

  void on_event(event what) override {
    const auto found = operations_.find(what.operation);
    if (found == operations_.end()) return;
    auto& request = *found->second;
    const bool of_receive = what.operation == request.operation;
    std::visit([&](auto& happened) { handle(request, what.operation, happened); }, what.what);
    // A receive has events until `unpinned`; other operations have one event, their outcome.
    if (!of_receive || std::holds_alternative<event_unpinned>(what.what))
      operations_.erase(what.operation);
    bury();
    admit();
  }

  bool step() override {
    end_overdue();
    admit();
    bool worked = false;
    const auto now = clock::now();
    for (auto& request : live_) {
      if (request->now == request_state::gathering && now >= request->retry)
        look_for_part(*request);
      if (request->now == request_state::decoding) {
        decode_one(*request);
        worked = true;
      }
    }
    bury();
    return worked;
  }

  result<void> abort(const std::string& request) override {
    const error why{errc::aborted, "the frontend gave the request up"};
    const auto same = [&](const auto& r) { return r->what.request == request; };
    if (const auto found = std::find_if(waiting_.begin(), waiting_.end(), same);
        found != waiting_.end()) {
      (*found)->reply(fail(why));
      waiting_.erase(found);
      return {};
    }
    for (auto& live : live_)
      if (same(live) && live->now != request_state::ended) {
        give_up(*live, why);
        bury();
        return {};
      }
    return fail(errc::not_found, "no request " + request + " lives in " + context_.name);
  }

  result<text_reply> text(const std::string& request) const override {
    const auto same = [&](const auto& r) {
      return r->what.request == request && r->now != request_state::ended;
    };
    if (const auto found = std::ranges::find_if(live_, same); found != live_.end()) {
      return text_reply{(*found)->text.tokens};
    }
    if (std::ranges::any_of(waiting_, same)) return text_reply{};
    return fail(errc::not_found, "no request " + request + " lives in " + context_.name);
  }

  std::optional<clock::time_point> next_wakeup() const override {
    std::optional<clock::time_point> next;
    const auto at = [&](clock::time_point when) {
      if (!next || when < *next) next = when;
    };
    for (const auto& request : waiting_) at(request->deadline);
    for (const auto& request : live_) {
      if (request->now == request_state::ended) continue;
      at(request->deadline);
      if (request->now == request_state::gathering) at(request->retry);
    }
    return next;
  }

  std::uint32_t requests() const override {
    const auto running = std::count_if(live_.begin(), live_.end(), [](const auto& request) {
      return request->now != request_state::ended;
    });
    return static_cast<std::uint32_t>(waiting_.size()) + static_cast<std::uint32_t>(running);
  }

  void stop() override {
    const error why{errc::aborted, context_.name + " stops"};
    for (auto& request : waiting_) request->reply(fail(why));
    waiting_.clear();
    for (auto& request : live_) give_up(*request, why);
    release(kept_.clear());
  }

 private:
  // -- admission

  result<void> check_call(const decode_request& request) const {
    const auto& layout = context_.layout();
    if (layout.tp_size > 1 && request.what.replica.size() != layout.tp_size)
      return fail(errc::invalid_config, "decode: `replica` must name the " +
                                            std::to_string(layout.tp_size) + " nodes of " +
                                            context_.name + "'s replica in rank order, found " +
                                            std::to_string(request.what.replica.size()));
    return context_.check_fits(request.final_tokens());
  }

  void admit() {
    while (!waiting_.empty() && context_.slots.available()) {
      auto request = std::move(waiting_.front());
      waiting_.pop_front();
      take_prefix(*request);
      if (!take_blocks(*request)) {
        waiting_.push_front(std::move(request));
        return;
      }
      request->slot = context_.slots.take();
      if (auto ok = receive(*request); !ok) {
        release(std::exchange(request->blocks, {}));
        context_.slots.give_back(request->slot);
        request->reply(fail(ok.error()));
        continue;
      }
      operations_.emplace(request->operation, request.get());
      live_.push_back(std::move(request));
    }
  }

  result<void> receive(decode_request& request) {
    receive_spec spec;
    spec.request = request.what.request;
    spec.sources = request.what.sources;
    spec.mode = request.what.mode;
    spec.tokens = request.prompt_tokens();
    spec.prefix_tokens = request.times.prefix_tokens;
    spec.blocks = request.blocks.ids();  // none: the pool allocates when our turn comes
    spec.state_slot = request.slot.value_or(0);
    spec.placed_by = request.what.placed_by;
    spec.placed_at = request.what.placed_at;
    spec.deadline = std::max(
        std::chrono::milliseconds{1},
        std::chrono::duration_cast<std::chrono::milliseconds>(request.deadline - clock::now()));
    auto operation = context_.node->receive(std::move(spec));
    if (!operation) return fail(operation.error());
    request.operation = *operation;
    pin(request);
    request.now = request_state::receiving;
    return {};
  }

  /// Reuses the cache of a finished request, if it is known, and takes the remaining blocks beside
  /// it.
  void take_prefix(decode_request& request) {
    if (!request.what.reuse_prefix || context_.slots.in_use()) return;
    auto match = kept_.take(request.what.prompt, context_.layout().block_tokens);
    release(match.surplus);
    if (match.blocks.empty()) return;
    const auto missing = context_.blocks_for(request.final_tokens()) - match.blocks.size();
    make_room(missing);
    auto more = context_.blocks->allocate(missing);
    if (!more) return release(match.blocks);
    request.blocks = std::move(match.blocks);
    request.blocks.append(std::move(*more));
    request.times.prefix_tokens = match.tokens;
  }

  /// Takes the blocks of the whole text before anything moves: otherwise requests that each hold a
  /// part would wait for each other. If the text fits the blocks of its prompt, this may be left to
  /// the `receive`, which waits in the pool's own queue. Returns false if the pool is full: the
  /// request then waits in our queue.
  bool take_blocks(decode_request& request) {
    if (!request.blocks.empty()) return true;
    const auto wanted = context_.blocks_for(request.final_tokens());
    make_room(wanted);
    if (context_.blocks->serves_receives() &&
        wanted == context_.blocks_for(request.what.prompt.size()))
      return true;
    auto blocks = context_.blocks->allocate(wanted);
    if (blocks) request.blocks = std::move(*blocks);
    return blocks.has_value();
  }

  /// Evicts kept prefixes before any request waits for blocks.
  void make_room(std::size_t blocks) {
    if (kept_.empty()) return;
    if (context_.blocks->free_blocks() < blocks) release(kept_.clear());
  }

  // -- events

  void handle(decode_request& request, operation_id, event_allocated& happened) {
    request.blocks = held_blocks{std::move(happened.blocks)};
    pin(request);
    if (request.now == request_state::ended) release(std::exchange(request.blocks, {}));
  }
  void handle(decode_request& request, operation_id, event_layers& happened) {
    request.note_landed(happened.slice);
  }
  void handle(decode_request& request, operation_id operation, event_done& happened) {
    if (request.now == request_state::ended) return;
    if (operation == request.operation) return received(request, happened);
    if (request.now == request_state::handing) finish(request);
  }
  void handle(decode_request& request, operation_id operation, event_failed& happened) {
    if (request.now == request_state::ended) return;
    const bool not_there_yet = request.now == request_state::gathering &&
                               operation != request.operation &&
                               happened.why.code == errc::not_found;
    if (not_there_yet) {
      request.retry = clock::now() + gather_retry;
      return;
    }
    conclude(request, fail(happened.why));
  }
  void handle(decode_request& request, operation_id, event_unpinned&) {
    request.unpinned = true;
    context_.blocks->unpin(request.pinned);
  }
  void handle(decode_request& request, operation_id, event_value& happened) {
    if (request.now == request_state::gathering) take_part(request, happened.value.bytes);
  }
  void handle(decode_request&, operation_id, event_info&) {}
  void handle(decode_request&, operation_id, event_placed&) {}
  void handle(decode_request&, operation_id, event_wanted&) {}
  void handle(decode_request&, operation_id, event_member&) {}

  void received(decode_request& request, const event_done& happened) {
    request.times.received_ns = clock_ns();
    request.times.bytes = happened.bytes;
    if (context_.layout().tp_rank > 0) return hand_over(request);
    // If nothing had to move, there may be no handoff: then the first token is computed here.
    if (!happened.aux.empty() || context_.slots.in_use()) {
      auto what = handoff_from(happened.aux);
      if (!what) return conclude(request, fail(what.error()));
      request.judge_overlap(what->computed_ns);
      request.text = what->text;
    }
    gather(request);
  }

  // -- several ranks: rank 0 decodes with the heads of all ranks

  [[nodiscard]] static std::string part_key(const decode_request& request, std::uint32_t rank) {
    return "reference.part/" + std::to_string(rank) + "/" + request.what.request;
  }

  void hand_over(decode_request& request) {
    auto own = paged_cache::create(context_.memory, request.blocks.ids(), request.slot);
    if (!own) return conclude(request, fail(own.error()));
    request.handed = own->export_tokens(request.prompt_tokens());
    auto operation = context_.node->put(
        request.what.replica.front(), part_key(request, context_.layout().tp_rank), request.handed,
        std::chrono::duration_cast<std::chrono::milliseconds>(request.deadline - clock::now()));
    if (!operation) return conclude(request, fail(operation.error()));
    operations_.emplace(*operation, &request);
    request.now = request_state::handing;
  }

  void look_for_part(decode_request& request) {
    const auto rank = static_cast<std::uint32_t>(request.gathered) + 1;
    auto operation = context_.node->get(context_.name, part_key(request, rank));
    if (!operation) return conclude(request, fail(operation.error()));
    operations_.emplace(*operation, &request);
    request.retry = request.deadline;  // until the answer arrives
  }

  void take_part(decode_request& request, std::span<const std::byte> bytes) {
    auto& part = request.others[request.gathered];
    if (auto ok = part.import_tokens(request.prompt_tokens(), bytes); !ok)
      return conclude(request, fail(ok.error()));
    ++request.gathered;
    // The outcome is ignored; the key expires with the request's deadline anyway.
    (void)context_.node->remove(context_.name,
                                part_key(request, static_cast<std::uint32_t>(request.gathered)));
    request.retry = clock::now();
    if (request.gathered == request.others.size()) start_decoding(request);
  }

  // -- the text

  void gather(decode_request& request) {
    const auto& layout = context_.layout();
    for (std::uint32_t rank = 1; rank < layout.tp_size; ++rank) {
      auto part = context_.private_part(request.final_tokens(), rank, layout.tp_size);
      if (!part) return conclude(request, fail(part.error()));
      request.others.push_back(std::move(*part));
    }
    request.now = request_state::gathering;
    request.retry = clock::now();
    if (request.others.empty()) start_decoding(request);
  }

  void start_decoding(decode_request& request) {
    auto own = paged_cache::create(context_.memory, request.blocks.ids(), request.slot);
    if (!own) return conclude(request, fail(own.error()));
    std::vector<paged_cache> parts{std::move(*own)};
    std::move(request.others.begin(), request.others.end(), std::back_inserter(parts));
    auto cache = model_cache::create(std::move(parts));
    if (!cache) return conclude(request, fail(cache.error()));
    request.cache = std::move(*cache);
    if (request.text.tokens.empty()) {
      auto text =
          first_of_cached(*context_.model, request.what.prompt, request.what.how, *request.cache);
      if (!text) return conclude(request, fail(text.error()));
      request.text = std::move(*text);
    }
    request.now = request_state::decoding;
    if (is_complete(request.text, request.what.max_tokens)) finish(request);
  }

  void decode_one(decode_request& request) {
    auto ok = decode_step(*context_.model, request.prompt_tokens(), request.text, request.what.how,
                          *request.cache);
    if (!ok) return conclude(request, fail(ok.error()));
    if (is_complete(request.text, request.what.max_tokens)) finish(request);
  }

  // -- the end

  void finish(decode_request& request) {
    request.times.done_ns = clock_ns();
    if (context_.layout().tp_rank == 0) request.times.text = request.text;
    if (request.what.reuse_prefix && !context_.slots.in_use() && !anybody_waits())
      release(kept_.keep({request.what.prompt, std::exchange(request.blocks, {})}));
    conclude(request, to_json(request.times));
  }

  /// Whether a request waits for blocks, which then must not be kept.
  [[nodiscard]] bool anybody_waits() const {
    return !waiting_.empty() || std::any_of(live_.begin(), live_.end(), [](const auto& request) {
      return request->now == request_state::receiving && request->blocks.empty();
    });
  }

  void give_up(decode_request& request, const error& why) {
    if (request.now == request_state::ended) return;
    if (request.now == request_state::receiving)
      (void)context_.node->abort(request.operation, why.message);
    conclude(request, fail(why));
  }

  void conclude(decode_request& request, result<payload> answer) {
    request.now = request_state::ended;
    request.cache.reset();
    request.others.clear();
    release(std::exchange(request.blocks, {}));
    request.reply(std::move(answer));
  }

  void release(const held_blocks& blocks) { context_.blocks->free(blocks); }

  void pin(decode_request& request) {
    request.pinned = request.blocks;
    context_.blocks->pin(request.pinned);
  }

  /// Forgets requests that are over and whose memory the network can no longer touch.
  void bury() {
    std::erase_if(live_, [&](const auto& request) {
      if (request->now != request_state::ended || !request->unpinned || is_pending(*request))
        return false;
      context_.slots.give_back(request->slot);
      return true;
    });
  }
  [[nodiscard]] bool is_pending(const decode_request& request) const {
    return std::any_of(operations_.begin(), operations_.end(),
                       [&](const auto& entry) { return entry.second == &request; });
  }

  void end_overdue() {
    const auto now = clock::now();
    const error why{errc::deadline, "the request's deadline passed in " + context_.name};
    std::erase_if(waiting_, [&](const auto& request) {
      if (request->deadline > now) return false;
      request->reply(fail(why));
      return true;
    });
    for (auto& request : live_)
      if (request->now != request_state::ended && request->deadline <= now) give_up(*request, why);
  }

  worker_context& context_;
  kept_prefixes kept_{max_kept_prefixes};
  std::deque<std::unique_ptr<decode_request>> waiting_;
  std::list<std::unique_ptr<decode_request>> live_;
  std::map<operation_id, decode_request*> operations_;
};

}  // namespace

std::unique_ptr<worker> make_decode_worker(worker_context& context) {
  return std::make_unique<decode_worker>(context);
}

}  // namespace troupe::reference
