#ifndef TROUPE_TROUPE_H
#define TROUPE_TROUPE_H

/*
 * Troupe in C: one node of a deployment inside the process of an inference engine, and a cluster
 * seen by a frontend. Plain C11; link with -ltroupe (pkg-config troupe, or troupe::c of CMake's
 * package Troupe).
 *
 *     troupe_engine_options options = {
 *         .size = sizeof options, .deployment_file = "troupe.yaml", .node = "decode-0"};
 *     troupe_engine *engine = NULL;
 *     if (troupe_engine_start(&options, &engine) != TROUPE_OK) puts(troupe_last_error());
 *
 * Errors. Every fallible call returns a `troupe_status`: TROUPE_OK (0), or a code to switch on.
 * `troupe_last_error()` returns the sentence for that code, which says what was wrong and what to
 * do. It belongs to the last call that failed on the calling thread. Troupe never throws, aborts or
 * exits across this interface. It never calls your code, except `troupe_cluster_carry`, which does
 * so on the calling thread. Null pointers, wrong sizes and numbers out of range are refused with
 * TROUPE_INVALID_CONFIG and a sentence that names the argument; a call that fails writes no output.
 * A call that takes events, notices or an outcome, or answers a call, and finds no memory fails
 * with TROUPE_POOL_EXHAUSTED and changes nothing: call again.
 *
 * Sizes. A struct that begins with `size` can grow: set it to sizeof of the struct as you compiled
 * it, and every field that you do not use to 0. A newer library takes the fields that you did not
 * know as 0. An older library refuses a struct in which a field that it does not know is not 0.
 * Structs without `size` do not change while the library is called libtroupe.so.0.
 *
 * Ownership. Arguments are copied before a call returns, unless it says otherwise (regions, the
 * value of a put). The caller owns what a call gives out; the call's comment says what frees it.
 * Freeing NULL does nothing.
 *
 * Threads. Every call may be made from any thread at any time, concurrently with any other call,
 * and while another thread waits. Two exceptions: an object must not be in use by another call when
 * it is freed, and a `troupe_layout` is built by one thread.
 *
 * Fork. An engine or a cluster belongs to the process that made it. In a child of `fork` every call
 * on it fails at once with TROUPE_STALE_INCARNATION; freeing it there only forgets it. A child
 * forked while its parent had an engine or a cluster cannot make new ones: start it by exec (spawn)
 * instead.
 *
 * Time is in milliseconds, memory in bytes, tokens are counted from 0 and ranges exclude their end.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TROUPE_API __attribute__((visibility("default")))
#else
#define TROUPE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* -- errors and versions */

typedef int32_t troupe_status;

/* The names that Troupe's logs and messages use; docs/troubleshooting.md says what to do about
 * each. Never renumbered. */
enum {
  TROUPE_OK = 0,
  TROUPE_INVALID_CONFIG = 1,   /* a configuration or an argument that cannot be accepted as it is */
  TROUPE_NO_DEVICE = 2,        /* the hardware that was asked for is not on this machine */
  TROUPE_LAYOUT_MISMATCH = 3,  /* two caches that cannot be mapped onto each other */
  TROUPE_VERSION_MISMATCH = 4, /* the peer speaks another protocol version */
  TROUPE_UNKNOWN_REGION = 5,   /* a region that is not registered (any more) */
  TROUPE_OUT_OF_RANGE = 6,     /* an offset, length or index outside what it refers to */
  TROUPE_GRANT_REVOKED = 7,    /* the permission was withdrawn, usually since the transfer ended */
  TROUPE_POOL_EXHAUSTED = 8,   /* no free blocks or memory, and the caller did not want to wait */
  TROUPE_OVERLOADED = 9,       /* a bound (queue, credits, connections, operations) was reached */
  TROUPE_NOT_FOUND = 10,       /* no such key, request, node, operation or block */
  TROUPE_ALREADY_EXISTS = 11,  /* the id, key or port is in use */
  TROUPE_PEER_UNREACHABLE = 12, /* the peer could not be connected to */
  TROUPE_PEER_LOST = 13,        /* the peer was there and is gone */
  TROUPE_LINK_BROKEN = 14,      /* the connection failed while both peers may still live */
  TROUPE_DEADLINE = 15,         /* the time that the caller gave has passed */
  TROUPE_ABORTED = 16,          /* an engine gave the transfer up, or this one was stopped */
  TROUPE_LEASE_EXPIRED = 17,    /* the holder of the blocks has been silent for too long */
  /* from an earlier life of a node, or (here) from the process before a fork */
  TROUPE_STALE_INCARNATION = 18,
  /* wrong or missing credentials, or a right that the grant lacks */
  TROUPE_UNAUTHORIZED = 19,
  TROUPE_BACKEND_UNAVAILABLE = 20, /* the transport that was asked for cannot be used here */
  TROUPE_INTERNAL = 21,            /* a defect of Troupe itself; please report it with the log */
  /* Only in this interface: a wait reached its timeout. Nothing has ended and no event was
     taken. */
  TROUPE_TIMED_OUT = 100
};

/* The sentence of the last call that failed on this thread; "" if none did. NUL-terminated UTF-8,
 * owned by Troupe, valid until the next call that fails on this thread. */
TROUPE_API const char* troupe_last_error(void);
/* The name of a code as logs write it, such as "peer_lost"; "unknown" for a number that is not a
 * code. Never freed. */
TROUPE_API const char* troupe_status_name(troupe_status status);
/* The version of the loaded library, such as "0.1.0". Never freed. */
TROUPE_API const char* troupe_version(void);
/* The protocol version, which must be the same on all nodes of a cluster. */
TROUPE_API uint32_t troupe_protocol_version(void);
/* Frees text or bytes that a call gave out: reports, encodings, answers. */
TROUPE_API void troupe_free(void* memory);

typedef struct troupe_log_options {
  uint32_t size;
  uint32_t reserved;
  const char* level; /* trace, debug, info, warn, error, off; NULL: info */
  const char* node;  /* printed in every line; NULL: the process id */
  const char* file;  /* rotated at 64 MiB; NULL: standard error */
} troupe_log_options;

/* Sets where Troupe logs in this process. Before the first call it logs level info to standard
 * error. TROUPE_INVALID_CONFIG if the file cannot be written or the level is unknown; nothing
 * changes then. */
TROUPE_API troupe_status troupe_log(const troupe_log_options* options);

/* -- the layout of a cache */

/* How one rank's KV cache lies in the regions of memory that its engine registers. */
typedef struct troupe_layout troupe_layout;

enum {                             /* layer_kind */
       TROUPE_LAYER_ATTENTION = 1, /* keys and values: two planes, K and V */
       TROUPE_LAYER_MLA = 2,       /* one latent without heads, the same on every rank: one plane */
       TROUPE_LAYER_RECURRENT = 3, /* no data per token (only a state tensor): no plane */
       /* bytes of a block that only the engine understands: one or two planes. A block moves whole,
          once it is complete or the send is sealed. If a prefix ends inside a block, the whole
          block is written again */
       TROUPE_LAYER_OPAQUE = 4
};

enum {                               /* unit: the piece of an opaque layer */
       TROUPE_OPAQUE_BLOCK_HEAD = 1, /* a head of a block; heads are sharded as in attention */
       TROUPE_OPAQUE_BLOCK = 2       /* a block; both sides have equal parallel sizes */
};

typedef struct troupe_layer_shape {
  uint32_t kind; /* TROUPE_LAYER_... */
  /* of the whole model, before any sharding; 0 unless attention, or opaque by heads */
  uint32_t kv_heads;
  uint32_t head_dim; /* elements of one head of K (and of V), or of the latent; else 0 */
} troupe_layer_shape;

