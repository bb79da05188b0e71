#ifndef TROUPE_IO_H
#define TROUPE_IO_H

/*
 * One-sided agents in C, for programs that bring a protocol of their own and want memory moved. An
 * agent registers memory, describes it in bytes that the program carries to its peers, and reads
 * and writes the memory that its peers have described. No cluster, no deployment. docs/agents.md
 * has an example.
 *
 *     troupe_io_options options = {.size = sizeof options, .name = "prefill"};
 *     troupe_io_agent *agent = NULL;
 *     if (troupe_io_agent_create(&options, &agent) != TROUPE_OK) puts(troupe_last_error());
 *
 * Errors, sizes, ownership, threads, forks and units are those of troupe.h. Ids are numbers, never
 * 0 and never reused; a call with an unknown id fails with TROUPE_NOT_FOUND. A call that would
 * exceed a bound fails with TROUPE_OVERLOADED. Arguments are copied before a call returns;
 * registered memory is not. Only calls with a timeout wait, and `troupe_io_agent_close`.
 */

#include "troupe/troupe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct troupe_io_agent troupe_io_agent;

/* One registration of memory. The number is random: a peer cannot guess that of a memory that was
 * not described to it. */
typedef uint64_t troupe_io_memory;
/* One life of another agent, or of this agent itself. */
typedef uint64_t troupe_io_peer;
/* A checked list of places in memory. */
typedef uint64_t troupe_io_plan;
typedef uint64_t troupe_io_transfer;

enum { TROUPE_IO_OPEN = 0, TROUPE_IO_SECRET = 1, TROUPE_IO_TLS = 2 }; /* security */
enum { TROUPE_IO_SHM = 1, TROUPE_IO_TCP = 2, TROUPE_IO_RDMA = 3, TROUPE_IO_XGMI = 4 }; /* backend */
enum { TROUPE_IO_MAY_READ = 1, TROUPE_IO_MAY_WRITE = 2 }; /* rights of peers: one, or both (3) */
enum { TROUPE_IO_WRITE = 1, TROUPE_IO_READ = 2 }; /* direction: to the peer, from the peer */

/* -- an agent */

typedef struct troupe_io_options {
  uint32_t size;
  uint32_t flags;   /* TROUPE_POLLING: `troupe_io_poll` and the calls that wait make progress */
  const char* name; /* 1 to 256 bytes; peers see it in notices */
  /* The address that peers dial; not the wildcard address. An address beyond loopback needs
   * TROUPE_IO_TLS. NULL: 127.0.0.1. */
  const char* host;
  uint32_t port;     /* that peers dial; 0: the OS chooses */
  uint32_t security; /* TROUPE_IO_OPEN, TROUPE_IO_SECRET, TROUPE_IO_TLS */
  /* For TROUPE_IO_TLS: the cluster that a certificate must name, as the URI `troupe:CLUSTER`. Else
   * NULL. */
  const char* cluster;
  /* Paths, as in docs/security.md. NULL if the mode does not need the file. */
  const char* secret;
  const char* certificate;
  const char* key;
  const char* ca;
  /* The backends that links may use, the preferred one first; none: the best one that reaches the
   * peer. */
  const uint32_t* backends;
  size_t backend_count;
  uint32_t threads;            /* that make progress; 0: 1, with TROUPE_POLLING none */
  uint32_t lanes;              /* sockets or queue pairs of a link; 0: 4 */
  uint32_t peer_silence_ms;    /* a peer silent for this long is lost; 0: 3000 */
  uint32_t connect_timeout_ms; /* for a greeting, and for making a link; 0: 2000 */
  uint64_t max_peers;          /* 0: 4096 */
  uint64_t max_transfers;      /* 0: 65536 */
  uint64_t max_notices;        /* unread notices of one peer; 0: 65536 */
  uint64_t max_notice_bytes;   /* in those; 0: 16 MiB */
  /* How long a peer may leave the oldest question for its memory unanswered, which it may register
   * with a device first; 0: 30000. */
  uint32_t grant_timeout_ms;
  uint32_t reserved; /* 0 */
} troupe_io_options;

