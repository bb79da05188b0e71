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
 * Errors. Every fallible call returns a `troupe_status`: TROUPE_OK (0), or a code to switch on. The
 * sentence that belongs to the code, what was wrong and what to do, is `troupe_last_error()`: of
 * the last call that failed on the calling thread, until the next one that fails there. Nothing is
 * thrown, aborted or exited across this edge, and nothing here calls code of yours, except
 * `troupe_cluster_carry` on the thread that called it. Null pointers, wrong sizes and numbers out
 * of range are refused with TROUPE_INVALID_CONFIG and a sentence that names the argument; a call
 * that fails writes no output.
 *
 * Sizes. A struct that begins with `size` can grow: set it to sizeof of the struct as you compiled
 * it, and every field that you do not use to 0. A library that is newer takes what you did not know
 * as 0; one that is older refuses what it does not know unless that is 0. Structs without `size`
 * stay as they are for the life of this library's name (libtroupe.so.0).
 *
 * Ownership. Arguments are copied before a call returns, unless it says otherwise (regions, the
 * value of a put). What a call gives out is the caller's and says what frees it. Freeing NULL does
 * nothing.
 *
 * Threads. Every call may be made from any thread at any time, side by side with any other, also
 * while another thread waits. Two exceptions: an object must not be in use by another call when it
 * is freed, and a `troupe_layout` is built by one thread.
 *
 * Fork. An engine or a cluster belongs to the process that made it. In a child of `fork` every call
 * on it fails at once with TROUPE_STALE_INCARNATION; freeing it there only forgets it. A child that
 * was forked while its parent had either cannot make new ones: start it by exec (spawn) instead.
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
  TROUPE_UNKNOWN_REGION = 5,   /* a region that is not, or no longer, registered */
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
  TROUPE_ABORTED = 16, /* one of the two engines gave the transfer up, or this one was stopped */
  TROUPE_LEASE_EXPIRED = 17, /* the holder of the blocks was not heard of for too long */
  /* of a former life of a node; here also: of the process before a fork */
  TROUPE_STALE_INCARNATION = 18,
  /* wrong or missing credentials, or a right that the grant does not give */
  TROUPE_UNAUTHORIZED = 19,
  TROUPE_BACKEND_UNAVAILABLE = 20, /* the transport that was asked for cannot be used here */
  TROUPE_INTERNAL = 21,            /* a defect of Troupe itself; please report it with the log */
  /* Of this interface alone: the time that a wait was given is over. Nothing has ended and no event
     was taken. */
  TROUPE_TIMED_OUT = 100
};

/* The sentence of the last call that failed on this thread; "" if none did. NUL-terminated UTF-8,
 * Troupe's, valid until the next call that fails on this thread. */
TROUPE_API const char* troupe_last_error(void);
/* The name of a code as logs write it, such as "peer_lost"; "unknown" for a number that is none.
 * Never freed. */
TROUPE_API const char* troupe_status_name(troupe_status status);
/* Of the library that is loaded, such as "0.1.0". Never freed. */
TROUPE_API const char* troupe_version(void);
/* What nodes compare before they talk; nodes of one cluster need the same one. */
TROUPE_API uint32_t troupe_protocol_version(void);
/* Frees what a call gave out as text or bytes: reports, encodings, answers. */
TROUPE_API void troupe_free(void* memory);

typedef struct troupe_log_options {
  uint32_t size;
  uint32_t reserved;
  const char* level; /* trace, debug, info, warn, error, off; NULL: info */
  const char* node;  /* stands in every line; NULL: the process id */
  const char* file;  /* rotated at 64 MiB; NULL: standard error */
} troupe_log_options;

/* Where the lines of Troupe in this process go; before the first call lines of level info go to
 * standard error. A file that cannot be written or a level that is none: TROUPE_INVALID_CONFIG, and
 * nothing changes. */
TROUPE_API troupe_status troupe_log(const troupe_log_options* options);

/* -- the layout of a cache */

/* How one rank's KV cache lies in the regions of memory that its engine registers. */
typedef struct troupe_layout troupe_layout;

enum {                             /* layer_kind */
       TROUPE_LAYER_ATTENTION = 1, /* keys and values: two planes, K and V */
       TROUPE_LAYER_MLA = 2,       /* one latent without heads, the same on every rank: one plane */
       TROUPE_LAYER_RECURRENT = 3, /* nothing per token (its memory is a state tensor): no plane */
       /* bytes of a block that only the engine understands: one or two planes. A block moves whole,
          once it is complete or the send is sealed; one that a prefix ends inside is written again
          whole */
       TROUPE_LAYER_OPAQUE = 4
};

enum {                               /* unit: what of an opaque layer is one piece */
       TROUPE_OPAQUE_BLOCK_HEAD = 1, /* a head of a block; heads are spread as those of attention */
       TROUPE_OPAQUE_BLOCK = 2       /* a block; both sides have equal parallel sizes */
};

typedef struct troupe_layer_shape {
  uint32_t kind; /* TROUPE_LAYER_... */
  /* of the whole model, before any sharding; 0 unless attention, or opaque by heads */
  uint32_t kv_heads;
  uint32_t head_dim; /* elements of one head of K (and of V), or of the latent; else 0 */
} troupe_layer_shape;

/* What else a layer may say. */
typedef struct troupe_layer_details {
  uint32_t size;
  uint32_t value_dim;    /* elements of one head of V where K's are others; 0: as `head_dim` */
  uint32_t element_size; /* bytes of one element of `dtype`; 0: the size that is known of it */
  uint32_t unit;         /* TROUPE_OPAQUE_...; 0 unless opaque */
  const char* dtype;     /* of this layer alone, 1 to 32 bytes; NULL or "": the geometry's */
  /* What the bytes of an opaque layer are, 1 to 32 bytes, named by the engine: equal packings are
   * equal byte for byte. NULL or "" unless opaque. */
  const char* packing;
} troupe_layer_details;

/* Where K, V or the latent of one layer lies. The bytes of this rank's head h of token t (0 <= t <
 * block_tokens) of block b begin at base + b * block_stride + t * token_stride + h * head_stride of
 * region `region`. All in bytes. Of an opaque layer they are those of head h of all tokens of the
 * block, and `token_stride` is 0. */
typedef struct troupe_plane {
  uint32_t region; /* index into the regions that the engine registers */
  uint32_t heads;  /* that this rank holds; 1 for a latent and for opaque blocks */
  uint64_t base;
  uint64_t block_stride;
  uint64_t token_stride;
  uint64_t head_stride;
  uint64_t head_bytes; /* head_dim (V: value_dim) * element_size, contiguous; opaque: any */
} troupe_plane;

