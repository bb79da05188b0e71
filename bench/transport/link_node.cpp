#include "link_node.hpp"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::bench {

using namespace transport;

void node_sink::on_completion(completion done) {
  if (done.failure) die("a batch failed: " + to_string(*done.failure));
  if (when_completed) when_completed();
}

void node_sink::on_frame(std::span<const std::byte> frame) {
  ++frames;
  if (when_frame) when_frame(frame);
}

void node_sink::on_broken(troupe::error why) {
  if (is_child) std::_Exit(0);  // the measuring process has ended
  die("the link broke: " + to_string(why));
}

batch new_batch(batch_id id, direction dir) {
  batch work;
  work.id = id;
  work.transfer = transfer_id{1};
  work.dir = dir;
  return work;
}

link_node make_node(const control& peer, const node_plan& plan) {
  const bool dials = plan.role == link_role::initiator;
  const incarnation their_life{dials ? 2U : 1U};
  link_node n;
  n.self = incarnation{dials ? 1U : 2U};
  n.said->is_child = !dials;
  endpoint_options options;
  options.self = n.self;
  options.num_workers = plan.workers;
  options.rdma = plan.rdma;
  n.place = need(endpoint::create(std::move(options)), "endpoint");
  n.region = need(n.place->allocate(plan.memory, "bench"), "memory");
  n.memory = need(n.place->bytes(n.region), "memory");
  std::memset(n.memory.data(), dials ? 1 : 2, n.memory.size());
  n.wire = need(n.place->open(plan.kind,
                              {.role = plan.role, .peer = their_life, .lanes = plan.lanes}, n.said),
                "link");
  const auto offer = n.wire->offer();
  peer.put_list(offer.payload);
  const link_offer theirs{.kind = plan.kind, .owner = their_life, .payload = peer.get_list()};
  need(n.wire->connect(theirs), "connect");
  while (!n.said->up) {
    plan.workers == 0 ? static_cast<void>(n.place->poll()) : std::this_thread::yield();
  }
  // Only a link that is up can grant, and its grants name it.
  const auto grant =
      need(n.wire->grant(n.region, {{0, plan.memory, 0, 1}}, access::read_write, transfer_id{1}),
           "grant");
  peer.put(grant.id);
  peer.put(grant.region);
  peer.put_list(grant.key);
  n.peer_grant = grant;
  n.peer_grant.owner = theirs.owner;
  n.peer_grant.id = peer.get<std::uint64_t>();
  n.peer_grant.region = peer.get<region_id>();
  n.peer_grant.key = peer.get_list();
  return n;
}

std::uint64_t stream(link_node& n, std::size_t at_once,
                     const std::function<std::optional<batch>()>& next) {
  std::mutex mutex;  // not held while posting: that may deliver a completion
  std::condition_variable ended;
  std::uint64_t posted = 0;
  std::size_t in_flight = 0;
  const auto take = [&] {
    auto made = next();
    if (made) {
      ++posted;
      ++in_flight;
    }
    return made;
  };
  n.said->when_completed = [&] {
    std::optional<batch> more;
    {
      const std::lock_guard lock{mutex};
      --in_flight;
      more = take();
      if (in_flight == 0) ended.notify_one();
    }
    if (more) need(n.wire->post(std::move(*more)), "post");
  };
  std::vector<batch> first;
  {
    const std::lock_guard lock{mutex};
    while (first.size() < at_once) {
      auto made = take();
      if (!made) break;
      first.push_back(std::move(*made));
    }
  }
  for (auto& made : first) need(n.wire->post(std::move(made)), "post");
  std::unique_lock lock{mutex};
  ended.wait(lock, [&] { return in_flight == 0; });
  return posted;
}

namespace {

void post_message(link_node& n, const std::shared_ptr<const transport::remote_grant>& grant,
                  std::uint64_t bytes, std::byte what) {
  static std::uint64_t last = std::uint64_t{1} << 40;  // beside the batches of `stream`
  auto work = new_batch(transport::batch_id{++last}, transport::direction::write);
  work.pieces.push_back({n.region, grant, {{0, 0, bytes, 0, 0, 1}}});
  work.frame.assign(8, what);
  need(n.wire->post(std::move(work)), "post");
}

}  // namespace

double message_latency(link_node& n, std::uint64_t bytes, int count) {
  const auto grant = std::make_shared<const transport::remote_grant>(n.peer_grant);
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto before = n.said->frames;
    const auto start = clock_type::now();
    post_message(n, grant, bytes, std::byte{1});
    while (n.said->frames == before) n.wire->poll();
    times.push_back(microseconds_since(start) / 2);
  }
  return median(std::move(times));
}

void answer_rounds(const control& parent, link_node& n, std::uint64_t bytes) {
  const auto grant = std::make_shared<const transport::remote_grant>(n.peer_grant);
  n.said->when_frame = [&](std::span<const std::byte>) {
    post_message(n, grant, bytes, std::byte{2});
  };
  while (true) {
    parent.get<char>();  // start of a round: poll until its end
    while (!parent.readable()) {
      for (int i = 0; i < 64; ++i) n.wire->poll();
    }
    parent.get<char>();
    parent.put('k');
  }
}

}  // namespace troupe::bench