/* TROUPE_INVALID_CONFIG, TROUPE_ALREADY_EXISTS (the port is taken), TROUPE_UNAUTHORIZED (a
 * certificate), TROUPE_BACKEND_UNAVAILABLE, TROUPE_OVERLOADED. */
TROUPE_API troupe_status troupe_io_agent_create(const troupe_io_options* options,
                                                troupe_io_agent** agent);
/* Deregisters all memory and ends the agent: when this returns, no peer touches the memory any
 * more. Waits for calls of other threads, whose waits end soon, and, 5 s at most, for peers in the
 * middle of a copy. Later calls fail with TROUPE_ABORTED. A second call does nothing. */
TROUPE_API troupe_status troupe_io_agent_close(troupe_io_agent* agent);
/* Closes and frees the agent. */
TROUPE_API void troupe_io_agent_free(troupe_io_agent* agent);
/* What the agent owns, which backends it can use and which peers it knows, as one JSON object.
 * `notices_dropped` counts unread notices of peers that had left, dropped to make room. Free with
 * `troupe_free`. */
TROUPE_API troupe_status troupe_io_report(const troupe_io_agent* agent, char** json);

/* -- memory */

/* Registers memory of the host or of a GPU for peers with these rights. The caller owns the memory
 * and keeps it until `troupe_io_deregister` succeeds, or the agent is closed. Registrations may
 * overlap or be equal: each is a memory of its own, with rights of its own. `name` appears in
 * messages; NULL: "". */
TROUPE_API troupe_status troupe_io_register(troupe_io_agent* agent, void* data, size_t size,
                                            const char* name, uint32_t rights,
                                            troupe_io_memory* memory);
/* Allocates zeroed memory of the host, which peers of this host can map. Freed by
 * `troupe_io_deregister`. */
TROUPE_API troupe_status troupe_io_allocate(troupe_io_agent* agent, uint64_t size, const char* name,
                                            uint32_t rights, troupe_io_memory* memory);
TROUPE_API troupe_status troupe_io_bytes(const troupe_io_agent* agent, troupe_io_memory memory,
                                         troupe_memory* bytes);
/* Withdraws the memory: no new transfer may use it; this agent's transfers that use it fail with
 * TROUPE_ABORTED, peers' transfers with TROUPE_GRANT_REVOKED. TROUPE_OK: nothing touches the memory
 * any more. TROUPE_DEADLINE: a peer or a transfer still may; the memory stays withdrawn, call
 * again. GPU memory that a peer has used over xgmi stays mapped there: remove such peers before you
 * free it. */
TROUPE_API troupe_status troupe_io_deregister(troupe_io_agent* agent, troupe_io_memory memory,
                                              uint64_t timeout_ms);

/* -- peers */

/* Describes this agent and these memories (0 of them: all) for a peer, in at most 1 MiB. Valid for
 * this life of the agent, and secret: its holder may use the memories in it and greet other agents
 * as this one. Free with `troupe_free`. */
TROUPE_API troupe_status troupe_io_describe(const troupe_io_agent* agent,
                                            const troupe_io_memory* only, size_t count,
                                            void** descriptor, size_t* descriptor_size);
/* Adds the agent that made the descriptor. Another descriptor of the same life adds its memories
 * and gives the same id. Sends nothing. TROUPE_INVALID_CONFIG (not a descriptor),
 * TROUPE_VERSION_MISMATCH, TROUPE_UNAUTHORIZED (a forged token of a known life). */
TROUPE_API troupe_status troupe_io_add_peer(troupe_io_agent* agent, const void* descriptor,
                                            size_t descriptor_size, troupe_io_peer* peer);
/* Forgets the peer and its unread notices. Its transfers fail with TROUPE_ABORTED. */
TROUPE_API troupe_status troupe_io_remove_peer(troupe_io_agent* agent, troupe_io_peer peer);
/* Makes the link now rather than at the first transfer, and waits for it. `backend` (may be NULL):
 * TROUPE_IO_SHM, ... */
TROUPE_API troupe_status troupe_io_connect(troupe_io_agent* agent, troupe_io_peer peer,
                                           uint64_t timeout_ms, uint32_t* backend);