typedef struct troupe_cache_geometry {
  uint32_t size;
  uint32_t element_size; /* bytes of one element; 0: the size that is known of `dtype` */
  /* "fp8", "int8", "fp16", "bf16", "fp32", or a name of yours of 1 to 32 bytes; compared by name */
  const char* dtype;
  uint32_t block_tokens; /* tokens of a block, 1 to 1024 */
  uint32_t blocks;       /* of this rank; need not be equal on the two sides */
  uint32_t tp_rank;
  uint32_t tp_size; /* 0 is taken as 1 */
  /* 32 bytes: a hash of what makes equal bytes mean the same (model, revision, quantisation), made
   * by the engine. Compared where both sides say it; NULL or all zero: not said. */
  const uint8_t* model;
} troupe_cache_geometry;

enum { TROUPE_LAYERS_FIRST = 0, TROUPE_BLOCKS_FIRST = 1, TROUPE_BLOCK_INTERLEAVED = 2 }; /* order */
enum { TROUPE_KV_TOGETHER = 0, TROUPE_KV_SEPARATE = 1 };                                 /* kv */
enum { TROUPE_TOKEN_MAJOR = 0, TROUPE_HEAD_MAJOR = 1 };                                  /* inner */
enum { TROUPE_SINGLE_REGION = 0, TROUPE_REGION_PER_LAYER = 1 }; /* regions */

/* The arrangements that have a name; all 0 is [layer][block][kv][token][head][dim] in one
 * region. */
typedef struct troupe_arrangement {
  uint32_t order;   /* of the dimensions in a region, outermost first */
  uint32_t kv;      /* whether K and V of a layer's block stand in one block or in two */
  uint32_t inner;   /* order inside K or V of a block */
  uint32_t regions; /* a region for everything, or one for each layer (layers first only) */
} troupe_arrangement;

enum { TROUPE_STATE_REPLICATED = 1, TROUPE_STATE_SLICED = 2 }; /* sharding */

/* Consecutive bytes of a state's slot that are spread over ranks in one way. */
typedef struct troupe_state_part {
  uint64_t bytes;    /* that this rank holds of one request */
  uint32_t sharding; /* TROUPE_STATE_... */
  uint32_t reserved;
} troupe_state_part;

/* A tensor that a request has one slot of, whatever its length (Mamba, sliding window). Moved
 * whole, with the last chunk; a request has the same slot number in all of them. */
typedef struct troupe_state_tensor {
  uint32_t size;
  uint32_t sharding; /* TROUPE_STATE_..., of all of it; with `parts` not looked at */
  /* 1 to 64 bytes; matched by position and name between the sides. Where a side holds a part of the
   * model's layers, by name alone: a name is then one state of the whole model. */
  const char* name;
  uint32_t region;
  uint32_t slots;
  uint64_t base;
  uint64_t slot_stride;
  uint64_t slot_bytes; /* that this rank holds of one request */
  /* What the slot is made of, in order, where that is sliced part by part ([x, B, C] of a
   * convolution), or replicated beside sliced parts: `slot_bytes` in all. At most 64. */
  const troupe_state_part* parts;
  uint32_t part_count;
  uint32_t reserved;
} troupe_state_tensor;

/* One head of K, of V or of the latent at one token of a request. */
typedef struct troupe_cache_place {
  uint32_t layer;
  uint32_t plane; /* attention: 0 is K, 1 is V; MLA: 0; opaque: as they were added */
  uint32_t token; /* of the request */
  uint32_t head;  /* of those that this rank holds */
} troupe_cache_place;

typedef struct troupe_region_bytes {
  uint32_t region;
  uint32_t reserved;
  uint64_t offset; /* from the begin of the region */
  uint64_t length;
} troupe_region_bytes;

/* The layout of a named arrangement, packed without padding. `how` NULL: all 0.
 * TROUPE_INVALID_CONFIG naming the field, and for an opaque layer, whose planes only the engine
 * knows. Free with `troupe_layout_free`. */
TROUPE_API troupe_status troupe_layout_make(const troupe_cache_geometry* geometry,
                                            const troupe_layer_shape* layers, size_t layer_count,
                                            const troupe_arrangement* how, troupe_layout** layout);
/* The same with details: an array of `layer_count` pointers, each NULL where the layer has none.
 * `details` NULL: no layer has. */
TROUPE_API troupe_status troupe_layout_make_with(const troupe_cache_geometry* geometry,
                                                 const troupe_layer_shape* layers,
                                                 const troupe_layer_details* const* details,
                                                 size_t layer_count, const troupe_arrangement* how,
                                                 troupe_layout** layout);
/* A layout without layers, for arrangements that have no name: add every layer with its planes, and
 * the state tensors, then `troupe_layout_check`. */
TROUPE_API troupe_status troupe_layout_new(const troupe_cache_geometry* geometry,
                                           troupe_layout** layout);
TROUPE_API troupe_status troupe_layout_add_layer(troupe_layout* layout,
                                                 const troupe_layer_shape* shape,
                                                 const troupe_plane* planes, size_t plane_count);
/* The same with details, without which a layer cannot be opaque. `details` NULL: none. */
TROUPE_API troupe_status troupe_layout_add_layer_with(troupe_layout* layout,
                                                      const troupe_layer_shape* shape,
                                                      const troupe_layer_details* details,
                                                      const troupe_plane* planes,
                                                      size_t plane_count);
TROUPE_API troupe_status troupe_layout_add_state(troupe_layout* layout,
                                                 const troupe_state_tensor* state);
/* Layers whose blocks a request names in a table of their own: they keep other tokens of it than the rest do
 * (sliding windows), or another number of tokens in a block (`block_tokens`; 0: the geometry's). Their numbers
 * ascend. Once there is a group, each layer that has planes is in exactly one. Planes of different groups
 * may lie over the same bytes: a block is then one group's at a time. */
TROUPE_API troupe_status troupe_layout_add_group(troupe_layout* layout, const uint32_t* layers,
                                                 size_t layer_count, uint32_t block_tokens);
/* Of a rank of a pipeline: its layers are [first_layer, first_layer + their count) of the model's
 * `total_layers`. Whatever names a layer of it counts from its own first one; groups and state tensors are
 * those of its layers, and a group may have none (`layers` NULL, 0). `total_layers` 0, with `first_layer` 0:
 * all layers of the model are here, as where this is never called. One of a pipeline's partners that has
 * all layers says so by 0 and their count: see `troupe_layout_fingerprint`. Of P parts of T
 * tensor-parallel ranks, tensor-parallel rank t of part p is rank p * T + t of its replica. */
TROUPE_API troupe_status troupe_layout_set_part(troupe_layout* layout, uint32_t first_layer,
                                                uint32_t total_layers);
/* Whether it is a layout: every number in its limits, strides that nest, no address that wraps. */
TROUPE_API troupe_status troupe_layout_check(const troupe_layout* layout);
/* Check, and: every byte lies in its region (`region_sizes[i]` bytes for region i), and no two
 * planes of one group, nor a state and anything, share one. TROUPE_OUT_OF_RANGE or TROUPE_INVALID_CONFIG naming layer and
 * plane. */