/* Optional properties of a layer. */
typedef struct troupe_layer_details {
  uint32_t size;
  uint32_t value_dim;    /* elements of one head of V if not as K's; 0: `head_dim` */
  uint32_t element_size; /* bytes of one element of `dtype`; 0: its known size */
  uint32_t unit;         /* TROUPE_OPAQUE_...; 0 unless opaque */
  const char* dtype;     /* of this layer only, 1 to 32 bytes; NULL or "": the geometry's */
  /* The engine's name for the format of an opaque layer, 1 to 32 bytes: layers with equal packings
   * are equal byte for byte. NULL or "" unless opaque. */
  const char* packing;
} troupe_layer_details;

/* Where K, V or the latent of one layer lies. The bytes of this rank's head h of token t (0 <= t <
 * block_tokens) of block b begin at base + b * block_stride + t * token_stride + h * head_stride of
 * region `region`. All values are in bytes. In an opaque layer they are the bytes of head h of all
 * tokens of the block, and `token_stride` is 0. */
typedef struct troupe_plane {
  uint32_t region; /* index into the regions that the engine registers */
  uint32_t heads;  /* held by this rank; 1 for a latent and for opaque blocks */
  uint64_t base;
  uint64_t block_stride;
  uint64_t token_stride;
  uint64_t head_stride;
  uint64_t head_bytes; /* head_dim (V: value_dim) * element_size, contiguous; opaque: any */
} troupe_plane;

typedef struct troupe_cache_geometry {
  uint32_t size;
  uint32_t element_size; /* bytes of one element; 0: the known size of `dtype` */
  /* "fp8", "int8", "fp16", "bf16", "fp32", or your own name of 1 to 32 bytes; compared by name */
  const char* dtype;
  uint32_t block_tokens; /* tokens of a block, 1 to 1024 */
  uint32_t blocks;       /* of this rank; the two sides may differ */
  uint32_t tp_rank;
  uint32_t tp_size; /* 0 is taken as 1 */
  /* 32 bytes: the engine's hash of everything that gives bytes their meaning (model, revision,
   * quantisation). Compared if both sides give it; NULL or all zero: not given. */
  const uint8_t* model;
} troupe_cache_geometry;

enum { TROUPE_LAYERS_FIRST = 0, TROUPE_BLOCKS_FIRST = 1, TROUPE_BLOCK_INTERLEAVED = 2 }; /* order */
enum { TROUPE_KV_TOGETHER = 0, TROUPE_KV_SEPARATE = 1 };                                 /* kv */
enum { TROUPE_TOKEN_MAJOR = 0, TROUPE_HEAD_MAJOR = 1 };                                  /* inner */
enum { TROUPE_SINGLE_REGION = 0, TROUPE_REGION_PER_LAYER = 1 }; /* regions */

/* The named arrangements; all 0 is [layer][block][kv][token][head][dim] in one region. */
typedef struct troupe_arrangement {
  uint32_t order;   /* of the dimensions in a region, outermost first */
  uint32_t kv;      /* whether K and V of a layer's block lie in one block or in two */
  uint32_t inner;   /* order inside K or V of a block */
  uint32_t regions; /* one region for everything, or one per layer (layers first only) */
} troupe_arrangement;

enum { TROUPE_STATE_REPLICATED = 1, TROUPE_STATE_SLICED = 2 }; /* sharding */

/* Consecutive bytes of a state's slot with the same sharding. */
typedef struct troupe_state_part {
  uint64_t bytes;    /* that this rank holds of one request */
  uint32_t sharding; /* TROUPE_STATE_... */
  uint32_t reserved;
} troupe_state_part;

/* A tensor with one slot per request, whatever the request's length (Mamba, sliding window). Moved
 * whole, with the last chunk; a request has the same slot number in all state tensors. */
typedef struct troupe_state_tensor {
  uint32_t size;
  uint32_t sharding; /* TROUPE_STATE_..., of the whole slot; ignored with `parts` */
  /* 1 to 64 bytes; the two sides match tensors by position and name. If a side holds only part of
   * the model's layers, by name alone: a name then means one state of the whole model. */
  const char* name;
  uint32_t region;
  uint32_t slots;
  uint64_t base;
  uint64_t slot_stride;
  uint64_t slot_bytes; /* that this rank holds of one request */
  /* The slot's parts, in order, if it is sliced part by part ([x, B, C] of a convolution) or has
   * replicated and sliced parts: `slot_bytes` in all. At most 64. */
  const troupe_state_part* parts;
  uint32_t part_count;
  uint32_t reserved;
} troupe_state_tensor;

/* One head of K, of V or of the latent at one token of a request. */
typedef struct troupe_cache_place {
  uint32_t layer;
  uint32_t plane; /* attention: 0 is K, 1 is V; MLA: 0; opaque: in the order added */
  uint32_t token; /* of the request */
  uint32_t head;  /* among the heads that this rank holds */
} troupe_cache_place;

typedef struct troupe_region_bytes {
  uint32_t region;
  uint32_t reserved;
  uint64_t offset; /* from the start of the region */
  uint64_t length;
} troupe_region_bytes;

/* The layout of a named arrangement, packed without padding. `how` NULL: all 0.
 * TROUPE_INVALID_CONFIG (naming the field; or a layer is opaque, whose planes only the engine
 * knows). Free with `troupe_layout_free`. */
TROUPE_API troupe_status troupe_layout_make(const troupe_cache_geometry* geometry,
                                            const troupe_layer_shape* layers, size_t layer_count,
                                            const troupe_arrangement* how, troupe_layout** layout);
/* As `troupe_layout_make`, with details: an array of `layer_count` pointers, NULL for a layer
 * without details. `details` NULL: no layer has details. */
TROUPE_API troupe_status troupe_layout_make_with(const troupe_cache_geometry* geometry,
                                                 const troupe_layer_shape* layers,
                                                 const troupe_layer_details* const* details,
                                                 size_t layer_count, const troupe_arrangement* how,
                                                 troupe_layout** layout);
/* A layout without layers, for arrangements that have no name: add every layer with its planes,
 * then the state tensors, and call `troupe_layout_check`. */
TROUPE_API troupe_status troupe_layout_new(const troupe_cache_geometry* geometry,
                                           troupe_layout** layout);
TROUPE_API troupe_status troupe_layout_add_layer(troupe_layout* layout,
                                                 const troupe_layer_shape* shape,
                                                 const troupe_plane* planes, size_t plane_count);
/* As `troupe_layout_add_layer`, with details, which an opaque layer needs. `details` NULL: none. */
TROUPE_API troupe_status troupe_layout_add_layer_with(troupe_layout* layout,
                                                      const troupe_layer_shape* shape,
                                                      const troupe_layer_details* details,
                                                      const troupe_plane* planes,
                                                      size_t plane_count);
TROUPE_API troupe_status troupe_layout_add_state(troupe_layout* layout,
                                                 const troupe_state_tensor* state);
/* Groups layers that have a block table of their own in each request, because they keep other
 * tokens than the other layers (sliding windows) or have another number of tokens in a block
 * (`block_tokens`; 0: the geometry's). The layer numbers ascend. Once there is a group, each layer
 * with planes must be in exactly one. Planes of different groups may overlap: a block then belongs
 * to one group at a time. */
TROUPE_API troupe_status troupe_layout_add_group(troupe_layout* layout, const uint32_t* layers,
                                                 size_t layer_count, uint32_t block_tokens);
/* For a rank of a pipeline: its layers are [first_layer, first_layer + their count) of the model's
 * `total_layers`. Layer numbers in this layout count from its own first layer; its groups and state
 * tensors cover its own layers only, and a group may have none (`layers` NULL, 0). `total_layers`
 * 0, with `first_layer` 0: this rank has all layers of the model, as if this were never called. A
 * rank with all layers whose peers are parts of a pipeline passes 0 and the layer count: see
 * `troupe_layout_fingerprint`. Of P parts of T tensor-parallel ranks, tensor-parallel rank t of
 * part p is rank p * T + t of its replica. */