typedef struct troupe_io_remote_memory {
  uint64_t number; /* the `troupe_io_memory` of its owner */
  uint64_t address;
  uint64_t length;
  uint32_t rights; /* TROUPE_IO_MAY_READ, TROUPE_IO_MAY_WRITE, both */
  uint32_t reserved;
} troupe_io_remote_memory;

/* Up to `capacity` of the memories that the peer has described, in that order, without those known
 * to be deregistered; `count` says how many there are. */
TROUPE_API troupe_status troupe_io_remote_memories(const troupe_io_agent* agent,
                                                   troupe_io_peer peer,
                                                   troupe_io_remote_memory* memories,
                                                   size_t capacity, size_t* count);

/* -- plans */

/* A range of a memory of this agent, repeated `count` times (0: once), with `stride` bytes from one
 * start to the next. */
typedef struct troupe_io_piece {
  troupe_io_memory memory;
  uint64_t offset;
  uint64_t length;
  uint64_t stride;
  uint32_t count;
  uint32_t reserved;
} troupe_io_piece;

/* Such a range by its address in the owner's process. */
typedef struct troupe_io_entry {
  uint64_t address;
  uint64_t length;
  uint64_t stride;
  uint32_t count;
  uint32_t reserved;
} troupe_io_entry;

/* A list of places in memory of this agent. TROUPE_OUT_OF_RANGE, TROUPE_NOT_FOUND. */
TROUPE_API troupe_status troupe_io_prepare_pieces(troupe_io_agent* agent,
                                                  const troupe_io_piece* pieces, size_t count,
                                                  troupe_io_plan* plan);
/* As `troupe_io_prepare_pieces`, by address. If several memories contain an entry, the newest
 * serves it. TROUPE_UNKNOWN_REGION: no memory contains a whole entry. */
TROUPE_API troupe_status troupe_io_prepare_local(troupe_io_agent* agent,
                                                 const troupe_io_entry* entries, size_t count,
                                                 troupe_io_plan* plan);
/* A list of places in memory of the peer. If several memories contain an entry, the one described
 * last serves it. TROUPE_UNKNOWN_REGION. */
TROUPE_API troupe_status troupe_io_prepare_remote(troupe_io_agent* agent, troupe_io_peer peer,
                                                  const troupe_io_entry* entries, size_t count,
                                                  troupe_io_plan* plan);
/* A memory of this agent and one of the peer, by `number`, for `troupe_io_move`. */
TROUPE_API troupe_status troupe_io_session(troupe_io_agent* agent, troupe_io_memory memory,
                                           troupe_io_peer peer, uint64_t number,
                                           troupe_io_plan* plan);
/* Releases a plan. Transfers made from it go on. */
TROUPE_API troupe_status troupe_io_release_plan(troupe_io_agent* agent, troupe_io_plan plan);

/* -- transfers */

enum { TROUPE_IO_MERGE = 1u << 0 }; /* neighbours that are contiguous on both sides move as one */

/* Makes a transfer between entry `local_index[i]` of one plan and entry `remote_index[i]` of the
 * other; with 0 indices on a side, all of its entries in order. Both entries of a pair have the
 * same number of bytes. TROUPE_OUT_OF_RANGE, TROUPE_UNAUTHORIZED (the rights of a remote memory do
 * not allow the direction). */
TROUPE_API troupe_status troupe_io_make(troupe_io_agent* agent, uint32_t direction,
                                        troupe_io_plan local, const uint32_t* local_index,
                                        size_t local_count, troupe_io_plan remote,
                                        const uint32_t* remote_index, size_t remote_count,
                                        uint32_t flags, troupe_io_transfer* transfer);
/* Starts the transfer; it may be started again after its end. The peer gets the notice (at most 64
 * KiB; 0: none) when every byte has arrived. If a transfer fails with TROUPE_ABORTED,
 * TROUPE_DEADLINE, TROUPE_LINK_BROKEN or TROUPE_PEER_LOST, its bytes and the notice may still have
 * arrived. `deadline_ms` 0: none. TROUPE_OVERLOADED: the transfer is active, or the peer has too
 * many unread notices. TROUPE_ABORTED: a local memory was deregistered. Other failures are in the
 * transfer's status: `troupe_io_read_status`. */
