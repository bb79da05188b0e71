#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "troupe/deploy/reference_engine/worker.hpp"

namespace troupe::reference {

namespace {

/// One prompt.
///
///   state      event                      next       what is done
///   ---------  -------------------------  ---------  --------------------------------------
///   waiting    slot and blocks are free   computing  `send`
///   waiting    deadline, abort            (gone)     answer with the error
///   computing  step                       computing  a chunk, `layers_ready` after each layer
///   computing  the last chunk             draining   `seal` with the first token
///   computing  the engine fails           draining   `abort`
///   computing  done, failed               ending     answer, free the blocks
///   draining   done, failed               ending     answer, free the blocks
///   ending     unpinned                   (gone)     give the slot back
struct prefill_request {
  enum class state : std::uint8_t { waiting, computing, draining, ending };
  state now{state::waiting};
  prefill_call what;
  std::function<void(result<payload>)> reply;
  clock::time_point deadline;
  operation_id operation;
  held_blocks blocks;
  held_blocks pinned;  ///< until `unpinned`
  std::optional<std::uint32_t> slot;
  std::optional<model_cache> cache;
  std::optional<chunked_prefill> run;
  std::optional<error> own_failure;  ///< why the engine itself aborted, if it did
  prefill_reply times;
};

class prefill_worker final : public worker {
 public:
  explicit prefill_worker(worker_context& context) : context_{context} {}

  void on_call(call what) override {
    auto parsed = prefill_call_from(what.payload);
    if (!parsed) return what.reply(fail(parsed.error()));
    if (auto ok = context_.check_fits(parsed->prompt.size()); !ok)
      return what.reply(fail(ok.error()));
    auto request = std::make_unique<prefill_request>();
    request->what = std::move(*parsed);
    request->reply = std::move(what.reply);
    request->deadline = clock::now() + deadline_of(request->what);
    request->times.started_ns = clock_ns();
    waiting_.push_back(std::move(request));
    admit();
  }

  void on_event(event what) override {
    const auto found = live_.find(what.operation);
    if (found == live_.end()) return;
    auto& request = *found->second;
    if (const auto* done = std::get_if<event_done>(&what.what)) {
      request.times.bytes = done->bytes;
      conclude(request, {});
    } else if (const auto* failed = std::get_if<event_failed>(&what.what)) {
      conclude(request, failed->why);
    } else if (std::holds_alternative<event_unpinned>(what.what)) {
      context_.blocks->unpin(request.pinned);
      context_.slots.give_back(request.slot);
      live_.erase(found);
    }
    admit();
  }

  bool step() override {
    end_overdue();
    admit();
    bool worked = false;
    for (auto& [operation, request] : live_)
      if (request->now == prefill_request::state::computing) {
        compute(*request);
        worked = true;
      }
    return worked;
  }

  result<void> abort(const std::string& request) override {
    const auto same = [&](const auto& r) { return r->what.request == request; };
    if (const auto found = std::find_if(waiting_.begin(), waiting_.end(), same);
        found != waiting_.end()) {
      (*found)->reply(fail(errc::aborted, "the frontend gave the request up"));
      waiting_.erase(found);
      return {};
    }
    for (const auto& [operation, live] : live_)
      if (live->what.request == request && live->now != prefill_request::state::ending)
        return context_.node->abort(operation, "the frontend gave the request up");
    return fail(errc::not_found, "no request " + request + " lives in " + context_.name);
  }

  result<text_reply> text(const std::string& request) const override {
    return fail(errc::not_found,
                context_.name + " writes no text; ask the decode node of request " + request);
  }

  std::optional<clock::time_point> next_wakeup() const override {
    std::optional<clock::time_point> next;
    for (const auto& request : waiting_)
      if (!next || request->deadline < *next) next = request->deadline;
    return next;
  }

  std::uint32_t requests() const override {
    const auto running = std::count_if(live_.begin(), live_.end(), [](const auto& entry) {
      return entry.second->now != prefill_request::state::ending;
    });
    return static_cast<std::uint32_t>(waiting_.size()) + static_cast<std::uint32_t>(running);
  }

  void stop() override {
    const error why{errc::aborted, context_.name + " stops"};
    for (auto& request : waiting_) request->reply(fail(why));
    waiting_.clear();
    for (auto& [operation, request] : live_)
      if (request->now != prefill_request::state::ending) conclude(*request, why);
  }

 private:
  [[nodiscard]] std::chrono::milliseconds deadline_of(const prefill_call& what) const {
    return what.deadline_ms == 0 ? context_.default_deadline
                                 : std::chrono::milliseconds{what.deadline_ms};
  }

