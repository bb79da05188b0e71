#ifndef TROUPE_IO_H
#define TROUPE_IO_H

/*
 * One-sided agents in C, for programs that bring a protocol of their own and want memory moved. An
 * agent registers memory, describes it in bytes that the program carries to its peers, and reads
 * and writes what peers have described. No cluster, no deployment. docs/agents.md has an example.
 *
 *     troupe_io_options options = {.size = sizeof options, .name = "prefill"};
 *     troupe_io_agent *agent = NULL;
 *     if (troupe_io_agent_create(&options, &agent) != TROUPE_OK) puts(troupe_last_error());
 *
 * Errors, sizes, ownership, threads, forks and units are those of troupe.h. Ids are numbers, never 0
 * and never used again; a call with an unknown one fails with TROUPE_NOT_FOUND. A bound that is
 * reached fails a call with TROUPE_OVERLOADED. Arguments are copied before a call returns; registered
 * memory is not. Only calls that are given a time wait, and the end of the agent.
 */

#include "troupe/troupe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct troupe_io_agent troupe_io_agent;

/* One registration of memory. Drawn: nobody guesses the number of a memory that was not described
 * to it. */
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
  /* The address that peers dial; not that of all interfaces. One beyond loopback needs
   * TROUPE_IO_TLS. NULL: 127.0.0.1. */
  const char* host;
  uint32_t port;     /* that peers dial; 0: the OS chooses */
  uint32_t security; /* TROUPE_IO_OPEN, TROUPE_IO_SECRET, TROUPE_IO_TLS */
  /* Of TROUPE_IO_TLS: what a certificate must name, by URI `troupe:CLUSTER`. Else NULL. */
  const char* cluster;
  /* Paths, as in docs/security.md. NULL where the mode needs none. */
  const char* secret;
  const char* certificate;
  const char* key;
  const char* ca;
  /* That links may use, the preferred one first; none: the best that reaches the peer. */
  const uint32_t* backends;
  size_t backend_count;
  uint32_t threads;            /* that make progress; 0: 1, with TROUPE_POLLING none */
  uint32_t lanes;              /* sockets or queue pairs of a link; 0: 4 */
  uint32_t peer_silence_ms;    /* a peer that says nothing for so long is lost; 0: 3000 */
  uint32_t connect_timeout_ms; /* of a greeting, and of making a link; 0: 2000 */
  uint64_t max_peers;          /* 0: 4096 */
  uint64_t max_transfers;      /* 0: 65536 */
  uint64_t max_notices;        /* unread ones of one peer; 0: 65536 */
  uint64_t max_notice_bytes;   /* in those; 0: 16 MiB */
} troupe_io_options;

/* TROUPE_INVALID_CONFIG, TROUPE_ALREADY_EXISTS (the port is taken), TROUPE_UNAUTHORIZED (a
 * certificate), TROUPE_BACKEND_UNAVAILABLE, TROUPE_OVERLOADED. */
TROUPE_API troupe_status troupe_io_agent_create(const troupe_io_options* options,
                                                troupe_io_agent** agent);
/* Takes all memory back and ends the agent: nobody touches the memory when this returns. Waits for
 * calls of other threads, of which those that wait, for whatever, end soon, and for peers in the middle
 * of a copy, 5 s at most. Calls from then on fail with TROUPE_ABORTED. Again: nothing. */
TROUPE_API troupe_status troupe_io_agent_close(troupe_io_agent* agent);
/* Closes it and forgets it. */
TROUPE_API void troupe_io_agent_free(troupe_io_agent* agent);
/* What the agent owns, which backends it can use and which peers it knows, as one object of JSON. Free with `troupe_free`. */
TROUPE_API troupe_status troupe_io_report(const troupe_io_agent* agent, char** json);

/* -- memory */

/* Registers memory of the host or of a GPU for peers with these rights. The caller owns the memory
 * and keeps it until `troupe_io_deregister` succeeds, or the agent is closed. Registrations may overlap
 * or be equal: each is a memory of its own, with rights of its own. `name` stands in messages; NULL:
 * "". */
TROUPE_API troupe_status troupe_io_register(troupe_io_agent* agent, void* data, size_t size,
                                            const char* name, uint32_t rights,
                                            troupe_io_memory* memory);