TROUPE_API troupe_status troupe_layout_set_part(troupe_layout* layout, uint32_t first_layer,
                                                uint32_t total_layers);
/* Checks the layout: every number is within its limits, strides nest, no address wraps. */
TROUPE_API troupe_status troupe_layout_check(const troupe_layout* layout);
/* `troupe_layout_check`, and also: every byte lies in its region (`region_sizes[i]` bytes for
 * region i), no two planes of one group overlap, and no state overlaps anything.
 * TROUPE_OUT_OF_RANGE or TROUPE_INVALID_CONFIG naming layer and plane. */
TROUPE_API troupe_status troupe_layout_validate(const troupe_layout* layout,
                                                const uint64_t* region_sizes, size_t count);
/* Whether the caches of the two sides can be mapped onto each other; for two parts of a model, the
 * layers that both hold. TROUPE_LAYOUT_MISMATCH naming field and values. */
TROUPE_API troupe_status troupe_layout_compatible(const troupe_layout* local,
                                                  const troupe_layout* remote);
/* The layout's geometry. `dtype` and `model` (NULL: not given) in `geometry` belong to the
 * layout. */
TROUPE_API troupe_status troupe_layout_geometry(const troupe_layout* layout,
                                                troupe_cache_geometry* geometry);
TROUPE_API troupe_status troupe_layout_layer_count(const troupe_layout* layout, uint32_t* count);
/* The numbers that `troupe_layout_set_part` set, else 0. */
TROUPE_API troupe_status troupe_layout_part(const troupe_layout* layout, uint32_t* first_layer,
                                            uint32_t* total_layers);
/* A layer and up to `capacity` of its planes; `plane_count` says how many it has. */
TROUPE_API troupe_status troupe_layout_layer(const troupe_layout* layout, uint32_t layer,
                                             troupe_layer_shape* shape, troupe_plane* planes,
                                             size_t capacity, size_t* plane_count);
/* The layer's details; a detail that was not given is 0 or "". The texts belong to the layout and
 * are valid until a layer is added to it. */
TROUPE_API troupe_status troupe_layout_layer_details(const troupe_layout* layout, uint32_t layer,
                                                     troupe_layer_details* details);
TROUPE_API troupe_status troupe_layout_group_count(const troupe_layout* layout, uint32_t* count);
/* Up to `capacity` of a group's layers, and how many tokens its blocks hold; `layer_count` says how
 * many layers it has. */
TROUPE_API troupe_status troupe_layout_group(const troupe_layout* layout, uint32_t group,
                                             uint32_t* layers, size_t capacity, size_t* layer_count,
                                             uint32_t* block_tokens);
/* The smallest size of each region that the layout fits into: up to `capacity` of them; `count`
 * says how many there are. The layout is checked first. */
TROUPE_API troupe_status troupe_layout_region_sizes(const troupe_layout* layout, uint64_t* sizes,
                                                    size_t capacity, size_t* count);
/* Where `place` lies, for a request whose token t is token t % block_tokens of blocks[t /
 * block_tokens]. In an opaque layer: the head's part of the token's whole block. With groups,
 * `blocks` is the table of the layer's group; if that table begins at a later token, count `token`
 * from there. */
TROUPE_API troupe_status troupe_layout_locate(const troupe_layout* layout, const uint32_t* blocks,
                                              size_t block_count, const troupe_cache_place* place,
                                              troupe_region_bytes* bytes);
/* Encodes the layout as versioned bytes, equal on every machine. Free the bytes with
 * `troupe_free`. */
TROUPE_API troupe_status troupe_layout_encode(const troupe_layout* layout, void** bytes,
                                              size_t* byte_count);
/* Decodes an encoded layout. The bytes may come from an untrusted source. */
TROUPE_API troupe_status troupe_layout_decode(const void* bytes, size_t byte_count,
                                              troupe_layout** layout);
/* A 16-byte digest of what `troupe_layout_compatible` compares, equal on every machine. Layouts
 * with equal fingerprints are compatible; strides, regions and blocks may differ, and one of them
 * may not give its model. With `total_layers`, the fingerprint covers what all parts of the model
 * have in common, since no rank knows the layers of the others: give the model's hash, too. The
 * layout is checked first. */
TROUPE_API troupe_status troupe_layout_fingerprint(const troupe_layout* layout,
                                                   uint8_t* fingerprint);
TROUPE_API void troupe_layout_free(troupe_layout* layout);

/* -- an engine: one node of the deployment in this process */

typedef struct troupe_engine troupe_engine;
/* An operation that an engine started and whose outcome it will get. Unique within one engine,
 * never 0. */
typedef uint64_t troupe_operation;

typedef struct troupe_memory {
  void* data; /* of the host or of a GPU of this process */
  size_t size;
} troupe_memory;

enum {
  TROUPE_POLLING = 1u << 0, /* no progress thread: call `troupe_engine_poll` often */
  TROUPE_CALLS = 1u << 1,   /* calls of frontends come as events; else they are refused */
  TROUPE_WATCH = 1u << 2    /* TROUPE_EVENT_MEMBER for members of the cluster that come and go */
};

enum { TROUPE_NO_ALLOCATION = 0, TROUPE_ALLOCATE = 1, TROUPE_ALLOCATE_HUGE = 2 }; /* allocate */

/* Identifies a node of an open stage outside of Troupe: an engine's id, the address of its HTTP
 * server. */
typedef struct troupe_label {
  const char* key;   /* 1 to 64 bytes */
  const char* value; /* at most 256 bytes */
} troupe_label;

/* How a node that no file names joins an open stage of the deployment. */
typedef struct troupe_announcement {
  uint32_t size;
  uint32_t label_count; /* at most 16 */
  const char* stage;    /* an open stage */
  const char* replica; /* the engine's own id, 1 to 64 of a-z 0-9 _ -; all its ranks say the same */
  uint32_t rank;       /* within the replica, over all its parts (`troupe_layout_set_part`) */
  uint32_t ranks;      /* of the replica; 0 is taken as 1 */
  const troupe_label* labels; /* found by `troupe_cluster_find_label`; not used otherwise */
} troupe_announcement;

typedef struct troupe_engine_options {
  uint32_t size;
  uint32_t flags;              /* TROUPE_POLLING, TROUPE_CALLS, TROUPE_WATCH */
  const char* deployment_file; /* this or `deployment_text`, not both */
  const char* deployment_text; /* YAML, as troupe.yaml(5) says */
  const char* node;            /* its name there, such as "prefill-0"; none with `join` */
  const char* supervisor_host; /* in place of the deployment's; NULL: as it says */
  uint32_t supervisor_port;    /* in place of the deployment's; 0: as it says */
  /* For `layout`, below: TROUPE_NO_ALLOCATION; ordinary pages; huge pages if enough are free. */
  uint32_t allocate;
  /* The engine's own cache instead of one made from the deployment's `model` and `pool`: there is
   * no pool then, and the engine names the blocks in `send` and `receive`. Either the engine brings
   * the memory as `regions`, in the layout's order, each at least as large as
   * `troupe_layout_region_sizes` says, and keeps it alive and mapped until `troupe_engine_stop` has
   * returned; or Troupe allocates it (`allocate`), zeroed, and `troupe_engine_region` returns
   * it. */
  const troupe_layout* layout;
  const troupe_memory* regions;
  size_t region_count;
  /* For `allocate`: 1 + the number of the NUMA node that the pages are on; 0: any. */
  uint32_t numa_node_plus_1;
  uint32_t reserved;
  /* Cores that the node's threads run on; none: those of the calling thread. TROUPE_INVALID_CONFIG
   * if the process may not use one of them. */
  const uint32_t* cores;
  size_t core_count;
  /* The node joins an open stage, as STAGE.REPLICA.RANK; `node` is then NULL or "". An engine with
   * a cache brings its own `layout`, with the same rank; placements pair it with replicas of equal
   * layouts. NULL: the deployment names the node. */
  const troupe_announcement* join;
} troupe_engine_options;