TROUPE_API troupe_status troupe_layout_validate(const troupe_layout* layout,
                                                const uint64_t* region_sizes, size_t count);
/* Whether a cache of the one side can be mapped onto the other; of two parts of a model what both hold.
 * TROUPE_LAYOUT_MISMATCH naming field and values. */
TROUPE_API troupe_status troupe_layout_compatible(const troupe_layout* local,
                                                  const troupe_layout* remote);
/* What it is made of. `dtype` and `model` (NULL: not said) in `geometry` belong to the layout. */
TROUPE_API troupe_status troupe_layout_geometry(const troupe_layout* layout,
                                                troupe_cache_geometry* geometry);
TROUPE_API troupe_status troupe_layout_layer_count(const troupe_layout* layout, uint32_t* count);
/* As `troupe_layout_set_part` set them, else 0. */
TROUPE_API troupe_status troupe_layout_part(const troupe_layout* layout, uint32_t* first_layer,
                                            uint32_t* total_layers);
/* A layer and up to `capacity` of its planes; `plane_count` says how many it has. */
TROUPE_API troupe_status troupe_layout_layer(const troupe_layout* layout, uint32_t layer,
                                             troupe_layer_shape* shape, troupe_plane* planes,
                                             size_t capacity, size_t* plane_count);
/* What else it says: 0 and "" where it does not. The texts belong to the layout, until a layer is
 * added to it. */
TROUPE_API troupe_status troupe_layout_layer_details(const troupe_layout* layout, uint32_t layer,
                                                     troupe_layer_details* details);
TROUPE_API troupe_status troupe_layout_group_count(const troupe_layout* layout, uint32_t* count);
/* Up to `capacity` of a group's layers, and what tokens a block of it holds; `layer_count` says how many
 * layers it has. */
TROUPE_API troupe_status troupe_layout_group(const troupe_layout* layout, uint32_t group,
                                             uint32_t* layers, size_t capacity, size_t* layer_count,
                                             uint32_t* block_tokens);
/* The smallest size of each region that the layout fits into: up to `capacity` of them; `count`
 * says how many there are. The layout is checked first. */
TROUPE_API troupe_status troupe_layout_region_sizes(const troupe_layout* layout, uint64_t* sizes,
                                                    size_t capacity, size_t* count);
/* Where it lies, for a request whose token t is token t % block_tokens of
 * blocks[t / block_tokens]; of an opaque layer the head's part of all of the token's block. With
 * groups `blocks` is the table of the layer's; where that begins with a later token, count `token` from there. */
TROUPE_API troupe_status troupe_layout_locate(const troupe_layout* layout, const uint32_t* blocks,
                                              size_t block_count, const troupe_cache_place* place,
                                              troupe_region_bytes* bytes);
/* A versioned byte form, equal on every machine. Free the bytes with `troupe_free`. */
TROUPE_API troupe_status troupe_layout_encode(const troupe_layout* layout, void** bytes,
                                              size_t* byte_count);
/* The reverse, for bytes from anywhere. */
TROUPE_API troupe_status troupe_layout_decode(const void* bytes, size_t byte_count,
                                              troupe_layout** layout);
/* 16 bytes that stand for what `troupe_layout_compatible` compares, equal on every machine. Layouts
 * with equal ones are compatible; strides, regions and blocks may differ. So may be those of which
 * one does not say its model. Of a layout that says `total_layers` it stands for what every part of the
 * model has in common, since no rank knows the layers of the others; give the model's hash, too. The
 * layout is checked first. */
TROUPE_API troupe_status troupe_layout_fingerprint(const troupe_layout* layout,
                                                   uint8_t* fingerprint);
TROUPE_API void troupe_layout_free(troupe_layout* layout);

/* -- an engine: one node of the deployment in this process */

typedef struct troupe_engine troupe_engine;
/* What an engine started and will hear the end of. Unique within one engine, never 0. */
typedef uint64_t troupe_operation;

typedef struct troupe_memory {
  void* data; /* of the host or of a GPU of this process */
  size_t size;
} troupe_memory;

enum {
  TROUPE_POLLING = 1u << 0, /* no progress thread: the engine calls `troupe_engine_poll` often */
  TROUPE_CALLS = 1u << 1,   /* calls of frontends come as events; without it they are refused */
  TROUPE_WATCH = 1u << 2    /* TROUPE_EVENT_MEMBER for members of the cluster that come and go */
};

enum { TROUPE_NO_ALLOCATION = 0, TROUPE_ALLOCATE = 1, TROUPE_ALLOCATE_HUGE = 2 }; /* allocate */

/* What a node of an open stage is known by outside of Troupe: an engine's id, the address of its
 * HTTP server. */
typedef struct troupe_label {
  const char* key;   /* 1 to 64 bytes */
  const char* value; /* at most 256 bytes */
} troupe_label;

/* A node that no file names: what it says of itself to join an open stage of the deployment. */
typedef struct troupe_announcement {
  uint32_t size;
  uint32_t label_count; /* at most 16 */
  const char* stage;    /* one that is open */
  const char* replica; /* the engine's own id, 1 to 64 of a-z 0-9 _ -; all its ranks say the same */
  uint32_t rank;       /* within the replica, of all its parts (`troupe_layout_set_part`) */
  uint32_t ranks;      /* of the replica; 0 is taken as 1 */
  const troupe_label* labels; /* found by `troupe_cluster_find_label`; compared with nothing */
} troupe_announcement;

typedef struct troupe_engine_options {
  uint32_t size;
  uint32_t flags;              /* TROUPE_POLLING, TROUPE_CALLS, TROUPE_WATCH */
  const char* deployment_file; /* this or `deployment_text`, not both */
  const char* deployment_text; /* YAML, as troupe.yaml(5) says */
  const char* node;            /* name of the node in it, such as "prefill-0"; none with `join` */
  const char* supervisor_host; /* in place of the deployment's; NULL: as it says */
  uint32_t supervisor_port;    /* in place of the deployment's; 0: as it says */
  /* Of `layout`, below: TROUPE_NO_ALLOCATION; ordinary pages; huge ones where enough are free. */
  uint32_t allocate;
  /* The engine's own cache instead of one made from the deployment's `model` and `pool`: there is
   * no pool then, and the engine names the blocks in `send` and `receive`. Its memory is either
   * `regions`, in the layout's order, each at least as large as `troupe_layout_region_sizes` says,
   * kept alive and mapped by the engine until `troupe_engine_stop` has returned; or Troupe's
   * (`allocate`), zeroed, to be had by `troupe_engine_region`. */
  const troupe_layout* layout;
  const troupe_memory* regions;
  size_t region_count;
  /* For `allocate`: 1 + the number of the NUMA node that the pages are on; 0: wherever. */
  uint32_t numa_node_plus_1;
  uint32_t reserved;
  /* Cores that the node's threads run on; none: those of the thread that starts it. A core that the
   * process may not use: TROUPE_INVALID_CONFIG. */
  const uint32_t* cores;
  size_t core_count;
  /* The node joins an open stage, as STAGE.REPLICA.RANK: `node` is NULL or "" then. An engine that
   * has a cache brings its own `layout`, which says the same rank; placements join it with replicas
   * of equal layouts. NULL: the deployment names the node. */
  const troupe_announcement* join;
} troupe_engine_options;