TROUPE_API troupe_status troupe_io_post(troupe_io_agent* agent, troupe_io_transfer transfer,
                                        const void* notice, size_t notice_size,
                                        uint64_t deadline_ms);

/* Offsets count from the beginning of each memory of a session. */
typedef struct troupe_io_segment {
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
  uint64_t local_stride;
  uint64_t remote_stride;
  uint32_t count; /* 0: once */
  uint32_t reserved;
} troupe_io_segment;

/* `troupe_io_make` and `troupe_io_post` in one, over a session. */
TROUPE_API troupe_status troupe_io_move(troupe_io_agent* agent, uint32_t direction,
                                        troupe_io_plan session, const troupe_io_segment* segments,
                                        size_t count, const void* notice, size_t notice_size,
                                        uint64_t deadline_ms, troupe_io_transfer* transfer);

enum {                          /* state */
       TROUPE_IO_PREPARED = 0,  /* not posted yet */
       TROUPE_IO_ACTIVE = 1,    /* bytes may move */
       TROUPE_IO_DONE = 2,      /* every byte has arrived */
       TROUPE_IO_FAILED = 3,    /* with `code`; the destination's bytes are undefined */
       TROUPE_IO_CANCELLED = 4, /* by `troupe_io_cancel`; the destination's bytes are undefined */
};

typedef struct troupe_io_status {
  uint32_t size;
  uint32_t state; /* TROUPE_IO_PREPARED, ... */
  uint64_t bytes; /* known to have moved */
  /* Why it failed: TROUPE_PEER_UNREACHABLE, TROUPE_PEER_LOST, TROUPE_LINK_BROKEN,
   * TROUPE_STALE_INCARNATION, TROUPE_GRANT_REVOKED, TROUPE_UNAUTHORIZED, TROUPE_OUT_OF_RANGE,
   * TROUPE_DEADLINE, TROUPE_ABORTED, TROUPE_BACKEND_UNAVAILABLE, TROUPE_OVERLOADED (the link
   * accepts no more at present; post again). TROUPE_OK unless it failed. */
  troupe_status code;
  uint32_t bad_count; /* entries that may not have arrived; 0 unless it failed or was cancelled */
  char reason[512];   /* the sentence of `code`, NUL-terminated, truncated if longer */
} troupe_io_status;

/* Reads the transfer's status and up to `capacity` of its bad entries, by number. `bad` may be NULL
 * with `capacity` 0. */
TROUPE_API troupe_status troupe_io_read_status(const troupe_io_agent* agent,
                                               troupe_io_transfer transfer,
                                               troupe_io_status* status, uint32_t* bad,
                                               size_t capacity);

enum { TROUPE_IO_ALL = 0, TROUPE_IO_ANY = 1 }; /* how_many */

/* Waits until all of the transfers, or any one, have ended, at most `timeout_ms` (UINT64_MAX: no
 * limit): then TROUPE_TIMED_OUT. `ended` (may be NULL) says how many have ended, also after
 * TROUPE_TIMED_OUT; unknown transfers count as ended. Each transfer's status says how it ended. */
TROUPE_API troupe_status troupe_io_wait(troupe_io_agent* agent, const troupe_io_transfer* transfers,
                                        size_t count, uint32_t how_many, uint64_t timeout_ms,
                                        size_t* ended);

/* `troupe_io_wait` for one transfer and `troupe_io_read_status` in one call, which saves time on
 * small transfers. `status` is set after TROUPE_TIMED_OUT, too. */
TROUPE_API troupe_status troupe_io_finish(troupe_io_agent* agent, troupe_io_transfer transfer,
                                          uint64_t timeout_ms, troupe_io_status* status);
/* `troupe_io_post` and `troupe_io_finish` in one call. From the second run over a link on, where
 * the processor copies (`shm`), the calling thread copies up to 16 MiB itself, unless `timeout_ms`
 * is 0. If the transfer cannot be posted, `status` does not change. */
TROUPE_API troupe_status troupe_io_run(troupe_io_agent* agent, troupe_io_transfer transfer,
                                       const void* notice, size_t notice_size, uint64_t deadline_ms,
                                       uint64_t timeout_ms, troupe_io_status* status);