/* Starts a node: binds its port, adopts or allocates the cache, registers with the supervisor in
 * the background. TROUPE_NOT_FOUND (no such node), TROUPE_INVALID_CONFIG (the deployment: every
 * issue with its line; options that contradict each other), TROUPE_LAYOUT_MISMATCH,
 * TROUPE_OUT_OF_RANGE (a region too small), TROUPE_POOL_EXHAUSTED (not enough memory),
 * TROUPE_ALREADY_EXISTS (the port is taken), TROUPE_PEER_UNREACHABLE. If the supervisor refuses a
 * joining node, `troupe_engine_wait_registered` says why. If the deployment says `supervisor:
 * {begin: true}` and `options` gives no other address for it, this call finds the supervisor, or
 * begins one if none lives, within 15 s: TROUPE_NOT_FOUND without a `troupe` command to begin it
 * with (TROUPE_COMMAND in the environment names one), TROUPE_PEER_UNREACHABLE or TROUPE_DEADLINE
 * with the end of its log. */
TROUPE_API troupe_status troupe_engine_start(const troupe_engine_options* options,
                                             troupe_engine** engine);
/* Waits until the supervisor has registered the node. TROUPE_DEADLINE naming the last reason: the
 * node goes on trying. TROUPE_STALE_INCARNATION: another process has this node's name, and this
 * process will never be registered again. */
TROUPE_API troupe_status troupe_engine_wait_registered(troupe_engine* engine, uint64_t timeout_ms);
/* Leaves the cluster: live operations fail with TROUPE_ABORTED at both sides. Other threads may be
 * in calls: operations that they begin are refused or end with TROUPE_ABORTED. A second call does
 * nothing. Events that happened can still be taken, except those of members. */
TROUPE_API troupe_status troupe_engine_stop(troupe_engine* engine);
/* Stops and frees the engine. Details that came from it may be kept and read for longer. */
TROUPE_API void troupe_engine_free(troupe_engine* engine);

typedef struct troupe_identity {
  uint32_t size;
  uint32_t pid;
  uint64_t incarnation; /* of this life of the node, never 0 */
  uint64_t epoch;       /* of the newest membership that the node has; 0: none yet */
  uint32_t replica;     /* assigned by the supervisor */
  uint32_t rank;
  uint32_t ranks; /* of the replica */
  uint32_t port;  /* the cluster port that was bound */
  /* Of the supervisor that registered the node last, for `placed_by` of a receive; 0: none yet. */
  uint64_t supervisor_incarnation;
} troupe_identity;

TROUPE_API troupe_status troupe_engine_identity(const troupe_engine* engine,
                                                troupe_identity* identity);
/* A copy of the cache's layout. Free with `troupe_layout_free`. */
TROUPE_API troupe_status troupe_engine_layout(const troupe_engine* engine, troupe_layout** layout);
/* Memory of the layout's region `index`. Memory that Troupe allocated belongs to Troupe: readable
 * and writable until `troupe_engine_free`, even after `troupe_engine_stop`. TROUPE_OUT_OF_RANGE. */
TROUPE_API troupe_status troupe_engine_region(const troupe_engine* engine, uint32_t index,
                                              troupe_memory* memory);
/* Allocates `count` blocks from the node's pool. `blocks` has room for `count`; `owner` proves the
 * allocation when they are freed. TROUPE_POOL_EXHAUSTED; TROUPE_INVALID_CONFIG (the engine brought
 * its own layout). */
TROUPE_API troupe_status troupe_engine_allocate_blocks(troupe_engine* engine, uint32_t count,
                                                       uint64_t* owner, uint32_t* blocks);
/* Frees blocks of one allocation. TROUPE_NOT_FOUND (foreign or double free: nothing is freed). */
TROUPE_API troupe_status troupe_engine_free_blocks(troupe_engine* engine, uint64_t owner,
                                                   const uint32_t* blocks, size_t count);

/* -- placements: where a request goes */

typedef struct troupe_placement troupe_placement;

enum { TROUPE_MODE_DEFAULT = 0, TROUPE_MODE_WRITE = 1, TROUPE_MODE_READ = 2 }; /* mode */
enum { TROUPE_PREFILL = 0, TROUPE_DECODE = 1 };                                /* side */

typedef struct troupe_placement_request {
  uint32_t size;
  uint32_t timeout_ms; /* how long to wait while no replica is up; 0: fail at once */
  const char* request; /* id, for logs and affinity; 1 to 256 bytes */
  const char* from;    /* stage; NULL: the deployment's only edge */
  const char* to;
  /* Requests with the same affinity go to the same replicas; NULL: as the policy says. */
  const char* affinity;
  /* If not empty, this places the same request again, because it lost these nodes of its earlier
   * placement. Their replicas are avoided while others are up; a replica that lost no node is kept.
   * Counts against the deployment's limits.retry_budget: beyond it the answer is
   * TROUPE_PEER_LOST. */
  const char* const* failed;
  uint32_t failed_count;
  /* 1, with `failed`: the prefill replica holds the sealed cache and is placed on again while it is
   * up in the same life (`same_source` of the placement). */
  uint32_t keep_source;
} troupe_placement_request;

typedef struct troupe_placement_info {
  uint32_t size;
  uint32_t mode;                   /* TROUPE_MODE_WRITE or TROUPE_MODE_READ */
  const char* request;             /* belongs to the placement */
  uint64_t supervisor_incarnation; /* `placed_by` of a receive */
  uint64_t epoch;                  /* `placed_at` of a receive */
  uint32_t attempt;                /* number of this attempt, from 1 */
  uint32_t prefill_count;          /* ranks of the chosen replicas */
  uint32_t decode_count;
  uint32_t same_source; /* 1: the prefill replica of the attempt before, in the same life */
  /* Of the layout of both replicas, if a stage is open; else all 0. */
  uint8_t fingerprint[16];
} troupe_placement_info;

/* A node of a placement or of a list of members. The texts belong to that placement or list. */
typedef struct troupe_node_info {
  uint32_t size;
  uint32_t port;
  const char* name;
  const char* stage;
  const char* host;
  uint64_t incarnation;
  uint32_t replica;
  uint32_t rank;
  uint32_t ranks;
  uint32_t pid;
  /* For a node of an open stage; if a file names the node: "", all 0, and none. */
  const char* replica_name; /* the engine's own id */
  uint8_t fingerprint[16];  /* of its layout; all 0: no layout */
  const troupe_label* labels;
  uint32_t label_count;
  uint32_t reserved;
} troupe_node_info;

TROUPE_API troupe_status troupe_placement_read(const troupe_placement* placement,
                                               troupe_placement_info* info);
/* Node `index`, in rank order, of the prefill or the decode replica. */
TROUPE_API troupe_status troupe_placement_node(const troupe_placement* placement, uint32_t side,
                                               uint32_t index, troupe_node_info* node);
TROUPE_API void troupe_placement_free(troupe_placement* placement);

/* -- transfers. Each operation has exactly one outcome, which comes as an event or to
 * `troupe_engine_wait`. */

enum { /* flags of a send */
       /* `blocks` is only the beginning: `troupe_engine_add_blocks` names the rest */
       TROUPE_GROWS = 1u << 0,
       TROUPE_TELL_WANTED = 1u << 1 /* TROUPE_EVENT_WANTED for each decode rank that asks */
};

