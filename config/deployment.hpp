#pragma once

/// The content of one deployment file, as plain values. `parse.hpp` makes them from YAML and checks
/// them, `print.hpp` writes them back with every default spelt out, `resolve.hpp` expands them into
/// nodes.
///
/// The file. Keys in [brackets] are optional; the default follows `=`. Durations and sizes carry a
/// unit (`units.hpp`): 100ms, 1s, 5min, 1h; 64KiB, 1GiB, 500MB. A key that is not listed here is an
/// error, and so is a value of a later release.
///
///     cluster: demo                  # 1..64 of a-z 0-9 _ -, beginning with a letter or a digit
///     [supervisor]:
///       [host] = 127.0.0.1
///       [port] = 7400                # 0: the OS chooses, for tests and demos that start all nodes
///       [heartbeat_interval] = 1s    # 10ms..1min
///       [heartbeat_timeout] = 5s     # at least 3 intervals, at most 1h: then a node is `down`
///       [ease_in] = 10s              # 0s..1h: a replica that comes up gets its full share of
///                                    # requests only after this time
///       [state_file] = auto          # where the supervisor keeps the state that must survive its restart:
///                                    # a path, auto (a folder of the user or of the service), none
///       [begin] = false              # true | false; true: it need not be started. A node or a frontend
///                                    # that finds none on the supervisor's host begins one there; all of
///                                    # them must run as one user. Port 0 is allowed
///       [idle] = 10min               # begin: true only: it ends after so long without a node,
///                                    # 1s..24h
///     [security]:
///       [mode] = secret              # secret: a peer must prove that it knows the secret; every host
///                                    # must be a loopback address
///                                    # none: loopback addresses only, open to every process of the host
///                                    # tls: any host; a peer must also present a certificate of the ca
///       [secret] = auto              # auto, in mode secret only: the first process of the user creates
///                                    # one in a folder that only this user can read. Or the absolute path
///                                    # of a file; `troupe certs init` makes it, and the files of mode tls
///       certificate: FILE            # mode tls: PEM files
///       key: FILE
///       ca: FILE
///     [model]:                       # without it, every engine registers its own layout
///       layers: 28                   # 1..2048
///       kv_heads: 4                  # of the whole model, 1..65536; not with `mla`
///       head_dim: 128                # elements, 1..65536; not with `mla`
///       [mla]: {latent_dim: 576}     # one latent per token and layer instead of heads
///       [dtype] = bf16               # fp32 | fp16 | bf16 | fp8 | int8
///       [block_tokens] = 16          # 1..1024
///       [layout]:                    # how a rank's pool is arranged; a stage may have its own
///         [order] = layers_first     # layers_first | blocks_first | block_interleaved
///         [kv] = together            # together | separate
///         [inner] = token_major      # token_major | head_major
///       [state]:                     # a tensor of each request besides its blocks (e.g. Mamba)
///         bytes: 64KiB               # of one request on one rank
///         [slots] = 64               # requests that have one at once, 1..65536
///     stages:                        # 1..64
///       - name: decode               # unique, 1..32 of a-z 0-9 _ -; not `supervisor`
///         role: decode               # prefill | decode | store | both: prefill and decode, with
///                                    # `engine: external` only
///         [open]: {max_nodes: 256}   # 1..1023. Nodes that no file names join the stage with the values
///                                    # that they announce; the keys from `replicas` to `ports`, `engine`,
///                                    # `restart`, `layout` and, except for a store, `pool` are left out
///         [replicas] = 1
///         [pipeline_parallel] = 1    # parts of a replica, which hold consecutive layers of the model;
///                                    # `engine: external` only
///         [tensor_parallel] = 1      # ranks of each part; divides kv_heads or is a multiple of it
///         [hosts] = [127.0.0.1]      # replica r runs on hosts[r mod count]; or one per node. auto: the
///                                    # host on which it is started; it listens at the address by which
///                                    # that host reaches the supervisor. `troupe up` starts all such nodes
///                                    # where it runs: use `--only` or `troupe node --stage` across hosts
///         [port] or [ports] = 0      # one for all nodes, or a list with one per node; 0: the OS's
///         [policy] = round-robin     # random | round-robin | least-queue-length: how a request
///                                    # finds its replica
///         [engine] = reference       # reference | external (a process of the user that embeds
///                                    # the library); a store takes none
///         [restart] = never          # never | on-failure: whether `troupe up` restarts a node that
///                                    # ends by itself
///         [layout]                   # as in `model`, = the model's; only where there is a `model`
///         [pool]:                    # memory of one node; optional for `engine: external` only
///           [device] = cpu           # cpu | gpu:N, the N-th GPU that a node's process sees; or a list
///                                    # with one gpu:N per node. GPUs need `engine: external`
///           size: 1GiB               # at least one block of all its layers and the state slots
///           [on_full] = wait         # wait | fail
///         [transport]:
///           [backend] = auto         # auto | shm | tcp | rdma | xgmi (GPUs of one host)
///           [fallback] = []          # tried in this order once `backend` has failed for good
///           [device] = auto          # RDMA devices: mlx5_0,mlx5_1 (these, up to 4, with lanes on all of
///                                    # them), ^mlx5_2 (the best except this), auto (fastest, then nearest)
///           [rdma]:
///             [port] = 0             # of the device, from 1; 0: its first port that is up
///             [gid_index] = -1       # address of the port; -1: RoCE v2 first, IPv4 first
///             [traffic_class] = 0    # 0..255
///             [service_level] = 0    # 0..15
///             [pkey_index] = 0
///             [hop_limit] = 64       # 1..255
///             [timeout] = 16         # 8..20: a packet is sent again after 4.096 us * 2^timeout ...
///             [retry_count] = 6      # ... at most so many times, 0..7
///             [memory_windows] = auto    # auto | off; auto: grants are enforced by memory windows of the
///                                    # NIC if every device has them. off: a grant opens its whole
///                                    # region to the peer until the link ends
///             [relaxed_ordering] = auto  # auto | off; auto: NICs that support it may write to memory in
///                                    # any order before they report completion
///             [max_registration] = 0 # largest piece of memory registered at once, from 4KiB; 0: the
///                                    # device's limit
///             [fence_patience] = 0   # how long a fence waits for the peer to confirm before it shuts
///                                    # the peer out, 10ms..1min; 0: as long as peer_silence
///           [xgmi]:
///             [copy_blocks] = 64     # thread blocks of a GPU that copies may take, 1..1024
///             [engine_size] = 16MiB  # runs from this size on use the copy engine
///             [bulk] = auto          # auto | off; auto: bulk copies if the GPU has them
///           [qp_per_transfer] = 4    # lanes of a link, 1..64
///           [post_batch_size] = -1   # segments per submission, 1..65536 (rdma: 32 at most); -1: the best
///           [num_workers] = 1        # progress threads, 1..64
///           [data_port] = 0          # where tcp listens for data; 0: the OS chooses
///           [connect_timeout] = 2s   # 1ms..10min
///           [max_reconnects] = 3     # before `fallback`, 0..1000
///           [peer_silence] = 1s      # with operations in flight, a peer that has not answered for so long
///                                    # is lost, 100ms..1min
///     [edges] = []:                  # at most 1024
///       - from: prefill              # a stage
///         to: decode                 # another stage; the same one where its role is `both`
///         [mode] = write             # write | read: how layers move; only from a prefill to a decode stage
///                                    # (or `both`). Any edge can carry keyed put/get
///     [limits]:                      # of each node
///       [transfer_deadline] = 30s    # of a transfer for which the engine gives none, 1ms..24h
///       [retry_window] = 0s          # how long a source waits for another decode side after the first died
///                                    # or failed, 0s..1h
///       [source_lease] = 60s         # how long a sealed cache waits for a decode side that is not alive or
///                                    # has never asked for it, 1s..24h
///       [retry_budget] = 2           # how often a request is placed again, 0..1000
///       [max_operations] = 16384     # transfers, puts, gets and so on at once, 1..1048576
///       [max_waiting] = 4096         # requests in the router's queue, 1..1048576
///       [max_parked] = 4096          # receives from one peer for requests that the node does not know yet,
///                                    # 1..1048576
///
/// A file has at most 1 MiB, 100,000 values and 32 levels; a deployment at most 1024 nodes.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/config/transfer_mode.hpp"

