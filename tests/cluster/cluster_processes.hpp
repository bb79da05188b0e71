#pragma once

/// A cluster of real processes, one for each node, on a `network` or all on 127.0.0.1: started,
/// killed, stopped and started again by the test.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "troupe/actors/cluster_client.hpp"

#include "network.hpp"
#include "scratch_folder.hpp"

namespace troupe::testing {

struct cluster_shape {
  std::uint32_t prefills{3}, decodes{3};
  std::string backend{"tcp"};
  std::string mode{"write"};
  std::chrono::milliseconds heartbeat_interval{200}, heartbeat_timeout{1000};
  std::chrono::milliseconds peer_silence{500};
  std::string pool{"12MiB"};
  std::string transport_more;  ///< e.g. ", max_reconnects: 0"
  std::string limits_more;     ///< e.g. ", retry_window: 2s"
  /// With credentials of its own, for hosts with addresses that are not loopback ones.
  bool secured{false};
  std::uint32_t decode_block_tokens{16};  ///< if not 16, decode nodes have another model
};

/// `supervisor`, then `prefill-0` and so on.
[[nodiscard]] std::vector<std::string> node_names(const cluster_shape& shape);

/// A process that ended without an order.
struct unwanted_end {
  std::string name;
  std::string how;
  std::string log;  ///< its last lines
};

class cluster_processes {
 public:
  /// Runs on the network, or on 127.0.0.1 if `net` is null. The network must outlive this object.
  cluster_processes(cluster_shape shape, const network* net);
  /// Kills all processes. Their files are kept if `keep_files` was called.
  ~cluster_processes();
  cluster_processes(const cluster_processes&) = delete;
  cluster_processes& operator=(const cluster_processes&) = delete;

  void start(const std::string& name);
  void start_all();
  void kill(const std::string& name);
  /// Asks it to end in good order; the caller waits with `gone`.
  void ask_to_end(const std::string& name) const;
  void freeze(const std::string& name) const;
  void thaw(const std::string& name) const;
  /// Whether it has ended, which is then no `unwanted_end`.
  [[nodiscard]] bool gone(const std::string& name);
  /// Restarts the processes that ended by themselves since the last call, and returns them.
  [[nodiscard]] std::vector<unwanted_end> revive();

  /// Whether the supervisor shows all nodes as up with their present processes.
  [[nodiscard]] bool are_up(actors::cluster_client& client) const;
  /// Waits until `are_up` holds.
  [[nodiscard]] bool all_up(actors::cluster_client& client) const;
  /// `timeout`: of requests to the supervisor.
  [[nodiscard]] std::unique_ptr<actors::cluster_client> client(
      std::chrono::milliseconds timeout = std::chrono::seconds{1}) const;
  [[nodiscard]] pid_t pid(const std::string& name) const;
  [[nodiscard]] const std::vector<std::string>& nodes() const { return nodes_; }
  /// Lines that no process of the cluster should have written.
  [[nodiscard]] std::vector<std::string> violations() const;
  [[nodiscard]] const std::string& folder() const { return folder_.path(); }
  void keep_files() { folder_.keep(); }

 private:
  struct process {
    pid_t pid{-1};
    int lives{0};
    std::string log;
  };
  [[nodiscard]] std::string host(const std::string& name) const;
  /// Creates the credentials and returns the value of `security`, which names their files.
  [[nodiscard]] std::string make_credentials() const;
  [[nodiscard]] std::string yaml(std::uint32_t block_tokens) const;

  cluster_shape shape_;
  const network* net_;
  scratch_folder folder_{"cluster"};
  std::string file_, decode_file_, violations_, security_;
  std::uint16_t port_;
  std::vector<std::string> nodes_;  ///< without the supervisor
  std::map<std::string, process> processes_;
};

}  // namespace troupe::testing