/* The blocks of a request for one group of the layout's layers. */
typedef struct troupe_group_blocks {
  /* The first token of the first block: a multiple of the group's block_tokens. Earlier tokens are
   * not held (a window has moved on), and nothing of them moves for these layers. */
  uint32_t first_token;
  uint32_t reserved;
  const uint32_t* blocks;
  size_t block_count;
} troupe_group_blocks;

typedef struct troupe_send_spec {
  uint32_t size;
  uint32_t state_slot;    /* of the request, if the layout has state tensors */
  const char* request;    /* the id that both engines know, 1 to 256 bytes, unique while live */
  const uint32_t* blocks; /* of tokens 0, 1, ...: block_tokens tokens each */
  size_t block_count;
  uint64_t deadline_ms; /* 0: the deployment's default */
  /* Decode ranks that take the cache before the send is done; 0: all of the replica of the first
   * one. */
  uint32_t consumers;
  uint32_t held_for_count;
  const char* const* held_for; /* decode nodes it is for: it does not expire while they queue */
  uint32_t flags;              /* TROUPE_GROWS, TROUPE_TELL_WANTED */
  uint32_t reserved;
  /* If the layout has groups: one entry for each, in their order; `blocks` is then NULL. */
  const troupe_group_blocks* groups;
  uint32_t group_count;
  uint32_t reserved_2;
} troupe_send_spec;

enum {                        /* flags of a receive */
       TROUPE_PARK = 1u << 0, /* `park_ms` counts, also 0 */
       /* The request was sent again: an earlier successful receive does not answer this one, but an
        * earlier failed send does. */
       TROUPE_AGAIN = 1u << 1
};

typedef struct troupe_receive_spec {
  uint32_t size;
  uint32_t state_slot;
  const char* request; /* NULL: the one of `placement` */
  /* Gives sources, mode, placed_by and placed_at; NULL: the fields below do. */
  const troupe_placement* placement;
  const char* const* sources; /* node names of every rank of the prefill replica, each once */
  uint32_t source_count;
  uint32_t mode;          /* TROUPE_MODE_...; default: write */
  uint32_t tokens;        /* of the prompt; at most what `blocks` hold */
  uint32_t prefix_tokens; /* leading tokens already in `blocks`; see TROUPE_LAYER_OPAQUE */
  /* Destination of tokens 0, 1, ...; none: the pool allocates (TROUPE_EVENT_ALLOCATED). */
  const uint32_t* blocks;
  size_t block_count;
  uint64_t deadline_ms; /* 0: the deployment's default */
  /* `supervisor_incarnation` and `epoch` of the placement followed, or 0 and 0. */
  uint64_t placed_by;
  uint64_t placed_at;
  uint32_t fail_when_full; /* 1: TROUPE_POOL_EXHAUSTED at once instead of waiting in line */
  uint32_t reserved;
  /* Incarnation of each source as the caller knows it, `source_count` of them; NULL, or a 0 among
   * them: any incarnation. A source in another life has lost the cache:
   * TROUPE_STALE_INCARNATION. */
  const uint64_t* lives;
  /* With TROUPE_PARK: how long a source that does not know the request yet keeps the receive,
   * before it answers TROUPE_NOT_FOUND. Without: until the deadline. */
  uint64_t park_ms;
  /* What the sealed `aux` of each source must begin with, at most 64 bytes (a hash of the prompt,
   * say). Else TROUPE_LAYOUT_MISMATCH, in read mode before a byte moves. */
  const void* expect;
  size_t expect_size;
  uint32_t flags; /* TROUPE_PARK, TROUPE_AGAIN */
  uint32_t reserved_2;
  /* As in a send. Tokens before the first token of a group are not wanted. */
  const troupe_group_blocks* groups;
  uint32_t group_count;
  uint32_t reserved_3;
} troupe_receive_spec;

/* A point in the work of a GPU: an event (cudaEvent_t, hipEvent_t) recorded after that work. */
typedef struct troupe_compute_point {
  uint32_t size;
  uint32_t gpu; /* the event's GPU, as cudaGetDevice counts in this process */
  void* event;  /* of this process; or NULL, with `shared` */
  /* The 64-byte IPC handle of an event of another process on this host. */
  const void* shared;
} troupe_compute_point;

typedef struct troupe_compute_stream {
  uint32_t size;
  uint32_t gpu;
  void* stream; /* cudaStream_t, hipStream_t; NULL: the GPU's default stream */
} troupe_compute_stream;

/* Prefill side: offers the cache of a request to the decode ranks that ask for it.
 * TROUPE_ALREADY_EXISTS (the request is live here), TROUPE_OUT_OF_RANGE (a block outside the
 * cache), TROUPE_NOT_FOUND (a node of `held_for`), TROUPE_OVERLOADED (limits.max_operations are
 * open: take events). */
TROUPE_API troupe_status troupe_engine_send(troupe_engine* engine, const troupe_send_spec* spec,
                                            troupe_operation* operation);
/* Adds the blocks of the next tokens to a send with TROUPE_GROWS. Layers can be ready, and the
 * request sealed, only as far as its blocks reach. TROUPE_NOT_FOUND (ended), TROUPE_ALREADY_EXISTS
 * (sealed), TROUPE_INVALID_CONFIG (the send does not grow), TROUPE_OUT_OF_RANGE (a block outside
 * the cache; none is added). */
TROUPE_API troupe_status troupe_engine_add_blocks(troupe_engine* engine, troupe_operation send,
                                                  const uint32_t* blocks, size_t block_count);
/* As `troupe_engine_add_blocks`, for one group of the layout's layers. */
TROUPE_API troupe_status troupe_engine_add_group_blocks(troupe_engine* engine,
                                                        troupe_operation send, uint32_t group,
                                                        const uint32_t* blocks, size_t block_count);
/* Layers [layer_begin, layer_end) are computed up to token `token_end` and will not be written
 * again; call it once per chunk. With `computed`, they are computed once the GPU reaches that
 * point; the call does not wait for it, and the event may be recorded again when the call returns.
 * NULL: they are computed now. TROUPE_NOT_FOUND (ended), TROUPE_OUT_OF_RANGE; with `computed`
 * TROUPE_NO_DEVICE, TROUPE_INVALID_CONFIG. */
TROUPE_API troupe_status troupe_engine_layers_ready(troupe_engine* engine, troupe_operation send,
                                                    uint32_t layer_begin, uint32_t layer_end,
                                                    uint32_t token_end,
                                                    const troupe_compute_point* computed);
/* Completes a send: the request has `tokens` tokens, and every layer is ready up to there. `aux`:
 * at most 64 KiB for the decode engine; NULL and 0: nothing. */
TROUPE_API troupe_status troupe_engine_seal(troupe_engine* engine, troupe_operation send,
                                            uint32_t tokens, const void* aux, size_t aux_size);
/* Decode side: takes the cache of a request from the ranks of one prefill replica.
 * TROUPE_OVERLOADED, TROUPE_POOL_EXHAUSTED, TROUPE_OUT_OF_RANGE, TROUPE_NOT_FOUND (a source is not
 * a node), TROUPE_INVALID_CONFIG (the sources are not the ranks of one replica, each once; not a
 * life for each; a block is named twice). */
TROUPE_API troupe_status troupe_engine_receive(troupe_engine* engine,
                                               const troupe_receive_spec* spec,
                                               troupe_operation* operation);
/* The sources of a request, without a receive. */
typedef struct troupe_sources {
  uint32_t size;
  uint32_t source_count;
  const char* request;        /* 1 to 256 bytes */
  const char* const* sources; /* node names of every rank of the prefill replica, each once */
  const uint64_t* lives;      /* as in a receive */
} troupe_sources;

