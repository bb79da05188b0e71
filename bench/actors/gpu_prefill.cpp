#include "gpu_prefill.hpp"

#include <chrono>
#include <string>
#include <utility>
#include <variant>

#include "layer_kernels.hpp"

namespace troupe::bench {

using namespace std::chrono_literals;
using transport::xgmi::gpu_site;

namespace {

/// The letters of orders, and what follows each.
constexpr char fill_cache = 'F';    // seed; answered
constexpr char compute_only = 'C';  // seed, steps; answered with the times
constexpr char push_ready = 'P';    // name; answered; then any letter: go; answered with the times
constexpr char push_kernels = 'B';  // seed, steps, name; the same

void put_text(const control& to, const std::string& text) {
  const auto* at = reinterpret_cast<const std::byte*>(text.data());
  to.put_list({at, at + text.size()});
}

std::string get_text(const control& from) {
  const auto bytes = from.get_list();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

gpu_prefill::gpu_prefill(engine& node, bool polling, std::uint32_t gpu, request_shape request)
    : node_{node},
      polling_{polling},
      gpu_{gpu},
      request_{std::move(request)},
      cache_{node, gpu},
      site_{gpu_site::of_process()},
      stream_{gpu, make_compute_stream(gpu)},
      computed_{need(site_->runtime->make_event(gpu), "event")},
      first_{make_moment(gpu)},
      last_{make_moment(gpu)} {
  for (std::uint32_t layer = 0; layer < node.layout().layers.size(); ++layer) {
    const auto runs = cache_.runs(layer, request_.blocks);
    runs_ = static_cast<std::uint32_t>(runs.size());
    places_.push_back(on_gpu(gpu, runs.data(), runs.size()));
  }
}

void gpu_prefill::obey(char command, const control& parent) {
  switch (command) {
    case fill_cache: fill(parent); break;
    case compute_only: compute(parent); break;
    case push_ready: push(parent, false); break;
    case push_kernels: push(parent, true); break;
    default: die("an unknown command");
  }
}

void gpu_prefill::fill(const control& parent) {
  cache_.fill(parent.get<std::uint64_t>());
  parent.put('k');
}

void gpu_prefill::launch(std::optional<operation_id> send) {
  note_moment(gpu_, first_, stream_.handle);
  for (std::uint32_t layer = 0; layer < places_.size(); ++layer) {
    compute_layer(gpu_, stream_.handle,
                  {cache_.memory(), places_[layer], runs_, cache_.run_bytes(), seed_, steps_});
    if (layer + 1 == places_.size()) note_moment(gpu_, last_, stream_.handle);
    need(site_->runtime->record(computed_, stream_), "record");
    if (!send) continue;
    need(node_.layers_ready(*send, layer, layer + 1, request_.tokens, {computed_.handle, gpu_}),
         "layers_ready");
    if (polling_) (void)node_.poll();
  }
}

void gpu_prefill::compute(const control& parent) {
  seed_ = parent.get<std::uint64_t>();
  steps_ = parent.get<std::uint32_t>();
  prefill_times times{.began = clock_type::now()};
  launch(std::nullopt);
  times.enqueued = microseconds_since(times.began);
  while (!need(site_->runtime->happened(computed_), "computing")) {
  }
  times.host = microseconds_since(times.began);
  times.gpu = microseconds_between(gpu_, first_, last_);
  parent.put(times);
}

void gpu_prefill::push(const control& parent, bool behind_kernels) {
  if (behind_kernels) {
    seed_ = parent.get<std::uint64_t>();
    steps_ = parent.get<std::uint32_t>();
  }
  send_spec spec;
  spec.request = get_text(parent);
  spec.blocks = request_.blocks;
  const auto send = need(node_.send(std::move(spec)), "send");
  parent.put('k');
  while (!parent.readable()) progress();
  parent.get<char>();
  unpinned_ = false;
  prefill_times times{.began = clock_type::now()};
  if (behind_kernels) {
    launch(send);
  } else {
    const auto layers = static_cast<std::uint32_t>(places_.size());
    need(node_.layers_ready(send, 0, layers, request_.tokens), "layers_ready");
  }
  need(node_.seal(send, request_.tokens), "seal");
  times.enqueued = microseconds_since(times.began);
  while (!unpinned_) progress();
  if (behind_kernels) times.gpu = microseconds_between(gpu_, first_, last_);
  parent.put(times);
}

void gpu_prefill::progress() {
  for (const auto& e : node_.wait(1ms, 256)) {
    if (std::holds_alternative<event_unpinned>(e.what)) unpinned_ = true;
    if (const auto* failed = std::get_if<event_failed>(&e.what)) {
      die("a send failed: " + to_string(failed->why));
    }
  }
}

// -- orders

void gpu_prefill_orders::fill(std::uint64_t seed) {
  cluster_.peer().put(fill_cache);
  cluster_.peer().put(seed);
  cluster_.until_heard();
  cluster_.peer().get<char>();
}

prefill_times gpu_prefill_orders::compute(std::uint64_t seed, std::uint32_t steps) {
  cluster_.peer().put(compute_only);
  cluster_.peer().put(seed);
  cluster_.peer().put(steps);
  cluster_.until_heard();
  return cluster_.peer().get<prefill_times>();
}

gpu_prefill_orders::pushed gpu_prefill_orders::push(const std::string& name,
                                                    const receive_spec& into) {
  cluster_.peer().put(push_ready);
  return carry_out(name, into);
}

gpu_prefill_orders::pushed gpu_prefill_orders::push_behind(const std::string& name,
                                                           const receive_spec& into,
                                                           std::uint64_t seed,
                                                           std::uint32_t steps) {
  cluster_.peer().put(push_kernels);
  cluster_.peer().put(seed);
  cluster_.peer().put(steps);
  return carry_out(name, into);
}

gpu_prefill_orders::pushed gpu_prefill_orders::carry_out(const std::string& name,
                                                         const receive_spec& into) {
  put_text(cluster_.peer(), name);
  cluster_.until_heard();
  cluster_.peer().get<char>();
  auto spec = into;
  spec.request = name;
  const auto outcomes = cluster_.done + 1;
  const auto ended = cluster_.unpinned + 1;
  (void)need(cluster_.node().receive(std::move(spec)), "receive");
  cluster_.rest(10ms);  // until the request has reached the sender
  cluster_.peer().put('g');
  cluster_.until_done(outcomes);
  const auto arrived = clock_type::now();
  cluster_.until_unpinned(ended);
  cluster_.until_heard();
  pushed said{cluster_.peer().get<prefill_times>()};
  said.until_done = std::chrono::duration<double, std::micro>(arrived - said.prefill.began).count();
  return said;
}

}  // namespace troupe::bench