/* Ends the transfer as TROUPE_IO_CANCELLED, unless it ends otherwise first. After its end none of
 * its bytes move in memory of this agent. */
TROUPE_API troupe_status troupe_io_cancel(troupe_io_agent* agent, troupe_io_transfer transfer);
/* Releases a transfer. TROUPE_OVERLOADED: it is active. */
TROUPE_API troupe_status troupe_io_release_transfer(troupe_io_agent* agent,
                                                    troupe_io_transfer transfer);

/* -- notices */

/* Sends a notice without a transfer, in order with other calls of this function for that peer. The
 * notice waits for the link, which the call makes if there is none; TROUPE_IO_PEER_LOST means that
 * waiting notices were dropped. TROUPE_OK does not mean that the notice has arrived: notices on
 * their way when the link breaks are lost (TROUPE_IO_NOTICES_LOST). TROUPE_OVERLOADED (the peer has
 * too many unread notices), TROUPE_OUT_OF_RANGE (more than 64 KiB), TROUPE_STALE_INCARNATION,
 * TROUPE_UNAUTHORIZED. */
TROUPE_API troupe_status troupe_io_notify(troupe_io_agent* agent, troupe_io_peer peer,
                                          const void* bytes, size_t byte_count);

typedef struct troupe_io_notice {
  troupe_io_peer peer; /* its sender */
  const char* from;    /* the sender's name */
  const void* bytes;
  size_t byte_count;
} troupe_io_notice;

/* Takes up to `capacity` notices, oldest first, into `notices`, an array of `notice_size` =
 * sizeof(troupe_io_notice) each; `count` says how many. Waits up to `timeout_ms` for the first one;
 * no notice in that time is TROUPE_OK with count 0. Free their contents with
 * `troupe_io_notices_free`. */
TROUPE_API troupe_status troupe_io_take_notices(troupe_io_agent* agent, troupe_io_notice* notices,
                                                size_t notice_size, size_t capacity,
                                                uint64_t timeout_ms, size_t* count);
TROUPE_API void troupe_io_notices_free(troupe_io_notice* notices, size_t notice_size, size_t count);

/* -- events */

enum { /* kind */
       TROUPE_IO_TRANSFER_ENDED = 1,
       TROUPE_IO_PEER_LOST = 2,
       TROUPE_IO_NOTICES_WAIT = 3, /* comes again only after all notices were taken */
       /* A link ended, and notices of `troupe_io_notify` on that link may be lost. The peer lives.
          TROUPE_IO_PEER_LOST loses notices in the same way. */
       TROUPE_IO_NOTICES_LOST = 4
};

typedef struct troupe_io_event {
  uint32_t kind;      /* TROUPE_IO_TRANSFER_ENDED, ...; ignore kinds that you do not know */
  troupe_status code; /* of TROUPE_IO_PEER_LOST: why */
  troupe_io_transfer transfer; /* of TROUPE_IO_TRANSFER_ENDED */
  troupe_io_peer peer;         /* of TROUPE_IO_PEER_LOST, TROUPE_IO_NOTICES_LOST */
  /* The sentence of `code`; NULL: none, or no memory for it. `troupe_io_events_free`. */
  char* reason;
} troupe_io_event;

/* A descriptor, readable while events wait, for poll, epoll, select; level-triggered. It belongs to
 * the agent: never read or close it. It stays until the agent is closed. */
TROUPE_API troupe_status troupe_io_event_fd(const troupe_io_agent* agent, int* fd);
/* As `troupe_io_take_notices`, for events. */
TROUPE_API troupe_status troupe_io_take(troupe_io_agent* agent, troupe_io_event* events,
                                        size_t event_size, size_t capacity, uint64_t timeout_ms,
                                        size_t* count);
TROUPE_API void troupe_io_events_free(troupe_io_event* events, size_t event_size, size_t count);
/* Makes progress on the calling thread; sets `worked` (may be NULL) to 1 if it did something. */
TROUPE_API troupe_status troupe_io_poll(troupe_io_agent* agent, uint32_t* worked);

#ifdef __cplusplus
}
#endif

#endif