  /// First come, first served: the first request without room makes the others wait.
  void admit() {
    while (!waiting_.empty() && context_.slots.available()) {
      auto& request = *waiting_.front();
      auto blocks = context_.blocks->allocate(context_.blocks_for(request.what.prompt.size()));
      if (!blocks && blocks.error().code == errc::pool_exhausted) return;
      auto started =
          blocks ? start(request, std::move(*blocks)) : result<void>{fail(blocks.error())};
      auto admitted = std::move(waiting_.front());
      waiting_.pop_front();
      if (started)
        live_.emplace(admitted->operation, std::move(admitted));
      else
        admitted->reply(fail(started.error()));
    }
  }

  result<void> start(prefill_request& request, held_blocks blocks) {
    request.blocks = std::move(blocks);
    request.slot = context_.slots.take();
    auto begun = begin(request);
    if (begun) return {};
    release_blocks(request);
    context_.slots.give_back(request.slot);
    return begun;
  }

  result<void> begin(prefill_request& request) {
    auto cache = cache_of(request);
    if (!cache) return fail(cache.error());
    auto run =
        chunked_prefill::create(request.what.prompt, 0, request.what.chunk, request.what.how);
    if (!run) return fail(run.error());
    send_spec spec;
    spec.request = request.what.request;
    spec.blocks = request.blocks.ids();
    spec.state_slot = request.slot.value_or(0);
    spec.consumers = request.what.consumers;
    spec.held_for = request.what.held_for;
    spec.deadline = std::max(
        std::chrono::milliseconds{1},
        std::chrono::duration_cast<std::chrono::milliseconds>(request.deadline - clock::now()));
    auto operation = context_.node->send(std::move(spec));
    if (!operation) return fail(operation.error());
    request.operation = *operation;
    request.pinned = request.blocks;
    context_.blocks->pin(request.pinned);
    request.cache = std::move(*cache);
    request.run = std::move(*run);
    request.now = prefill_request::state::computing;
    return {};
  }

  /// A rank of several computes the whole model in a cache of its own and leaves its heads in the
  /// pool: attention needs all heads, and this engine does not exchange partial results.
  result<model_cache> cache_of(const prefill_request& request) {
    auto own = paged_cache::create(context_.memory, request.blocks.ids(), request.slot);
    if (!own) return fail(own.error());
    std::vector<paged_cache> parts;
    if (context_.layout().tp_size > 1) {
      auto whole = context_.private_part(request.what.prompt.size(), 0, 1);
      if (!whole) return fail(whole.error());
      parts.push_back(std::move(*whole));
    }
    parts.push_back(std::move(*own));
    return model_cache::create(std::move(parts));
  }

  void compute(prefill_request& request) {
    const auto tell = [&](std::uint32_t layer, std::uint32_t token_end) {
      return context_.node->layers_ready(request.operation, layer, layer + 1, token_end);
    };
    auto ok = request.run->step(*context_.model, *request.cache, tell);
    if (ok && request.run->finished()) ok = seal(request);
    if (ok) return;
    // Either the transfer ended during the computation, and its outcome is among the events, or the
    // engine itself cannot go on, and the other side must be told.
    request.now = prefill_request::state::draining;
    if (ok.error().code == errc::not_found) return;
    request.own_failure = ok.error();
    (void)context_.node->abort(request.operation, ok.error().message);
  }

  result<void> seal(prefill_request& request) {
    request.now = prefill_request::state::draining;
    request.times.computed_ns = clock_ns();
    return context_.node->seal(request.operation,
                               static_cast<std::uint32_t>(request.what.prompt.size()),
                               to_aux({request.run->text(), request.times.computed_ns}));
  }

  void conclude(prefill_request& request, std::optional<error> failure) {
    if (request.now == prefill_request::state::ending) return;
    request.now = prefill_request::state::ending;
    if (failure) {
      request.reply(fail(request.own_failure.value_or(*failure)));
    } else {
      request.times.prompt_tokens = static_cast<std::uint32_t>(request.what.prompt.size());
      if (request.run->finished()) request.times.first_token = request.run->text().tokens.front();
      request.times.done_ns = clock_ns();
      request.reply(to_json(request.times));
    }
    request.cache.reset();
    release_blocks(request);
  }

  /// Frees the blocks; those that the network may still read wait in the pool's quarantine.
  void release_blocks(prefill_request& request) {
    context_.blocks->free(request.blocks);
    request.blocks = {};
  }

  void end_overdue() {
    const auto now = clock::now();
    std::erase_if(waiting_, [&](const auto& request) {
      if (request->deadline > now) return false;
      request->reply(fail(errc::deadline, "no blocks came free in " + context_.name +
                                              " before the request's deadline"));
      return true;
    });
  }

  worker_context& context_;
  std::deque<std::unique_ptr<prefill_request>> waiting_;
  std::map<operation_id, std::unique_ptr<prefill_request>> live_;
};

}  // namespace

std::unique_ptr<worker> make_prefill_worker(worker_context& context) {
  return std::make_unique<prefill_worker>(context);
}

}  // namespace troupe::reference