/* Starts a node: binds its port, adopts or allocates the cache, registers with the supervisor in
 * the background. TROUPE_NOT_FOUND (no such node), TROUPE_INVALID_CONFIG (the deployment: every
 * issue with its line; options that contradict each other), TROUPE_LAYOUT_MISMATCH,
 * TROUPE_OUT_OF_RANGE (a region too small), TROUPE_POOL_EXHAUSTED (not enough memory),
 * TROUPE_ALREADY_EXISTS (the port is taken), TROUPE_PEER_UNREACHABLE. Why the supervisor refuses a
 * node that joins, `troupe_engine_wait_registered` tells. Where the deployment says
 * `supervisor: {begin: true}`, and `options` names no other place of it, the supervisor is found, and
 * one is begun where none lives, within 15 s: TROUPE_NOT_FOUND without a `troupe` command to begin it
 * with (TROUPE_COMMAND in the environment names one), TROUPE_PEER_UNREACHABLE or TROUPE_DEADLINE with
 * the end of its log. */
TROUPE_API troupe_status troupe_engine_start(const troupe_engine_options* options,
                                             troupe_engine** engine);
/* Waits until the supervisor has taken the node in. TROUPE_DEADLINE naming the last reason: the
 * node goes on asking. TROUPE_STALE_INCARNATION: another process has this node's name, and this one
 * is never taken in again. */
TROUPE_API troupe_status troupe_engine_wait_registered(troupe_engine* engine, uint64_t timeout_ms);
/* Leaves the cluster: live operations fail with TROUPE_ABORTED at both sides. Other threads may be
 * in calls: what they begin is refused or ends with TROUPE_ABORTED. Again: nothing. Events that
 * happened can still be taken, but for those of members. */
TROUPE_API troupe_status troupe_engine_stop(troupe_engine* engine);
/* Stops it and forgets it. Details that came from it may be kept and read for longer. */
TROUPE_API void troupe_engine_free(troupe_engine* engine);

typedef struct troupe_identity {
  uint32_t size;
  uint32_t pid;
  uint64_t incarnation; /* of this life of the node, never 0 */
  uint64_t epoch;       /* of the newest membership that it has; 0: none yet */
  uint32_t replica;     /* assigned by the supervisor */
  uint32_t rank;
  uint32_t ranks; /* of the replica */
  uint32_t port;  /* the cluster port that was bound */
  /* Of the supervisor that has taken the node in last, as `placed_by` of a receive names it; 0: none
   * yet. */
  uint64_t supervisor_incarnation;
} troupe_identity;

TROUPE_API troupe_status troupe_engine_identity(const troupe_engine* engine,
                                                troupe_identity* identity);
/* A copy of the cache's layout. Free with `troupe_layout_free`. */
TROUPE_API troupe_status troupe_engine_layout(const troupe_engine* engine, troupe_layout** layout);
/* Memory of the layout's region `index`. What Troupe allocated stays Troupe's: readable and
 * writable until `troupe_engine_free`, also after `troupe_engine_stop`. TROUPE_OUT_OF_RANGE. */
TROUPE_API troupe_status troupe_engine_region(const troupe_engine* engine, uint32_t index,
                                              troupe_memory* memory);
/* `count` blocks of the node's pool, for engines that leave allocation to it. `blocks` has room for
 * `count`; `owner` proves the allocation when they are freed. TROUPE_POOL_EXHAUSTED;
 * TROUPE_INVALID_CONFIG (the layout is the engine's own). */
TROUPE_API troupe_status troupe_engine_allocate_blocks(troupe_engine* engine, uint32_t count,
                                                       uint64_t* owner, uint32_t* blocks);
/* Gives blocks of one allocation back. TROUPE_NOT_FOUND (foreign or double free: nothing is
 * freed). */
TROUPE_API troupe_status troupe_engine_free_blocks(troupe_engine* engine, uint64_t owner,
                                                   const uint32_t* blocks, size_t count);

/* -- placements: where a request goes */

typedef struct troupe_placement troupe_placement;

enum { TROUPE_MODE_DEFAULT = 0, TROUPE_MODE_WRITE = 1, TROUPE_MODE_READ = 2 }; /* mode */
enum { TROUPE_PREFILL = 0, TROUPE_DECODE = 1 };                                /* side */

typedef struct troupe_placement_request {
  uint32_t size;
  uint32_t timeout_ms; /* how long to wait while nobody is up; 0: fail at once */
  const char* request; /* id, for logs and affinity; 1 to 256 bytes */
  const char* from;    /* stage; NULL: the deployment's only edge */
  const char* to;
  /* Requests that name the same one go to the same replicas; NULL: as the policy says. */
  const char* affinity;
  /* Not none: the same request once more, since these nodes of where it was placed were lost to it.
   * Replicas of theirs are avoided while others are up; it stays with one that lost nobody. Counts
   * against the deployment's limits.retry_budget: beyond it the answer is TROUPE_PEER_LOST. */
  const char* const* failed;
  uint32_t failed_count;
  /* 1, with `failed`: the prefill replica holds the sealed cache, and is gone back to while it is up
   * in the same life (`same_source` of the placement). */
  uint32_t keep_source;
} troupe_placement_request;

typedef struct troupe_placement_info {
  uint32_t size;
  uint32_t mode;                   /* TROUPE_MODE_WRITE or TROUPE_MODE_READ */
  const char* request;             /* the placement's own */
  uint64_t supervisor_incarnation; /* `placed_by` of a receive */
  uint64_t epoch;                  /* `placed_at` of a receive */
  uint32_t attempt;                /* of this request, from 1 */
  uint32_t prefill_count;          /* ranks of the chosen replicas */
  uint32_t decode_count;
  uint32_t same_source; /* 1: the prefill replica of the attempt before, in the same life */
  /* Of the layout that both replicas have, where a stage is open; else all 0. */
  uint8_t fingerprint[16];
} troupe_placement_info;

/* A node of a placement, or of the members that were found. The texts belong to those. */
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
  /* Of a node of an open stage; of one that a file names "", all 0, and none. */
  const char* replica_name; /* the engine's own id */
  uint8_t fingerprint[16];  /* of its layout; all 0: it has none */
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

