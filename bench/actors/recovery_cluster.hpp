#pragma once

/// A cluster whose processes a benchmark kills, stops and cuts off.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <sys/types.h>

#include "troupe/actors/engine.hpp"

#include "processes.hpp"

namespace troupe::bench {

struct recovery_options {
  std::string backend{"shm"};
  actors::transfer_mode mode{actors::transfer_mode::write};
  std::string pool{"16MiB"};
  /// Gives prefill-0 an address of its own, which `cut_prefill_0` cuts off.
  bool cuttable{false};
};

/// A supervisor, prefill-0, prefill-1, decode-0 and decode-1, each in a process of its own; the calling
/// process is the node `survivor`. An error that no fault explains ends the benchmark.
class recovery_cluster {
 public:
  recovery_cluster(recovery_options options, std::string survivor);

  [[nodiscard]] engine& node() { return *node_; }
  /// Sends a signal to the process of another node, or of "supervisor".
  void signal(const std::string& name, int number);
  /// Starts another supervisor at the address of the former one.
  void next_supervisor();

  // -- requests

  static constexpr std::uint32_t few_tokens = 64;
  /// Has the prefill node compute the request: its first half, or, with `whole`, all of it.
  enum class computed : std::uint8_t { half, whole };
  void offer(const std::string& prefill, const std::string& request, computed so_far,
             std::uint32_t tokens = few_tokens);
  void ask(const std::string& decode, const std::string& prefill, const std::string& request,
           std::uint32_t tokens = few_tokens);
  /// How the survivor's part in the request ended.
  struct ending {
    std::optional<troupe::error> failure;
    clock_type::time_point at;
  };
  /// None if it has not ended within `limit`.
  [[nodiscard]] std::optional<ending> outcome(const std::string& request,
                                              std::chrono::milliseconds limit);
  void rest(std::chrono::milliseconds time);
  /// Moves a whole request from one to the other, so that they have a link. One is the survivor.
  void acquaint(const std::string& prefill, const std::string& decode);

  /// Gives this process and its children a network of their own. Returns false if that is not
  /// possible: it needs root and `ip`.
  [[nodiscard]] static bool enter_own_network();
  static void cut_prefill_0();

 private:
  void take(std::chrono::milliseconds timeout);

  const recovery_options options_;
  const std::string survivor_;
  std::uint16_t port_{0};
  struct process {
    control orders;
    pid_t pid{0};
  };
  std::map<std::string, process> processes_;
  process next_supervisor_;
  std::unique_ptr<engine> node_;
  std::map<std::uint64_t, std::string> live_;
  std::map<std::string, ending> ended_;
  std::uint32_t acquainted_{0};
};

}  // namespace troupe::bench