/* Decode side: gives up a request before it is received, and frees its sources. Costs no block, may
 * come before the request is sent, and may be repeated. Outcome: done once each source has ended
 * (its engine gets TROUPE_ABORTED) or had ended before. If the request was never sent, its next
 * send ends in this way, and so do receives until then. TROUPE_ALREADY_EXISTS as an outcome: the
 * source goes on, since another node takes the request, waits for it, or is named in its
 * `held_for`. TROUPE_STALE_INCARNATION as an outcome: a source is in another life.
 * TROUPE_INVALID_CONFIG, TROUPE_NOT_FOUND (a source is not a node). */
TROUPE_API troupe_status troupe_engine_release(troupe_engine* engine, const troupe_sources* of,
                                               troupe_operation* operation);
/* Decode side: keeps the leases of a request's sources alive while the request waits in the
 * engine's own queue. Outcome: done once a receive of the request has asked all of them, or if the
 * request was delivered meanwhile; else that of the first source that failed, or of
 * `troupe_engine_abort`. TROUPE_NOT_FOUND as an outcome: a source does not offer the request. Ends
 * with the life of either node. TROUPE_ALREADY_EXISTS (this node holds it already), and the errors
 * of `troupe_engine_release`. */
TROUPE_API troupe_status troupe_engine_hold(troupe_engine* engine, const troupe_sources* of,
                                            troupe_operation* operation);
/* Decode side, on a GPU: work given to `stream` from here on waits, on the GPU, until these layers
 * have arrived. The stream goes on with the receive's outcome at the latest. For a receive that is
 * done nothing waits; for a failed receive the call returns the receive's own error.
 * TROUPE_NOT_FOUND (no receive, or it ended long ago), TROUPE_OUT_OF_RANGE, TROUPE_NO_DEVICE,
 * TROUPE_INVALID_CONFIG, TROUPE_BACKEND_UNAVAILABLE, TROUPE_OVERLOADED. */
TROUPE_API troupe_status troupe_engine_await_layers(troupe_engine* engine, troupe_operation receive,
                                                    uint32_t layer_begin, uint32_t layer_end,
                                                    uint32_t token_end,
                                                    const troupe_compute_stream* stream);
/* Aborts an operation; its one outcome still comes. TROUPE_NOT_FOUND: it has ended. `reason` NULL:
 * "". */
TROUPE_API troupe_status troupe_engine_abort(troupe_engine* engine, troupe_operation operation,
                                             const char* reason);

/* -- keyed values */

/* Stores a copy of a value at node `peer` (which may be this one). `value` must not change until
 * the outcome; after it, Troupe does not read `value`. A value in GPU memory must be computed
 * before the call, which copies it before it returns. Blocks of the node's pool may be freed at
 * once. ttl 0: until removed. Outcome: done, TROUPE_ALREADY_EXISTS, TROUPE_POOL_EXHAUSTED.
 * TROUPE_NOT_FOUND: no such node, or a block that `value` lies in is not allocated. Keys have 1 to
 * 512 bytes. */
TROUPE_API troupe_status troupe_engine_put(troupe_engine* engine, const char* peer, const char* key,
                                           const void* value, size_t value_size, uint64_t ttl_ms,
                                           troupe_operation* operation);
/* Outcome: TROUPE_EVENT_VALUE, or TROUPE_NOT_FOUND. The bytes are mapped in place and stay valid
 * until the detail is freed. */
TROUPE_API troupe_status troupe_engine_get(troupe_engine* engine, const char* peer, const char* key,
                                           troupe_operation* operation);
/* Whether the key has a value: outcome TROUPE_EVENT_INFO, or TROUPE_NOT_FOUND. */
TROUPE_API troupe_status troupe_engine_query(troupe_engine* engine, const char* peer,
                                             const char* key, troupe_operation* operation);
/* Outcome: done, or TROUPE_NOT_FOUND. */
TROUPE_API troupe_status troupe_engine_remove(troupe_engine* engine, const char* peer,
                                              const char* key, troupe_operation* operation);

/* -- the cluster, as an engine sees it */

/* Asks the supervisor where a request goes. Outcome: TROUPE_EVENT_PLACED. */
TROUPE_API troupe_status troupe_engine_place(troupe_engine* engine,
                                             const troupe_placement_request* request,
                                             troupe_operation* operation);
/* Reports that a placed request ended, with or without success: its place in the queue is free. */
TROUPE_API troupe_status troupe_engine_placed_request_ended(troupe_engine* engine,
                                                            const char* request);
/* Sets the number that each heartbeat reports: requests that wait or run in the engine. */
TROUPE_API troupe_status troupe_engine_set_queue_length(troupe_engine* engine, uint32_t requests);

enum {
  TROUPE_SERVING = 0,  /* also after an operator cancelled a drain */
  TROUPE_DRAINING = 1, /* no new request is placed here; the present ones go on */
  TROUPE_DRAINED = 2 /* all have ended, or the drain's deadline passed: stop the engine and end the
                        process */
};
/* Whether the cluster drains the node (`troupe drain`). Call it at least once a second. */
TROUPE_API troupe_status troupe_engine_draining(const troupe_engine* engine, uint32_t* standing);
/* Reports that the engine can serve no request (its GPU is lost, say): the cluster treats the node
 * as down, with this reason, until `troupe_engine_recover`. */
TROUPE_API troupe_status troupe_engine_report_failure(troupe_engine* engine, const char* why);
TROUPE_API troupe_status troupe_engine_recover(troupe_engine* engine);
/* What the node owns and does, as one JSON object, like a node in `troupe status --json`. Free with
 * `troupe_free`. */
TROUPE_API troupe_status troupe_engine_report(const troupe_engine* engine, char** json);

/* -- events */

/* The variable part of an event. The caller owns it: free each with `troupe_detail_free`, or all of
 * a batch with `troupe_events_free`. */
typedef struct troupe_detail troupe_detail;

enum {
  TROUPE_EVENT_NONE = 0,
  /* receive: the pool allocated blocks; `troupe_detail_blocks`, to be freed by the engine */
  TROUPE_EVENT_ALLOCATED = 1,
  TROUPE_EVENT_LAYERS = 2, /* receive: u.layers have arrived from all their sources and may be
                              read */
  /* the one outcome: it succeeded. u.done; aux of a receive: `troupe_detail_bytes` */
  TROUPE_EVENT_DONE = 3,
  TROUPE_EVENT_FAILED = 4, /* the one outcome: it failed. `code`, and `troupe_detail_reason` */
  /* after the outcome of a send or receive: the network no longer touches its blocks; an engine
     that allocates blocks itself may reuse them from here on, not before */
  TROUPE_EVENT_UNPINNED = 5,
  TROUPE_EVENT_VALUE = 6,  /* outcome of a get: u.value, `troupe_detail_bytes` */
  TROUPE_EVENT_INFO = 7,   /* outcome of a query: u.info */
  TROUPE_EVENT_PLACED = 8, /* outcome of a place: `troupe_detail_placement` */
  /* of no operation: a frontend calls. `troupe_detail_method`, `troupe_detail_bytes`; answer once
     by `troupe_engine_reply(engine, u.call.id, ...)` */
  TROUPE_EVENT_CALL = 9,
  /* send with TROUPE_TELL_WANTED: a decode rank asks for it. u.wanted, `troupe_detail_node` */
  TROUPE_EVENT_WANTED = 10,
  /* of no operation, with TROUPE_WATCH: another node of the cluster has come, changed its state, or
     is gone. u.member; `troupe_detail_node`, `troupe_detail_stage`, `troupe_detail_reason`,
     `troupe_detail_labels`. Events come per incarnation of a node: the first one, in whatever
     state, says that the incarnation is there; the last one, TROUPE_GONE, comes exactly once,
     before the next incarnation. While no events are taken, intermediate states are merged. If the
     cluster lost an incarnation and takes it in again, it is reported as there again. */
  TROUPE_EVENT_MEMBER = 11
};