/* The blocks that a request has of one group of its layout's layers. */
typedef struct troupe_group_blocks {
  /* Of the first block, the first token: a multiple of the group's block_tokens. Those before it are not
   * held, as where a window has moved on, and nothing of them moves for these layers. */
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
  /* Decode ranks that take it before it is done; 0: all of the replica of the first one. */
  uint32_t consumers;
  uint32_t held_for_count;
  const char* const* held_for; /* decode nodes that it is for: their waiting in line ends nothing */
  uint32_t flags;              /* TROUPE_GROWS, TROUPE_TELL_WANTED */
  uint32_t reserved;
  /* Where the layout has groups: one for each, in their order, and `blocks` is NULL. */
  const troupe_group_blocks* groups;
  uint32_t group_count;
  uint32_t reserved_2;
} troupe_send_spec;

enum {                        /* flags of a receive */
       TROUPE_PARK = 1u << 0, /* `park_ms` counts, also 0 */
       /* Sent once more: that it was received before is no answer, how a send of it failed is. */
       TROUPE_AGAIN = 1u << 1
};

typedef struct troupe_receive_spec {
  uint32_t size;
  uint32_t state_slot;
  const char* request; /* NULL: that of `placement` */
  /* Gives sources, mode, placed_by and placed_at; NULL: the fields below do. */
  const troupe_placement* placement;
  const char* const* sources; /* node names of every rank of the prefill replica, each once */
  uint32_t source_count;
  uint32_t mode;          /* TROUPE_MODE_...; default: write */
  uint32_t tokens;        /* of the prompt; at most what `blocks` hold */
  uint32_t prefix_tokens; /* the first so many are already in `blocks`; see TROUPE_LAYER_OPAQUE */
  /* Destination of tokens 0, 1, ...; none: the pool allocates (TROUPE_EVENT_ALLOCATED). */
  const uint32_t* blocks;
  size_t block_count;
  uint64_t deadline_ms; /* 0: the deployment's default */
  /* `supervisor_incarnation` and `epoch` of the placement that it follows, or 0 and 0. */
  uint64_t placed_by;
  uint64_t placed_at;
  uint32_t fail_when_full; /* 1: TROUPE_POOL_EXHAUSTED at once instead of waiting in line */
  uint32_t reserved;
  /* Incarnation of each source as the caller knows it, `source_count` of them; 0 in one, or NULL:
   * whichever lives. A source in another life has lost the cache: TROUPE_STALE_INCARNATION. */
  const uint64_t* lives;
  /* With TROUPE_PARK: how long a source keeps the receive that does not know the request yet; then
   * TROUPE_NOT_FOUND. Without: until the deadline. */
  uint64_t park_ms;
  /* What the sealed `aux` of each source must begin with, at most 64 bytes (a hash of the prompt,
   * say). Else TROUPE_LAYOUT_MISMATCH, in read mode before a byte moves. */
  const void* expect;
  size_t expect_size;
  uint32_t flags; /* TROUPE_PARK, TROUPE_AGAIN */
  uint32_t reserved_2;
  /* As of a send. What lies before the first token of a group is not wanted. */
  const troupe_group_blocks* groups;
  uint32_t group_count;
  uint32_t reserved_3;
} troupe_receive_spec;

/* A point in the work of a GPU: an event (cudaEvent_t, hipEvent_t) recorded behind what it stands
 * for. */
typedef struct troupe_compute_point {
  uint32_t size;
  uint32_t gpu; /* of the event, as cudaGetDevice counts in this process */
  void* event;  /* of this process; or NULL and: */
  /* The 64 bytes of the IPC handle of an event of another process of this host. */
  const void* shared;
} troupe_compute_point;

typedef struct troupe_compute_stream {
  uint32_t size;
  uint32_t gpu;
  void* stream; /* cudaStream_t, hipStream_t; NULL: the GPU's default stream */
} troupe_compute_stream;

/* Prefill side: offers the cache of a request to whichever decode ranks ask for it.
 * TROUPE_ALREADY_EXISTS (the request is live here), TROUPE_OUT_OF_RANGE (a block outside the
 * cache), TROUPE_NOT_FOUND (a node of `held_for`), TROUPE_OVERLOADED (limits.max_operations are
 * open: take events). */
TROUPE_API troupe_status troupe_engine_send(troupe_engine* engine, const troupe_send_spec* spec,
                                            troupe_operation* operation);
/* The blocks of the tokens behind those that the send has named, of a send with TROUPE_GROWS. Layers
 * are ready, and the request sealed, only as far as its blocks reach. TROUPE_NOT_FOUND (ended),
 * TROUPE_ALREADY_EXISTS (sealed), TROUPE_INVALID_CONFIG (it does not grow), TROUPE_OUT_OF_RANGE (a
 * block outside the cache; none is added). */
TROUPE_API troupe_status troupe_engine_add_blocks(troupe_engine* engine, troupe_operation send,
                                                  const uint32_t* blocks, size_t block_count);
/* The same of one group of the layout's layers. */
TROUPE_API troupe_status troupe_engine_add_group_blocks(troupe_engine* engine,
                                                        troupe_operation send, uint32_t group,
                                                        const uint32_t* blocks, size_t block_count);
/* Layers [layer_begin, layer_end) are computed up to token `token_end` and will not be written
 * again; call it as often as chunks come. `computed`: once the GPU has come to that point; nobody
 * waits for it here, and the event may be recorded again when this returns. NULL: they are there
 * now. TROUPE_NOT_FOUND (ended), TROUPE_OUT_OF_RANGE; with `computed` TROUPE_NO_DEVICE,
 * TROUPE_INVALID_CONFIG. */
TROUPE_API troupe_status troupe_engine_layers_ready(troupe_engine* engine, troupe_operation send,
                                                    uint32_t layer_begin, uint32_t layer_end,
                                                    uint32_t token_end,
                                                    const troupe_compute_point* computed);
/* No more will come: the request has `tokens` tokens, every layer is ready up to there. `aux`: at
 * most 64 KiB for the decode engine; NULL and 0: nothing. */
TROUPE_API troupe_status troupe_engine_seal(troupe_engine* engine, troupe_operation send,
                                            uint32_t tokens, const void* aux, size_t aux_size);
/* Decode side: takes the cache of a request from the ranks of one prefill replica.
 * TROUPE_OVERLOADED, TROUPE_POOL_EXHAUSTED, TROUPE_OUT_OF_RANGE, TROUPE_NOT_FOUND (a source that is
 * no node), TROUPE_INVALID_CONFIG (the sources are not the ranks of one replica, each once; not a
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
  const uint64_t* lives;      /* as of a receive */
} troupe_sources;