/* Allocates zeroed memory of the host, which peers of this host can map. Freed by
 * `troupe_io_deregister`. */
TROUPE_API troupe_status troupe_io_allocate(troupe_io_agent* agent, uint64_t size, const char* name,
                                            uint32_t rights, troupe_io_memory* memory);
TROUPE_API troupe_status troupe_io_bytes(const troupe_io_agent* agent, troupe_io_memory memory,
                                         troupe_memory* bytes);
/* Withdraws the memory: no transfer begins to use it; this agent's transfers that use it fail with
 * TROUPE_ABORTED, peers' transfers with TROUPE_GRANT_REVOKED. TROUPE_OK: nobody touches it any more.
 * TROUPE_DEADLINE: a peer or a transfer still may; it stays withdrawn, call again. Memory of a GPU that
 * a peer has used over xgmi stays mapped there: remove such peers before it is freed. */
TROUPE_API troupe_status troupe_io_deregister(troupe_io_agent* agent, troupe_io_memory memory,
                                              uint64_t timeout_ms);

/* -- peers */

/* Describes this agent and these memories (0 of them: all) for a peer, in at most 1 MiB. Good for this
 * life of the agent, and secret: who has it may use what it names, and greet others as this agent. Free
 * with `troupe_free`. */
TROUPE_API troupe_status troupe_io_describe(const troupe_io_agent* agent,
                                            const troupe_io_memory* only, size_t count,
                                            void** descriptor, size_t* descriptor_size);
/* Learns of the agent that made the descriptor. Another one of the same life adds its memories and
 * gives the same id. Sends nothing. TROUPE_INVALID_CONFIG (no descriptor), TROUPE_VERSION_MISMATCH,
 * TROUPE_UNAUTHORIZED (a forged token of a known life). */
TROUPE_API troupe_status troupe_io_add_peer(troupe_io_agent* agent, const void* descriptor,
                                            size_t descriptor_size, troupe_io_peer* peer);
/* Forgets the peer, its unread notices too. Its transfers fail with TROUPE_ABORTED. */
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

/* Up to `capacity` of the memories that the peer has described, in that order, without those that it
 * is known to have deregistered; `count` says how many there are. */
TROUPE_API troupe_status troupe_io_remote_memories(const troupe_io_agent* agent,
                                                   troupe_io_peer peer,
                                                   troupe_io_remote_memory* memories,
                                                   size_t capacity, size_t* count);

/* -- plans */

/* A range of a memory of this agent, repeated `count` times (0: once) with `stride` bytes from one
 * beginning to the next. */
typedef struct troupe_io_piece {
  troupe_io_memory memory;
  uint64_t offset;
  uint64_t length;
  uint64_t stride;
  uint32_t count;
  uint32_t reserved;
} troupe_io_piece;

/* The same range by its address in the owner's process. */
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
/* The same by address. Of several memories that hold an entry the newest serves it.
 * TROUPE_UNKNOWN_REGION: no memory holds an entry whole. */
TROUPE_API troupe_status troupe_io_prepare_local(troupe_io_agent* agent,
                                                 const troupe_io_entry* entries, size_t count,
                                                 troupe_io_plan* plan);
/* A list of places in memory of the peer. Of several memories that hold an entry the one that was
 * described last serves it. TROUPE_UNKNOWN_REGION. */
TROUPE_API troupe_status troupe_io_prepare_remote(troupe_io_agent* agent, troupe_io_peer peer,
                                                  const troupe_io_entry* entries, size_t count,
                                                  troupe_io_plan* plan);
/* A memory of this agent and one of the peer, by `number`, for `troupe_io_move`. */
TROUPE_API troupe_status troupe_io_session(troupe_io_agent* agent, troupe_io_memory memory,
                                           troupe_io_peer peer, uint64_t number,
                                           troupe_io_plan* plan);
/* Transfers that were made of the plan go on. */
TROUPE_API troupe_status troupe_io_release_plan(troupe_io_agent* agent, troupe_io_plan plan);

/* -- transfers */

enum { TROUPE_IO_MERGE = 1u << 0 }; /* neighbours that are contiguous on both sides move as one */