typedef struct troupe_event {
  uint32_t kind;              /* TROUPE_EVENT_...; ignore unknown kinds, but free their details */
  troupe_status code;         /* TROUPE_OK unless failed */
  troupe_operation operation; /* 0: of none */
  union {
    struct {
      uint32_t layer_begin, layer_end, token_begin, token_end;
    } layers;
    struct {
      uint64_t bytes; /* bytes moved: receive, and send in write mode */
      uint64_t aux_size;
      /* Send and receive, as in `troupe_outcome`; UINT32_MAX: that many or more. */
      uint32_t waited_us, moving_us, segments;
      char backend[4]; /* NUL after a name of fewer than four letters */
    } done;
    struct {
      uint64_t size;
    } value;
    struct {
      uint64_t size;
      uint64_t ttl_ms; /* 0: no end */
    } info;
    struct {
      uint64_t owner; /* for `troupe_engine_free_blocks` */
      uint64_t count;
    } allocated;
    struct {
      uint64_t id;
    } call;
    struct {
      uint32_t rank, ranks; /* of the decode replica */
      uint32_t expected;    /* decode ranks that the send will serve in all */
      uint32_t token_begin; /* the decode side already has the tokens before it */
      uint32_t token_end;
    } wanted;
    struct {
      uint64_t incarnation;
      uint32_t state;   /* TROUPE_JOINING, ... TROUPE_GONE */
      uint32_t replica; /* its number in the stage; in an open stage per supervisor */
      uint32_t rank;    /* within the replica */
      uint32_t label_count;
    } member;
    uint64_t reserved[4];
  } u;
  troupe_detail* detail; /* NULL where there is none */
} troupe_event;

/* The outcome of an operation that succeeded. Missing fields are 0. */
typedef struct troupe_outcome {
  uint32_t size;
  uint32_t kind;       /* TROUPE_EVENT_VALUE (get), _PLACED (place), or _DONE (all others) */
  uint64_t bytes;      /* bytes moved: receive, and send in write mode */
  uint64_t aux_size;   /* receive: `troupe_detail_bytes` */
  uint64_t value_size; /* get (`troupe_detail_bytes`) and query */
  uint64_t ttl_ms;     /* query; 0: no end */
  uint64_t owner;      /* receive without blocks of its own: `troupe_detail_blocks` */
  uint64_t block_count;
  troupe_detail* detail; /* NULL where there is none; free with `troupe_detail_free` */
  /* Send and receive: time from the engine's call to the first byte; from there to the last byte;
   * the number of pieces, at the side that plans them (send in write mode, receive in read
   * mode). */
  uint64_t waited_us;
  uint64_t moving_us;
  uint64_t segments;
  char backend[8]; /* send and receive: of the link to the first rank, "shm"; NUL-terminated */
} troupe_outcome;

/* A descriptor, readable while events wait, for poll, epoll, select; level-triggered. It belongs to
 * the engine: never read or close it. It stays until `troupe_engine_free`. */
TROUPE_API troupe_status troupe_engine_event_fd(const troupe_engine* engine, int* fd);
/* Takes up to `capacity` events, oldest first, into `events`, an array of `event_size` =
 * sizeof(troupe_event) each; `count` says how many. Waits up to `timeout_ms` for the first one; 0:
 * does not wait. No event in that time is TROUPE_OK with count 0. Events of one operation come in
 * order, events of members before events of operations. Events of an operation that a thread waits
 * for go to that thread. */
TROUPE_API troupe_status troupe_engine_take(troupe_engine* engine, troupe_event* events,
                                            size_t event_size, size_t capacity, uint64_t timeout_ms,
                                            size_t* count);
/* Waits until the operation has ended and, for a send or a receive, the network can no longer touch
 * its blocks, but at most `timeout_ms` (UINT64_MAX: no limit): then TROUPE_TIMED_OUT. Takes all of
 * the operation's events. Any number of threads may wait, each for another operation. Errors: that
 * of the operation; TROUPE_NOT_FOUND (never begun, or `troupe_engine_take` had its outcome),
 * TROUPE_ALREADY_EXISTS (another thread waits for it), TROUPE_ABORTED or TROUPE_INTERNAL (the node
 * was stopped and the outcome will not come). `outcome` may be NULL. */
TROUPE_API troupe_status troupe_engine_wait(troupe_engine* engine, troupe_operation operation,
                                            uint64_t timeout_ms, troupe_outcome* outcome);
/* Makes progress on the calling thread; sets `worked` (may be NULL) to 1 if it did something. See
 * TROUPE_POLLING. */
TROUPE_API troupe_status troupe_engine_poll(troupe_engine* engine, uint32_t* worked);

/* Why an operation failed, or why a member is in its state: a NUL-terminated sentence, owned by the
 * detail. "" for anything else, or for NULL. */
TROUPE_API const char* troupe_detail_reason(const troupe_detail* detail);
/* The aux of a receive, the value of a get, the payload of a call, owned by the detail. NULL and 0
 * if there is none. */
TROUPE_API troupe_status troupe_detail_bytes(const troupe_detail* detail, const void** bytes,
                                             size_t* byte_count);
/* The blocks that the pool allocated, owned by the detail. */
TROUPE_API troupe_status troupe_detail_blocks(const troupe_detail* detail, uint64_t* owner,
                                              const uint32_t** blocks, size_t* count);
/* A copy of the placement. Free with `troupe_placement_free`. TROUPE_NOT_FOUND if there is none. */
TROUPE_API troupe_status troupe_detail_placement(const troupe_detail* detail,
                                                 troupe_placement** placement);
/* The method of a call, owned by the detail; "" for anything else. */
TROUPE_API const char* troupe_detail_method(const troupe_detail* detail);
/* The node that wants a send, or that is a member, owned by the detail; "" for anything else. */
TROUPE_API const char* troupe_detail_node(const troupe_detail* detail);
/* The stage of a member, owned by the detail; "" for anything else. */
TROUPE_API const char* troupe_detail_stage(const troupe_detail* detail);
/* The labels that a member announced, owned by the detail. NULL and 0 if there are none. */
TROUPE_API troupe_status troupe_detail_labels(const troupe_detail* detail,
                                              const troupe_label** labels, size_t* count);
TROUPE_API void troupe_detail_free(troupe_detail* detail);
/* Frees the details of `count` events and sets them to NULL. */
TROUPE_API void troupe_events_free(troupe_event* events, size_t event_size, size_t count);

/* Answers a call, once: with a payload of at most 1 MiB (`code` TROUPE_OK), or with an error and
 * its sentence. TROUPE_NOT_FOUND: answered already, or the caller is gone. A call without an answer
 * ends at its caller's deadline, or with TROUPE_ABORTED when the engine stops. */
TROUPE_API troupe_status troupe_engine_reply(troupe_engine* engine, uint64_t call,
                                             troupe_status code, const char* sentence,
                                             const void* payload, size_t payload_size);

/* -- a cluster, as a frontend sees it */

/* Blocking calls, each with a bound on its time. A broken connection is made again by the next
 * call. */
typedef struct troupe_cluster troupe_cluster;

enum { TROUPE_LAZY = 1u << 0 }; /* connects at the first call: the supervisor may not run yet */

typedef struct troupe_cluster_options {
  uint32_t size;
  uint32_t flags;              /* TROUPE_LAZY */
  const char* deployment_file; /* the supervisor's address and credentials */
  /* This, or the file, or neither. With neither only a cluster of mode `none` answers. */
  const char* deployment_text;
  const char* host;    /* of the supervisor, in place of the deployment's; NULL: as it says */
  uint32_t port;       /* likewise; 0: as it says */
  uint32_t timeout_ms; /* of every step that has no deadline of its own; 0: 3000 */
} troupe_cluster_options;