/* Decode side: nobody wants the request any more. Gives its sources back; costs no block, may come
 * before they are sent, and may be said twice. Outcome: done, once each source has ended (its engine
 * is told TROUPE_ABORTED) or had before; where the request was never sent, its next send ends so,
 * and receives until then. TROUPE_ALREADY_EXISTS as an outcome: the source goes on, since another node takes it,
 * waits for it, or is whom it is held for. TROUPE_STALE_INCARNATION as an outcome: a source lives another life. TROUPE_INVALID_CONFIG,
 * TROUPE_NOT_FOUND (a source that is no node). */
TROUPE_API troupe_status troupe_engine_release(troupe_engine* engine, const troupe_sources* of,
                                               troupe_operation* operation);
/* Decode side: the request waits in the engine's own queue. Keeps its sources from running out of
 * their lease. Outcome: done, once a receive of the request has asked all of them, or where it was
 * delivered meanwhile; that of the first source that failed, or of `troupe_engine_abort`.
 * TROUPE_NOT_FOUND as an outcome: a source does not offer it. Ends with the life of either node.
 * TROUPE_ALREADY_EXISTS (this node holds it), and as of `troupe_engine_release`. */
TROUPE_API troupe_status troupe_engine_hold(troupe_engine* engine, const troupe_sources* of,
                                            troupe_operation* operation);
/* Decode side, on a GPU: what `stream` is given from here on waits, on the GPU, until these layers
 * are there. The stream goes on with the receive's outcome at the latest. Of a receive that is done
 * nothing waits; one that failed is answered with its own error. TROUPE_NOT_FOUND (no receive, or one
 * that ended long ago), TROUPE_OUT_OF_RANGE, TROUPE_NO_DEVICE, TROUPE_INVALID_CONFIG,
 * TROUPE_BACKEND_UNAVAILABLE, TROUPE_OVERLOADED. */
TROUPE_API troupe_status troupe_engine_await_layers(troupe_engine* engine, troupe_operation receive,
                                                    uint32_t layer_begin, uint32_t layer_end,
                                                    uint32_t token_end,
                                                    const troupe_compute_stream* stream);
/* Gives an operation up; its one outcome still comes. TROUPE_NOT_FOUND: it has ended. `reason`
 * NULL: "". */
TROUPE_API troupe_status troupe_engine_abort(troupe_engine* engine, troupe_operation operation,
                                             const char* reason);

/* -- keyed values */

/* Stores a copy of a value at node `peer` (which may be this one). `value` must stay as it is until
 * the outcome, and nobody reads it from then on; in memory of a GPU it is copied before this returns,
 * and must be computed by then. Blocks of the node's pool may be freed at once. ttl 0: until removed.
 * Outcome: done, TROUPE_ALREADY_EXISTS, TROUPE_POOL_EXHAUSTED. TROUPE_NOT_FOUND: no such node, or a
 * block that `value` lies in is not allocated. Keys have 1 to 512 bytes. */
TROUPE_API troupe_status troupe_engine_put(troupe_engine* engine, const char* peer, const char* key,
                                           const void* value, size_t value_size, uint64_t ttl_ms,
                                           troupe_operation* operation);
/* Outcome: TROUPE_EVENT_VALUE, or TROUPE_NOT_FOUND. The bytes are mapped where they lie, and stay
 * until the detail is freed. */
TROUPE_API troupe_status troupe_engine_get(troupe_engine* engine, const char* peer, const char* key,
                                           troupe_operation* operation);
/* Whether there is one: outcome TROUPE_EVENT_INFO, or TROUPE_NOT_FOUND. */
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
/* A placed request ended, however: its place in the queue is free. */
TROUPE_API troupe_status troupe_engine_placed_request_ended(troupe_engine* engine,
                                                            const char* request);
/* What the engine reports with each heartbeat: requests that wait or run in it. */
TROUPE_API troupe_status troupe_engine_set_queue_length(troupe_engine* engine, uint32_t requests);

enum {
  TROUPE_SERVING = 0,  /* again, where an operator has cancelled the drain */
  TROUPE_DRAINING = 1, /* no new request is placed here; those that are here go on */
  TROUPE_DRAINED = 2 /* they have ended, or the drain's deadline passed: stop and end the process */
};
/* What the cluster wants of the node (`troupe drain`). Ask at least once a second. */
TROUPE_API troupe_status troupe_engine_draining(const troupe_engine* engine, uint32_t* standing);
/* The engine can serve nobody (its GPU is lost, say): the node is down for the cluster, with the
 * reason, until `troupe_engine_recover`. */
TROUPE_API troupe_status troupe_engine_report_failure(troupe_engine* engine, const char* why);
TROUPE_API troupe_status troupe_engine_recover(troupe_engine* engine);
/* What the node owns and does, as one object of JSON: that of a node in `troupe status --json`.
 * Free with `troupe_free`. */
TROUPE_API troupe_status troupe_engine_report(const troupe_engine* engine, char** json);

/* -- events */

/* What an event has beside its fixed part. The caller's: free each with `troupe_detail_free`, or
 * all of a batch with `troupe_events_free`. */
typedef struct troupe_detail troupe_detail;

enum {
  TROUPE_EVENT_NONE = 0,
  /* receive: the pool gave blocks; `troupe_detail_blocks`, to be freed by the engine */
  TROUPE_EVENT_ALLOCATED = 1,
  TROUPE_EVENT_LAYERS = 2, /* receive: u.layers are complete from all that hold them, may be read */
  /* the one outcome: it succeeded. u.done; aux of a receive: `troupe_detail_bytes` */
  TROUPE_EVENT_DONE = 3,
  TROUPE_EVENT_FAILED = 4, /* the one outcome: it failed. `code`, and `troupe_detail_reason` */
  /* after the outcome of a send or receive: the network touches its blocks no more; an engine
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
  /* of no operation, with TROUPE_WATCH: another node of the cluster has come, is in another state, or
     is gone. u.member; `troupe_detail_node`, `troupe_detail_stage`, `troupe_detail_reason`,
     `troupe_detail_labels`. Told life by life: the first event of an incarnation tells that it is
     there, in whichever state, the last one that it is TROUPE_GONE, which is told exactly once, and
     before the next incarnation of the node. What changes while nobody takes events is told as it
     ended. A life that the cluster took for dead and takes in again is told as there once more. */
  TROUPE_EVENT_MEMBER = 11
};

typedef struct troupe_event {
  uint32_t kind; /* TROUPE_EVENT_...; ignore kinds that you do not know, but free their details */
  troupe_status code;         /* TROUPE_OK unless failed */
  troupe_operation operation; /* 0: of none */
  union {
    struct {
      uint32_t layer_begin, layer_end, token_begin, token_end;
    } layers;
    struct {
      uint64_t bytes; /* moved: receive, and send in write mode */
      uint64_t aux_size;
      /* Send and receive, as in `troupe_outcome`; UINT32_MAX: that or more. */
      uint32_t waited_us, moving_us, segments;
      char backend[4]; /* NUL behind a name of less than four letters */
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
      uint32_t token_begin; /* the prefix before it is at the decode side already */
      uint32_t token_end;
    } wanted;
    struct {
      uint64_t incarnation;
      uint32_t state;   /* TROUPE_JOINING, ... TROUPE_GONE */
      uint32_t replica; /* its number in the stage; of an open one each supervisor's own */
      uint32_t rank;    /* within the replica */
      uint32_t label_count;
    } member;
    uint64_t reserved[4];
  } u;
  troupe_detail* detail; /* NULL where there is none */
} troupe_event;