/* A transfer between entry `local_index[i]` of one plan and entry `remote_index[i]` of the other; with
 * 0 indices on a side, all of its entries in order. The entries of a pair have equally many bytes.
 * TROUPE_OUT_OF_RANGE, TROUPE_UNAUTHORIZED (the rights of a remote memory do not allow the
 * direction). */
TROUPE_API troupe_status troupe_io_make(troupe_io_agent* agent, uint32_t direction,
                                        troupe_io_plan local, const uint32_t* local_index,
                                        size_t local_count, troupe_io_plan remote,
                                        const uint32_t* remote_index, size_t remote_count,
                                        uint32_t flags, troupe_io_transfer* transfer);
/* Starts the transfer; once more after its end. The peer gets the notice (at most 64 KiB; 0: none) when
 * every byte is where it belongs. Of a transfer that fails with TROUPE_ABORTED, TROUPE_DEADLINE,
 * TROUPE_LINK_BROKEN or TROUPE_PEER_LOST the bytes and the notice may have arrived. `deadline_ms` 0:
 * none. TROUPE_OVERLOADED: it is active, or the peer has too many unread notices. TROUPE_ABORTED: a
 * local memory was deregistered. Other failures are the transfer's: `troupe_io_read_status`. */
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
       TROUPE_IO_DONE = 2,      /* every byte is where it belongs */
       TROUPE_IO_FAILED = 3,    /* for `code`; the destination's bytes are undefined */
       TROUPE_IO_CANCELLED = 4, /* by `troupe_io_cancel`; the destination's bytes are undefined */
};

typedef struct troupe_io_status {
  uint32_t size;
  uint32_t state; /* TROUPE_IO_PREPARED, ... */
  uint64_t bytes; /* moved for certain */
  /* Why it failed: TROUPE_PEER_UNREACHABLE, TROUPE_PEER_LOST, TROUPE_LINK_BROKEN,
   * TROUPE_STALE_INCARNATION, TROUPE_GRANT_REVOKED, TROUPE_UNAUTHORIZED, TROUPE_OUT_OF_RANGE,
   * TROUPE_DEADLINE, TROUPE_ABORTED, TROUPE_BACKEND_UNAVAILABLE, TROUPE_OVERLOADED (the link takes no
   * more just now; post again). TROUPE_OK unless it failed. */
  troupe_status code;
  uint32_t bad_count; /* entries that may not have arrived; 0 unless it failed or was cancelled */
  char reason[512];   /* the sentence of `code`, NUL-terminated, cut where it is longer */
} troupe_io_status;

/* How the transfer stands, and up to `capacity` of its bad entries, by number. `bad` may be NULL with
 * `capacity` 0. */
TROUPE_API troupe_status troupe_io_read_status(const troupe_io_agent* agent,
                                               troupe_io_transfer transfer,
                                               troupe_io_status* status, uint32_t* bad,
                                               size_t capacity);

enum { TROUPE_IO_ALL = 0, TROUPE_IO_ANY = 1 }; /* how_many */

/* Waits until all of the transfers, or any, have ended, at most `timeout_ms` (UINT64_MAX: however
 * long): TROUPE_TIMED_OUT then. `ended` (may be NULL) says how many have, also after TROUPE_TIMED_OUT;
 * unknown ones count. How each ended is in its status. */
TROUPE_API troupe_status troupe_io_wait(troupe_io_agent* agent, const troupe_io_transfer* transfers,
                                        size_t count, uint32_t how_many, uint64_t timeout_ms,
                                        size_t* ended);

/* `troupe_io_wait` for one transfer and `troupe_io_read_status` in one call, which counts where little
 * moves. `status` says how it stands also after TROUPE_TIMED_OUT. */
TROUPE_API troupe_status troupe_io_finish(troupe_io_agent* agent, troupe_io_transfer transfer,
                                          uint64_t timeout_ms, troupe_io_status* status);
/* `troupe_io_post` and `troupe_io_finish` in one call. From the second time over a link on the caller copies
 * up to 16 MiB itself where the processor copies (`shm`), unless `timeout_ms` is 0. Where the transfer cannot
 * be posted, `status` is as it was. */
