// The other node of a test in a process of its own, so that it can be killed and stopped.
//
//   transport_peer BACKEND LANES host|gpu what
//
// Its region is in memory of the host or of a GPU. As the initiator it dials the offer that comes
// on standard input. `serve` does nothing of its own accord; `write` and `read` keep four batches
// of 64 x 64 KiB in flight against the grant that came with the offer, and go on when they are
// refused. Prints "refused" once when the first batch fails. Ends with its input.
#include <atomic>
#include <chrono>
#include <cstring>
#include <iostream>
#include <string_view>
#include <thread>

#include <unistd.h>

#include "troupe/transport/endpoint.hpp"

#include "backends.hpp"
#include "gpu_memory.hpp"
#include "peer_talk.hpp"

namespace {

using namespace troupe;
using namespace troupe::transport;

struct peer_sink final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    --in_flight;
    if (done.failure && !refused.exchange(true)) {
      std::cout << "refused " << to_string(done.failure->code) << std::endl;
    }
  }
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override {
    std::cout << "broken " << to_string(why.code) << std::endl;
    broken = true;
  }
  std::atomic<bool> up{false}, broken{false}, refused{false};
  std::atomic<int> in_flight{0};
};

int fail_with(const std::string& what) {
  std::cerr << "transport_peer: " << what << '\n';
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return fail_with("usage: transport_peer BACKEND LANES host|gpu serve|write|read");
  const auto kind = backend_kind_from(argv[1]);
  const std::string_view what = argv[4];
  if (!kind) return fail_with("unknown backend");
  endpoint_options options;
  options.self = incarnation{0xdead};
  options.peer_silence = contract::longer_than_any_wait;
  options.rdma.device =
      contract::rdma_devices('b', static_cast<std::uint32_t>(std::stoul(argv[2])));
  contract::suit_emulation(options.rdma);
  const bool on_gpu = std::string_view{argv[3]} == "gpu";
  if (on_gpu) options.xgmi = xgmi::options_under_test();
  const auto gpus = options.xgmi.site;
  auto place = endpoint::create(std::move(options));
  if (!place) return fail_with(to_string(place.error()));
  constexpr std::uint64_t size = std::uint64_t{4} << 20;
  // On a different GPU from the test's, if there is one.
  const auto gpu = on_gpu ? static_cast<std::uint32_t>(gpus->bus_ids().size()) - 1 : 0;
  const auto region = on_gpu ? (*place)->allocate_on_gpu(gpu, size, "peer").value()
                             : (*place)->allocate(size, "peer").value();
  const auto memory = (*place)->bytes(region).value();
  const std::vector<std::byte> pattern(size, std::byte{0xbb});
  if (on_gpu) {
    gpus->runtime->copy_now(memory.data(), pattern.data(), size).value();
  } else {
    std::memcpy(memory.data(), pattern.data(), size);
  }

  std::string line;
  std::getline(std::cin, line);
  const auto their_offer = contract::offer_of(line);
  auto sink = std::make_shared<peer_sink>();
  link_options with;
  with.role = link_role::initiator;
  with.peer = their_offer.owner;
  with.lanes = static_cast<std::uint32_t>(std::stoul(argv[2]));
  with.connect_timeout = contract::longer_than_any_wait;
  auto wire = (*place)->open(*kind, with, sink);
  if (!wire) return fail_with(to_string(wire.error()));
  std::cout << contract::line_of((*wire)->offer()) << std::flush;
  // Tell the acceptor first: queue pairs that are not joined yet would not hear the dialer.
  std::getline(std::cin, line);
  if (auto ok = (*wire)->connect(their_offer); !ok) return fail_with(to_string(ok.error()));
  while (!sink->up && !sink->broken) std::this_thread::sleep_for(std::chrono::microseconds{100});
  if (sink->broken) return 1;
  const auto mine =
      (*wire)->grant(region, {{0, size, 0, 1}}, access::read_write, transfer_id{7}).value();
  std::cout << contract::line_of(mine) << std::flush;
  std::getline(std::cin, line);
  const auto given = std::make_shared<const remote_grant>(contract::grant_of(line));

  std::atomic<bool> ended{false};
  std::thread waiting{[&] {
    char c;
    while (::read(STDIN_FILENO, &c, 1) > 0) {
    }
    ended = true;
  }};
  std::uint64_t next = 0;
  while (!ended) {
    std::this_thread::sleep_for(std::chrono::microseconds{100});
    if (what == "serve" || sink->broken) continue;
    while (sink->in_flight < 4 && !ended) {
      batch work;
      work.id = batch_id{++next};
      work.transfer = given->transfer;
      work.dir = what == "write" ? direction::write : direction::read;
      std::vector<segment> segments;
      for (std::uint64_t i = 0; i < 64; ++i)
        segments.push_back({i << 16, i << 16, 1 << 16, 0, 0, 1});
      work.pieces.push_back({region, given, std::move(segments)});
      ++sink->in_flight;
      if (!(*wire)->post(std::move(work))) {
        --sink->in_flight;
        break;
      }
    }
  }
  waiting.join();
  (*wire)->close();
  return 0;
}