/* How an operation that succeeded ended. What it has not is 0. */
typedef struct troupe_outcome {
  uint32_t size;
  uint32_t kind;       /* TROUPE_EVENT_VALUE (get), _PLACED (place), or _DONE (all others) */
  uint64_t bytes;      /* receive, and send in write mode: moved */
  uint64_t aux_size;   /* receive: `troupe_detail_bytes` */
  uint64_t value_size; /* get (`troupe_detail_bytes`) and query */
  uint64_t ttl_ms;     /* query; 0: no end */
  uint64_t owner;      /* receive that named no blocks: `troupe_detail_blocks` */
  uint64_t block_count;
  troupe_detail* detail; /* NULL where there is none; free with `troupe_detail_free` */
  /* Send and receive: since the engine began it, until the first byte moved; from then on, until the
   * last one had; in how many pieces, at the side that plans them (send in write mode, receive in
   * read mode). */
  uint64_t waited_us;
  uint64_t moving_us;
  uint64_t segments;
  char backend[8]; /* send and receive: of the link with the first rank, "shm"; NUL-terminated */
} troupe_outcome;

/* Readable while events wait, for poll, epoll, select; level-triggered. The engine's: never read or
 * close it. It stays until `troupe_engine_free`. */
TROUPE_API troupe_status troupe_engine_event_fd(const troupe_engine* engine, int* fd);
/* Up to `capacity` events, oldest first, into `events`, an array of `event_size` =
 * sizeof(troupe_event) each; `count` says how many. Waits up to `timeout_ms` for the first one; 0:
 * not at all. No event in that time is TROUPE_OK with count 0. Events of one operation come in
 * order, those of members before them; those of an operation that a thread waits for come to that
 * one. */
TROUPE_API troupe_status troupe_engine_take(troupe_engine* engine, troupe_event* events,
                                            size_t event_size, size_t capacity, uint64_t timeout_ms,
                                            size_t* count);
/* Waits until the operation has ended and, of a send or a receive, the network can touch its blocks
 * no more, but at most `timeout_ms` (UINT64_MAX: however long): TROUPE_TIMED_OUT then. Takes all of
 * its events. Any number of threads may wait, each for another operation. Errors: that of the
 * operation; TROUPE_NOT_FOUND (never begun, or `troupe_engine_take` had its outcome),
 * TROUPE_ALREADY_EXISTS (another thread waits for it), TROUPE_ABORTED or TROUPE_INTERNAL where the
 * node was stopped and the end will not come. `outcome` NULL: it does not matter. */
TROUPE_API troupe_status troupe_engine_wait(troupe_engine* engine, troupe_operation operation,
                                            uint64_t timeout_ms, troupe_outcome* outcome);
/* Makes progress on the calling thread; `worked` (may be NULL) is 1 if something was done. See
 * TROUPE_POLLING. */
TROUPE_API troupe_status troupe_engine_poll(troupe_engine* engine, uint32_t* worked);

/* Why it failed, or why a member is in its state: a sentence, NUL-terminated, the detail's; "" of
 * anything else, or of NULL. */
TROUPE_API const char* troupe_detail_reason(const troupe_detail* detail);
/* aux of a receive, the value of a get, the payload of a call. The detail's. NULL and 0 where there
 * is nothing. */
TROUPE_API troupe_status troupe_detail_bytes(const troupe_detail* detail, const void** bytes,
                                             size_t* byte_count);
/* Blocks that the pool gave. The detail's. */
TROUPE_API troupe_status troupe_detail_blocks(const troupe_detail* detail, uint64_t* owner,
                                              const uint32_t** blocks, size_t* count);
/* A copy of the placement. Free with `troupe_placement_free`. TROUPE_NOT_FOUND: it has none. */
TROUPE_API troupe_status troupe_detail_placement(const troupe_detail* detail,
                                                 troupe_placement** placement);
/* What a call asks for; "" of anything else. The detail's. */
TROUPE_API const char* troupe_detail_method(const troupe_detail* detail);
/* The node that wants a send, or that is a member; "" of anything else. The detail's. */
TROUPE_API const char* troupe_detail_node(const troupe_detail* detail);
/* The stage of a member; "" of anything else. The detail's. */
TROUPE_API const char* troupe_detail_stage(const troupe_detail* detail);
/* What a member is known by, as it announced it. The detail's. NULL and 0 where there is nothing. */
TROUPE_API troupe_status troupe_detail_labels(const troupe_detail* detail,
                                              const troupe_label** labels, size_t* count);
TROUPE_API void troupe_detail_free(troupe_detail* detail);
/* Frees the details of `count` events and sets them to NULL. */
TROUPE_API void troupe_events_free(troupe_event* events, size_t event_size, size_t count);

/* Answers a call, once: with a payload of at most 1 MiB (`code` TROUPE_OK), or with an error and
 * its sentence. TROUPE_NOT_FOUND: answered already, or its caller is gone. A call that is never
 * answered ends at its caller's deadline, or with TROUPE_ABORTED when the engine stops. */
TROUPE_API troupe_status troupe_engine_reply(troupe_engine* engine, uint64_t call,
                                             troupe_status code, const char* sentence,
                                             const void* payload, size_t payload_size);

/* -- a cluster, as a frontend sees it */

/* Blocking calls, each bounded. A connection that broke is made again by the next call. */
typedef struct troupe_cluster troupe_cluster;

enum {
  TROUPE_LAZY = 1u << 0
}; /* connects with the first call: the supervisor may not be there yet */

typedef struct troupe_cluster_options {
  uint32_t size;
  uint32_t flags;              /* TROUPE_LAZY */
  const char* deployment_file; /* says where the supervisor is and how to be let in */
  /* This, or the file, or neither: then only a cluster of mode `none` answers. */
  const char* deployment_text;
  const char* host;    /* of the supervisor, in place of the deployment's; NULL: as it says */
  uint32_t port;       /* likewise; 0: as it says */
  uint32_t timeout_ms; /* of every step that has no deadline of its own; 0: 3000 */
} troupe_cluster_options;

/* Errors of this and every call below: TROUPE_PEER_UNREACHABLE, TROUPE_DEADLINE, TROUPE_PEER_LOST,
 * TROUPE_UNAUTHORIZED, and those that the other side answers with. The supervisor is found, or begun, as
 * troupe_engine_start does it; when it is gone, the next call does so again, at most once a second. */