TROUPE_API troupe_status troupe_io_run(troupe_io_agent* agent, troupe_io_transfer transfer,
                                       const void* notice, size_t notice_size, uint64_t deadline_ms,
                                       uint64_t timeout_ms, troupe_io_status* status);
/* Ends the transfer as TROUPE_IO_CANCELLED, unless it ends otherwise first. From its end on no byte of
 * it moves in memory of this agent. */
TROUPE_API troupe_status troupe_io_cancel(troupe_io_agent* agent, troupe_io_transfer transfer);
/* TROUPE_OVERLOADED: it is active. */
TROUPE_API troupe_status troupe_io_release_transfer(troupe_io_agent* agent,
                                                    troupe_io_transfer transfer);

/* -- notices */

/* Sends a notice without a transfer, in order with other calls of this for that peer. It waits for the
 * link, which the call makes if there is none; TROUPE_IO_PEER_LOST means that the waiting ones were
 * dropped. TROUPE_OK does not mean that it has arrived: those that are on their way when the link breaks
 * are lost (TROUPE_IO_NOTICES_LOST). TROUPE_OVERLOADED (the peer has too many unread),
 * TROUPE_OUT_OF_RANGE (more than 64 KiB), TROUPE_STALE_INCARNATION, TROUPE_UNAUTHORIZED. */
TROUPE_API troupe_status troupe_io_notify(troupe_io_agent* agent, troupe_io_peer peer,
                                          const void* bytes, size_t byte_count);

typedef struct troupe_io_notice {
  troupe_io_peer peer; /* its sender */
  const char* from;    /* the sender's name */
  const void* bytes;
  size_t byte_count;
} troupe_io_notice;

/* Up to `capacity` notices, oldest first, into `notices`, an array of `notice_size` =
 * sizeof(troupe_io_notice) each; `count` says how many. Waits up to `timeout_ms` for the first one;
 * none is TROUPE_OK with count 0. Free what they hold with `troupe_io_notices_free`. */
TROUPE_API troupe_status troupe_io_take_notices(troupe_io_agent* agent, troupe_io_notice* notices,
                                                size_t notice_size, size_t capacity,
                                                uint64_t timeout_ms, size_t* count);
TROUPE_API void troupe_io_notices_free(troupe_io_notice* notices, size_t notice_size, size_t count);

/* -- events */

enum { /* kind */
       TROUPE_IO_TRANSFER_ENDED = 1,
       TROUPE_IO_PEER_LOST = 2,
       TROUPE_IO_NOTICES_WAIT = 3, /* the next event of these follows once all were taken */
       /* A link ended, and notices of `troupe_io_notify` that were on it may be lost. The peer lives;
          after TROUPE_IO_PEER_LOST the same is true. */
       TROUPE_IO_NOTICES_LOST = 4
};

typedef struct troupe_io_event {
  uint32_t kind;      /* TROUPE_IO_TRANSFER_ENDED, ...; ignore kinds that you do not know */
  troupe_status code; /* of TROUPE_IO_PEER_LOST: why */
  troupe_io_transfer transfer; /* of TROUPE_IO_TRANSFER_ENDED */
  troupe_io_peer peer;         /* of TROUPE_IO_PEER_LOST, TROUPE_IO_NOTICES_LOST */
  char* reason;                /* the sentence of `code`; NULL: none. `troupe_io_events_free` */
} troupe_io_event;

/* Readable while events wait, for poll, epoll, select; level-triggered. The agent's: never read or
 * close it. It stays until the agent is closed. */
TROUPE_API troupe_status troupe_io_event_fd(const troupe_io_agent* agent, int* fd);
/* As `troupe_io_take_notices`, of events. */
TROUPE_API troupe_status troupe_io_take(troupe_io_agent* agent, troupe_io_event* events,
                                        size_t event_size, size_t capacity, uint64_t timeout_ms,
                                        size_t* count);
TROUPE_API void troupe_io_events_free(troupe_io_event* events, size_t event_size, size_t count);
/* Makes progress on the calling thread; `worked` (may be NULL) is 1 if something was done. */
TROUPE_API troupe_status troupe_io_poll(troupe_io_agent* agent, uint32_t* worked);

#ifdef __cplusplus
}
#endif

#endif