/* Errors of this and every call below: TROUPE_PEER_UNREACHABLE, TROUPE_DEADLINE, TROUPE_PEER_LOST,
 * TROUPE_UNAUTHORIZED, and those that the other side answers with. The supervisor is found, or
 * begun, as in `troupe_engine_start`; once it is gone, the next call does this again, at most once
 * a second. */
TROUPE_API troupe_status troupe_cluster_connect(const troupe_cluster_options* options,
                                                troupe_cluster** cluster);
TROUPE_API void troupe_cluster_free(troupe_cluster* cluster);
/* Every node that registered, its state and newest load, as one JSON object: cluster, epoch,
 * supervisor, and nodes as in `troupe status --json`, without the fields that only the nodes
 * themselves know. Free with `troupe_free`. */
TROUPE_API troupe_status troupe_cluster_members(troupe_cluster* cluster, char** json);

/* A snapshot of members of a cluster. */
typedef struct troupe_members troupe_members;

enum { /* state */
       TROUPE_JOINING = 1,
       TROUPE_UP = 2,
       TROUPE_SUSPECT = 3,
       TROUPE_DOWN = 4, /* in an event: it reported its own failure, and its process lives */
       TROUPE_LEAVING = 5,
       TROUPE_GONE = 6 /* only in an event: it left, was lost, or another life has its name */
};

typedef struct troupe_member_info {
  uint32_t size;
  uint32_t state;        /* TROUPE_JOINING, ... */
  const char* reason;    /* why it is in that state; belongs to the members */
  uint32_t queue_length; /* requests that wait or run in its engine, last reported */
  uint32_t reserved;
} troupe_member_info;

/* The members that are not down and have exactly this label; none is TROUPE_OK with a count of 0.
 * Free with `troupe_members_free`. */
TROUPE_API troupe_status troupe_cluster_find_label(troupe_cluster* cluster, const char* key,
                                                   const char* value, troupe_members** members);
TROUPE_API troupe_status troupe_members_count(const troupe_members* members, uint32_t* count);
TROUPE_API troupe_status troupe_members_read(const troupe_members* members, uint32_t index,
                                             troupe_member_info* info);
TROUPE_API troupe_status troupe_members_node(const troupe_members* members, uint32_t index,
                                             troupe_node_info* node);
TROUPE_API void troupe_members_free(troupe_members* members);

/* What one node owns and does, from that node, as `troupe_engine_report`. TROUPE_NOT_FOUND. */
TROUPE_API troupe_status troupe_cluster_report(troupe_cluster* cluster, const char* node,
                                               char** json);
/* The events of the cluster after number `after` (0: all that are kept), at most `max` of them,
 * oldest first, as one JSON object: supervisor_incarnation, newest, and events with sequence,
 * unix_ms, event, node, incarnation, epoch, reason, as in `troupe events --json`. */
TROUPE_API troupe_status troupe_cluster_events(troupe_cluster* cluster, uint64_t after,
                                               uint32_t max, char** json);
/* Places a request. Free with `troupe_placement_free`; when the request has ended, call
 * `troupe_cluster_finished`. */
TROUPE_API troupe_status troupe_cluster_place(troupe_cluster* cluster,
                                              const troupe_placement_request* request,
                                              troupe_placement** placement);
TROUPE_API troupe_status troupe_cluster_finished(troupe_cluster* cluster, const char* request);
/* Calls the engine of a node: at most 1 MiB each way, answered within `timeout_ms` (0: the
 * cluster's). Free the answer with `troupe_free`. */
TROUPE_API troupe_status troupe_cluster_call(troupe_cluster* cluster, const char* node,
                                             const char* method, const void* payload,
                                             size_t payload_size, uint32_t timeout_ms,
                                             void** answer, size_t* answer_size);
/* Stops placing requests on the node's replica, and lets it leave when its requests have ended, or
 * at the deadline. */
TROUPE_API troupe_status troupe_cluster_drain(troupe_cluster* cluster, const char* node,
                                              uint32_t deadline_ms);
TROUPE_API troupe_status troupe_cluster_cancel_drain(troupe_cluster* cluster, const char* node);

/* -- carrying a request to its one outcome, whatever fails meanwhile */

/* Where a request is placed now. Troupe owns all of it; it is valid only during the callback. */
typedef struct troupe_attempt {
  uint32_t size;
  uint32_t reserved;
  const troupe_placement* where;
  const char* source; /* the request's name for `send` and `receive` at both engines */
  uint64_t left_ms;   /* until the request's deadline */
} troupe_attempt;

typedef struct troupe_call_draft troupe_call_draft;
/* Sets the call to the callback's node. Copies its arguments. Only valid within the callback. */
TROUPE_API troupe_status troupe_call_draft_set(troupe_call_draft* draft, const char* method,
                                               const void* payload, size_t payload_size);

/* Called once for each rank, on the thread in `troupe_cluster_carry`. It must not block or end the
 * thread. Any result but TROUPE_OK gives the request up: the outcome is TROUPE_ABORTED naming that
 * code. */
typedef troupe_status (*troupe_carried_call)(void* user, const troupe_attempt* now,
                                             const troupe_node_info* node,
                                             troupe_call_draft* draft);

/* Gives up the requests that it was given to, from any thread. */
typedef struct troupe_stop troupe_stop;
TROUPE_API troupe_status troupe_stop_new(troupe_stop** stop);
TROUPE_API troupe_status troupe_stop_request(troupe_stop* stop);
TROUPE_API void troupe_stop_free(troupe_stop* stop);

typedef struct troupe_carried_request {
  uint32_t size;
  /* 1 if limits.retry_window is not 0: a prefill side then outlives its decode side. */
  uint32_t source_is_kept;
  const char* request; /* 1 to 240 bytes; may be used again */
  const char* from;
  const char* to;
  const char* affinity; /* may be NULL */
  uint64_t deadline_ms; /* 0: 30 s */
  troupe_carried_call prefill;
  troupe_carried_call decode;
  troupe_carried_call abort; /* NULL: the side that lost its partner ends by itself */
  void* user;                /* passed to the callbacks */
  const troupe_stop* stop;   /* may be NULL */
} troupe_carried_request;

typedef struct troupe_carried troupe_carried;

typedef struct troupe_carried_info {
  uint32_t size;
  uint32_t attempts;
  uint32_t prefills; /* how often the prompt was computed */
  uint32_t prefill_count;
  uint32_t decode_count;
  uint32_t reserved;
} troupe_carried_info;

/* Places the request, calls the engines of both sides, and places it again elsewhere when it loses
 * nodes. Returns its one outcome, at the deadline at the latest. Errors: the engines' own;
 * TROUPE_DEADLINE; TROUPE_PEER_LOST (the deployment's retry budget is used up); TROUPE_ABORTED;
 * TROUPE_INVALID_CONFIG. Free with `troupe_carried_free`. */
TROUPE_API troupe_status troupe_cluster_carry(troupe_cluster* cluster,
                                              const troupe_carried_request* request,
                                              troupe_carried** outcome);
TROUPE_API troupe_status troupe_carried_read(const troupe_carried* outcome,
                                             troupe_carried_info* info);
/* The answer of rank `index` of a side. Empty for a prefill that was lost after decode had all it
 * needed. */
TROUPE_API troupe_status troupe_carried_answer(const troupe_carried* outcome, uint32_t side,
                                               uint32_t index, const void** answer,
                                               size_t* answer_size);
/* A copy of the last placement. Free with `troupe_placement_free`. */
TROUPE_API troupe_status troupe_carried_placement(const troupe_carried* outcome,
                                                  troupe_placement** placement);
TROUPE_API void troupe_carried_free(troupe_carried* outcome);

#ifdef __cplusplus
}
#endif

#endif