TROUPE_API troupe_status troupe_cluster_connect(const troupe_cluster_options* options,
                                                troupe_cluster** cluster);
TROUPE_API void troupe_cluster_free(troupe_cluster* cluster);
/* Every node that registered, its state and newest load, as one object of JSON: cluster, epoch,
 * supervisor, and nodes as in `troupe status --json`, without what only the nodes know. Free with
 * `troupe_free`. */
TROUPE_API troupe_status troupe_cluster_members(troupe_cluster* cluster, char** json);

/* Members of a cluster, as they were when they were asked for. */
typedef struct troupe_members troupe_members;

enum { /* state */
       TROUPE_JOINING = 1,
       TROUPE_UP = 2,
       TROUPE_SUSPECT = 3,
       TROUPE_DOWN = 4, /* in an event: it reports a failure of its own, and its process lives */
       TROUPE_LEAVING = 5,
       TROUPE_GONE = 6 /* in an event alone: it left, was lost, or another life has its name */
};

typedef struct troupe_member_info {
  uint32_t size;
  uint32_t state;        /* TROUPE_JOINING, ... */
  const char* reason;    /* why it is in that state; belongs to the members */
  uint32_t queue_length; /* requests that wait or run in its engine, as it said last */
  uint32_t reserved;
} troupe_member_info;

/* The members that are not down and whose node carries exactly this label; none is TROUPE_OK with a
 * count of 0. Free with `troupe_members_free`. */
TROUPE_API troupe_status troupe_cluster_find_label(troupe_cluster* cluster, const char* key,
                                                   const char* value, troupe_members** members);
TROUPE_API troupe_status troupe_members_count(const troupe_members* members, uint32_t* count);
TROUPE_API troupe_status troupe_members_read(const troupe_members* members, uint32_t index,
                                             troupe_member_info* info);
TROUPE_API troupe_status troupe_members_node(const troupe_members* members, uint32_t index,
                                             troupe_node_info* node);
TROUPE_API void troupe_members_free(troupe_members* members);

/* What one node owns and does, asked of that node, as `troupe_engine_report`. TROUPE_NOT_FOUND. */
TROUPE_API troupe_status troupe_cluster_report(troupe_cluster* cluster, const char* node,
                                               char** json);
/* What happened in the cluster after event number `after` (0: all that is kept), at most `max` of
 * them, oldest first, as one object of JSON: supervisor_incarnation, newest, and events with
 * sequence, unix_ms, event, node, incarnation, epoch, reason, as in `troupe events --json`. */
TROUPE_API troupe_status troupe_cluster_events(troupe_cluster* cluster, uint64_t after,
                                               uint32_t max, char** json);
/* Where a request goes. Free with `troupe_placement_free`; when the request ended,
 * `troupe_cluster_finished`. */
TROUPE_API troupe_status troupe_cluster_place(troupe_cluster* cluster,
                                              const troupe_placement_request* request,
                                              troupe_placement** placement);
TROUPE_API troupe_status troupe_cluster_finished(troupe_cluster* cluster, const char* request);
/* A small request to the engine behind a node, at most 1 MiB each way, answered within `timeout_ms`
 * (0: the cluster's). The answer is freed with `troupe_free`. */
TROUPE_API troupe_status troupe_cluster_call(troupe_cluster* cluster, const char* node,
                                             const char* method, const void* payload,
                                             size_t payload_size, uint32_t timeout_ms,
                                             void** answer, size_t* answer_size);
/* Places nothing more on a node's replica and lets it leave when nothing is left there, or at the
 * deadline. */
TROUPE_API troupe_status troupe_cluster_drain(troupe_cluster* cluster, const char* node,
                                              uint32_t deadline_ms);
TROUPE_API troupe_status troupe_cluster_cancel_drain(troupe_cluster* cluster, const char* node);

/* -- carrying a request to its one outcome, whatever dies meanwhile */

/* Where a request is at present. Everything in it belongs to Troupe and lasts for the callback. */
typedef struct troupe_attempt {
  uint32_t size;
  uint32_t reserved;
  const troupe_placement* where;
  const char* source; /* what both engines have to call the request in `send` and `receive` */
  uint64_t left_ms;   /* of the request's deadline */
} troupe_attempt;

typedef struct troupe_call_draft troupe_call_draft;
/* Says what a callback's node is called with. Copied. Only within the callback. */
TROUPE_API troupe_status troupe_call_draft_set(troupe_call_draft* draft, const char* method,
                                               const void* payload, size_t payload_size);

/* Called on the thread that carries, once for each rank; must not block, and must not end the
 * thread. What it returns other than TROUPE_OK gives the request up: the outcome is TROUPE_ABORTED
 * naming the code. */
typedef troupe_status (*troupe_carried_call)(void* user, const troupe_attempt* now,
                                             const troupe_node_info* node,
                                             troupe_call_draft* draft);

/* Gives up what is being carried, from any thread. */
typedef struct troupe_stop troupe_stop;
TROUPE_API troupe_status troupe_stop_new(troupe_stop** stop);
TROUPE_API troupe_status troupe_stop_request(troupe_stop* stop);
TROUPE_API void troupe_stop_free(troupe_stop* stop);

typedef struct troupe_carried_request {
  uint32_t size;
  /* 1: limits.retry_window is not 0: a prefill side outlives its decode side. */
  uint32_t source_is_kept;
  const char* request; /* 1 to 240 bytes; may be used again */
  const char* from;
  const char* to;
  const char* affinity; /* may be NULL */
  uint64_t deadline_ms; /* 0: 30 s */
  troupe_carried_call prefill;
  troupe_carried_call decode;
  troupe_carried_call abort; /* NULL: the side that lost is left to end by itself */
  void* user;                /* given to the callbacks */
  const troupe_stop* stop;   /* may be NULL */
} troupe_carried_request;

typedef struct troupe_carried troupe_carried;

typedef struct troupe_carried_info {
  uint32_t size;
  uint32_t attempts;
  uint32_t prefills; /* how often it was computed */
  uint32_t prefill_count;
  uint32_t decode_count;
  uint32_t reserved;
} troupe_carried_info;

/* Places the request, calls the engines of both sides, and goes on elsewhere where nodes are lost
 * to it. Returns with the one outcome, at the deadline at the latest. Errors: the engines' own;
 * TROUPE_DEADLINE; TROUPE_PEER_LOST (the deployment's retry budget is used up); TROUPE_ABORTED;
 * TROUPE_INVALID_CONFIG. Free with `troupe_carried_free`. */
TROUPE_API troupe_status troupe_cluster_carry(troupe_cluster* cluster,
                                              const troupe_carried_request* request,
                                              troupe_carried** outcome);
TROUPE_API troupe_status troupe_carried_read(const troupe_carried* outcome,
                                             troupe_carried_info* info);
/* The answer of rank `index` of a side. Empty: a prefill that was lost when decode had all it
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