namespace troupe::config {

inline constexpr std::size_t max_nodes = 1024;  ///< of a deployment, the supervisor among them
inline constexpr std::size_t max_stages = 64;
inline constexpr std::size_t max_edges = 1024;

/// `both`: prefill and decode, for external engines only.
enum class role : std::uint8_t { supervisor, prefill, decode, store, both };
enum class placement_policy : std::uint8_t { random, round_robin, least_queue_length };
/// What happens to an allocation that the pool cannot serve: it waits in line, or fails at once.
enum class pool_full : std::uint8_t { wait, fail };
/// The engine in a `troupe node` process of a stage. `external`: the process is the user's own.
enum class engine_kind : std::uint8_t { none, reference, external };
enum class backend_kind : std::uint8_t { automatic, shm, tcp, rdma, xgmi };
using troupe::transfer_mode;
/// Whether `troupe up` starts a node's process again when it ends by itself.
enum class restart_policy : std::uint8_t { never, on_failure };
/// Whether an optional device feature is used: where available, or never.
enum class feature_use : std::uint8_t { automatic, off };
enum class security_mode : std::uint8_t { none, secret, tls };
/// Order of the dimensions of a pool, outermost first.
enum class block_order : std::uint8_t { layers_first, blocks_first, block_interleaved };
/// Whether K and V of a layer's block lie in one block or in two.
enum class kv_placement : std::uint8_t { together, separate };
/// Order inside K or V of a block: [token][head][dim] or [head][token][dim].
enum class block_inner : std::uint8_t { token_major, head_major };

/// The word that the file uses.
[[nodiscard]] std::string_view to_string(role value) noexcept;
[[nodiscard]] std::string_view to_string(placement_policy value) noexcept;
[[nodiscard]] std::string_view to_string(pool_full value) noexcept;
[[nodiscard]] std::string_view to_string(engine_kind value) noexcept;
[[nodiscard]] std::string_view to_string(backend_kind value) noexcept;
/// The words that `transport.backend` accepts, "auto" first.
[[nodiscard]] std::vector<std::string> backend_words();
[[nodiscard]] std::optional<backend_kind> backend_of(std::string_view word) noexcept;
[[nodiscard]] std::string_view to_string(restart_policy value) noexcept;
[[nodiscard]] std::string_view to_string(feature_use value) noexcept;
[[nodiscard]] std::string_view to_string(security_mode value) noexcept;
[[nodiscard]] std::string_view to_string(block_order value) noexcept;
[[nodiscard]] std::string_view to_string(kv_placement value) noexcept;
[[nodiscard]] std::string_view to_string(block_inner value) noexcept;

struct supervisor_config {
  std::string host{"127.0.0.1"};
  std::uint16_t port{7400};
  std::chrono::milliseconds heartbeat_interval{1000};
  std::chrono::milliseconds heartbeat_timeout{5000};
  std::chrono::milliseconds ease_in{10'000};
  std::string state_file{"auto"};  ///< "auto", "none" or a path
  bool begin{false};               ///< a process that needs a supervisor and finds none begins one
  std::chrono::milliseconds idle{600'000};  ///< `begin`: it ends after so long without a node

  friend bool operator==(const supervisor_config&, const supervisor_config&) = default;
};

struct security_config {
  security_mode mode{security_mode::secret};
  std::string secret{"auto"};  ///< "auto" (mode `secret` only) or a path; unused in mode `none`
  std::string certificate, key, ca;  ///< paths; set in mode `tls`

  /// Whether the cluster uses the automatic secret of its user.
  [[nodiscard]] bool is_secret_automatic() const {
    return mode == security_mode::secret && secret == "auto";
  }

  friend bool operator==(const security_config&, const security_config&) = default;
};

struct cache_arrangement {
  block_order order{block_order::layers_first};
  kv_placement kv{kv_placement::together};
  block_inner inner{block_inner::token_major};

  friend bool operator==(const cache_arrangement&, const cache_arrangement&) = default;
};

struct state_config {
  std::uint64_t bytes{0};   ///< of one request on one rank
  std::uint32_t slots{64};  ///< requests that have a state at once

  friend bool operator==(const state_config&, const state_config&) = default;
};

/// The geometry of the cache: `layers` equal layers with either heads or a latent.
struct model_config {
  std::uint32_t layers{0};
  std::uint32_t kv_heads{0};    ///< 0 if and only if `latent_dim` is set
  std::uint32_t head_dim{0};    ///< 0 if and only if `latent_dim` is set
  std::uint32_t latent_dim{0};  ///< MLA: elements of the latent; else 0
  std::string dtype{"bf16"};
  std::uint32_t block_tokens{16};
  cache_arrangement layout;
  std::optional<state_config> state;

  [[nodiscard]] bool is_mla() const noexcept { return latent_dim != 0; }
  friend bool operator==(const model_config&, const model_config&) = default;
};

struct pool_config {
  /// One per node: the index among the GPUs that its process sees. Empty for host memory.
  std::vector<std::uint32_t> gpus;
  std::uint64_t size{0};  ///< bytes, of each node
  pool_full on_full{pool_full::wait};

  friend bool operator==(const pool_config&, const pool_config&) = default;
};

/// How RDMA devices are used; the numbers are those of libibverbs.
struct rdma_config {
  std::uint8_t port{0};
  std::int32_t gid_index{-1};
  std::uint8_t traffic_class{0};
  std::uint8_t service_level{0};
  std::uint16_t pkey_index{0};
  std::uint8_t hop_limit{64};
  std::uint8_t timeout{16};
  std::uint8_t retry_count{6};
  feature_use memory_windows{feature_use::automatic};
  feature_use relaxed_ordering{feature_use::automatic};
  std::uint64_t max_registration{0};            ///< bytes; 0: the device's limit
  std::chrono::milliseconds fence_patience{0};  ///< 0: `peer_silence` of the transport

  friend bool operator==(const rdma_config&, const rdma_config&) = default;
};

/// How GPUs are used.
struct xgmi_config {
  std::uint32_t copy_blocks{64};
  std::uint64_t engine_size{std::uint64_t{16} << 20U};  ///< bytes
  feature_use bulk{feature_use::automatic};

  friend bool operator==(const xgmi_config&, const xgmi_config&) = default;
};

struct transport_config {
  backend_kind backend{backend_kind::automatic};
  std::vector<backend_kind> fallback;  ///< distinct, none `automatic`, none equal to `backend`
  std::string device{"auto"};          ///< RDMA devices: "auto", "a,b" or "^c"
  rdma_config rdma;
  xgmi_config xgmi;
  std::uint32_t qp_per_transfer{4};
  std::int32_t post_batch_size{-1};
  std::uint32_t num_workers{1};
  std::uint16_t data_port{0};
  std::chrono::milliseconds connect_timeout{2000};
  std::uint32_t max_reconnects{3};
  std::chrono::milliseconds peer_silence{1000};

  friend bool operator==(const transport_config&, const transport_config&) = default;
};

/// A stage of nodes that no file names.
struct open_config {
  std::uint32_t max_nodes{256};

  friend bool operator==(const open_config&, const open_config&) = default;
};

struct stage_config {
  std::string name;
  config::role role{role::prefill};
  std::optional<open_config> open;  ///< if set, `replicas`, `hosts`, `ports` and so on are unused
  std::uint32_t replicas{1};
  std::uint32_t pipeline_parallel{1};  ///< parts of a replica
  std::uint32_t tensor_parallel{1};    ///< ranks of each part
  std::vector<std::string> hosts{"127.0.0.1"};
  std::vector<std::uint16_t> ports;  ///< one per node, replica by replica, rank by rank; 0: any
  placement_policy policy{placement_policy::round_robin};
  engine_kind engine{engine_kind::reference};  ///< `none` if and only if the role is `store`
  restart_policy restart{restart_policy::never};
  /// Set if there is a model, the role has blocks and the stage is not open.
  std::optional<cache_arrangement> layout;
  std::optional<pool_config> pool;  ///< empty only for `external` and open stages
  transport_config transport;

  /// Ranks of a replica.
  [[nodiscard]] std::uint32_t ranks() const noexcept { return pipeline_parallel * tensor_parallel; }
  /// Nodes that the file names; 0 for an open stage.
  [[nodiscard]] std::size_t node_count() const noexcept {
    return open ? 0 : std::size_t{replicas} * ranks();
  }
  friend bool operator==(const stage_config&, const stage_config&) = default;
};

struct edge_config {
  std::string from;
  std::string to;
  std::optional<transfer_mode> mode;  ///< set if and only if from a prefill to a decode role

  friend bool operator==(const edge_config&, const edge_config&) = default;
};

struct limits_config {
  std::chrono::milliseconds transfer_deadline{30'000};
  std::chrono::milliseconds retry_window{0};
  std::chrono::milliseconds source_lease{60'000};
  std::uint32_t retry_budget{2};
  std::uint32_t max_operations{16'384};
  std::uint32_t max_waiting{4096};
  std::uint32_t max_parked{4096};

  friend bool operator==(const limits_config&, const limits_config&) = default;
};

struct deployment {
  std::string cluster;
  supervisor_config supervisor;
  security_config security;
  std::optional<model_config> model;
  std::vector<stage_config> stages;
  std::vector<edge_config> edges;
  limits_config limits;

  friend bool operator==(const deployment&, const deployment&) = default;
};

/// Bytes of one element; 0 for a name that `dtype` does not accept.
[[nodiscard]] std::uint32_t dtype_size(std::string_view dtype) noexcept;

/// Layers [first, first + count) of a model.
struct part_layers {
  std::uint32_t first{0};
  std::uint32_t count{0};

  friend bool operator==(const part_layers&, const part_layers&) = default;
};
/// The layers that part `part` of `parts` holds: consecutive, and as many as any other part or one more.
[[nodiscard]] part_layers layers_of_part(std::uint32_t layers, std::uint32_t parts,
                                         std::uint32_t part) noexcept;

/// Bytes of one block over all layers that one of `tensor_parallel` ranks of one of `pipeline_parallel` parts
/// holds (the largest share if they differ). 0 when it does not fit into 64 bits.
[[nodiscard]] std::uint64_t bytes_per_block(const model_config& model,
                                            std::uint32_t tensor_parallel,
                                            std::uint32_t pipeline_parallel = 1) noexcept;

/// The stage of that name, or null. The pointer is into `of`.
[[nodiscard]] const stage_config* find_stage(const deployment& of, std::string_view name) noexcept;

}  // namespace troupe::config
