/* Two agents in two processes, in C. Usage: io_agents shm|tcp|polled
 *
 * The child lends memory and does what notices ask of it; the parent moves bytes. Exits with 0 if
 * every byte and every notice was right. */

#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/io.h"

enum { size = 1 << 20, patience = 120000, both = TROUPE_IO_MAY_READ | TROUPE_IO_MAY_WRITE };

static const char* mine = "parent";

static void check(int holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "%s, line %d: %s: %s\n", mine, line, what, troupe_last_error());
  exit(1);
}
#define CHECK(holds) check((holds), #holds, __LINE__)
#define MUST(call) check((call) == TROUPE_OK, #call, __LINE__)

static troupe_io_agent* create(const char* way) {
  const uint32_t backend = strcmp(way, "tcp") == 0 ? TROUPE_IO_TCP : TROUPE_IO_SHM;
  const troupe_io_options options = {.size = sizeof options,
                                     .flags = strcmp(way, "polled") == 0 ? TROUPE_POLLING : 0,
                                     .name = mine,
                                     .backends = &backend,
                                     .backend_count = 1,
                                     .peer_silence_ms = patience,
                                     .connect_timeout_ms = patience};
  troupe_io_agent* agent = NULL;
  MUST(troupe_io_agent_create(&options, &agent));
  return agent;
}

static void send_all(int to, const void* bytes, size_t count) {
  CHECK(write(to, &count, sizeof count) == sizeof count);
  for (size_t sent = 0; sent < count;) {
    const ssize_t some = write(to, (const char*)bytes + sent, count - sent);
    CHECK(some > 0);
    sent += (size_t)some;
  }
}

static size_t receive_all(int from, char* bytes, size_t capacity) {
  size_t count = 0;
  CHECK(read(from, &count, sizeof count) == sizeof count && count <= capacity);
  for (size_t got = 0; got < count;) {
    const ssize_t some = read(from, bytes + got, count - got);
    CHECK(some > 0);
    got += (size_t)some;
  }
  return count;
}

/* The next notice, which ends with a NUL. */
static troupe_io_notice next_notice(troupe_io_agent* agent) {
  troupe_io_notice notice;
  size_t count = 0;
  MUST(troupe_io_take_notices(agent, &notice, sizeof notice, 1, patience, &count));
  CHECK(count == 1);
  return notice;
}

static void tell(troupe_io_agent* agent, troupe_io_peer peer, const char* what) {
  MUST(troupe_io_notify(agent, peer, what, strlen(what) + 1));
}

static void expect_notice(troupe_io_agent* agent, const char* from, const char* what) {
  troupe_io_notice notice = next_notice(agent);
  CHECK(strcmp(notice.from, from) == 0);
  CHECK(strcmp(notice.bytes, what) == 0 && notice.byte_count == strlen(what) + 1);
  troupe_io_notices_free(&notice, sizeof notice, 1);
}

static int lend(const char* way, int to_parent) {
  mine = "child";
  troupe_io_agent* agent = create(way);
  troupe_io_memory kv = 0;
  troupe_memory memory;
  MUST(troupe_io_allocate(agent, size, "kv", both, &kv));
  MUST(troupe_io_bytes(agent, kv, &memory));
  CHECK(memory.size == size);
  void* descriptor = NULL;
  size_t descriptor_size = 0;
  MUST(troupe_io_describe(agent, &kv, 1, &descriptor, &descriptor_size));
  send_all(to_parent, descriptor, descriptor_size);
  troupe_free(descriptor);
  for (int more = 1; more;) {
    troupe_io_notice notice = next_notice(agent);
    const unsigned char* bytes = memory.data;
    if (strcmp(notice.bytes, "written") == 0) {
      for (size_t i = 0; i < size; ++i) CHECK(bytes[i] == (unsigned char)(i / 4096 + 1));
      memset(memory.data, 0x5a, size);
      tell(agent, notice.peer, "as it should be");
    } else if (strcmp(notice.bytes, "take it back") == 0) {
      MUST(troupe_io_deregister(agent, kv, patience));
      tell(agent, notice.peer, "taken back");
    } else {
      CHECK(strcmp(notice.bytes, "end") == 0);
      more = 0;
    }
    troupe_io_notices_free(&notice, sizeof notice, 1);
  }
  troupe_io_agent_free(agent);
  return 0;
}

static troupe_io_status ended(troupe_io_agent* agent, troupe_io_transfer transfer) {
  size_t count = 0;
  MUST(troupe_io_wait(agent, &transfer, 1, TROUPE_IO_ALL, patience, &count));
  CHECK(count == 1);
  troupe_io_status status = {.size = sizeof status};
  MUST(troupe_io_read_status(agent, transfer, &status, NULL, 0));
  return status;
}

/* Writes 256 pages by prepared lists, followed by the notice. */
static void write_pages(troupe_io_agent* agent, troupe_io_memory kv, troupe_io_peer peer,
                        const troupe_io_remote_memory* there) {
  enum { pages = size / 4096 };
  static troupe_io_piece here[pages];
  static troupe_io_entry remote[pages];
  static uint32_t order[pages];
  for (uint32_t i = 0; i < pages; ++i) {
    here[i] = (troupe_io_piece){.memory = kv, .offset = i * 4096, .length = 4096};
    remote[i] = (troupe_io_entry){.address = there->address + i * 4096, .length = 4096};
    order[i] = pages - 1 - i;
  }
  troupe_io_plan local = 0, far = 0;
  troupe_io_transfer transfer = 0;
  MUST(troupe_io_prepare_pieces(agent, here, pages, &local));
  MUST(troupe_io_prepare_remote(agent, peer, remote, pages, &far));
  MUST(troupe_io_make(agent, TROUPE_IO_WRITE, local, order, pages, far, order, pages,
                      TROUPE_IO_MERGE, &transfer));
  MUST(troupe_io_release_plan(agent, local));
  MUST(troupe_io_release_plan(agent, far));
  MUST(troupe_io_post(agent, transfer, "written", 8, patience));
  const troupe_io_status status = ended(agent, transfer);
  CHECK(status.state == TROUPE_IO_DONE && status.bytes == size && status.bad_count == 0);
  troupe_io_event event;
  size_t count = 0;
  do {
    MUST(troupe_io_take(agent, &event, sizeof event, 1, patience, &count));
    CHECK(count == 1);
    troupe_io_events_free(&event, sizeof event, 1);
  } while (event.kind != TROUPE_IO_TRANSFER_ENDED);
  CHECK(event.transfer == transfer);
  MUST(troupe_io_release_transfer(agent, transfer));
}

static void move_bytes(const char* way, int from_child) {
  troupe_io_agent* agent = create(way);
  static unsigned char bytes[size];
  static char descriptor[1 << 20];
  for (size_t i = 0; i < size; ++i) bytes[i] = (unsigned char)(i / 4096 + 1);
  troupe_io_memory kv = 0;
  MUST(troupe_io_register(agent, bytes, size, "bytes", both, &kv));
  troupe_io_peer peer = 0;
  MUST(troupe_io_add_peer(agent, descriptor, receive_all(from_child, descriptor, sizeof descriptor),
                          &peer));
  uint32_t backend = 0;
  MUST(troupe_io_connect(agent, peer, patience, &backend));
  CHECK(backend == (strcmp(way, "tcp") == 0 ? TROUPE_IO_TCP : TROUPE_IO_SHM));
  troupe_io_remote_memory there;
  size_t count = 0;
  MUST(troupe_io_remote_memories(agent, peer, &there, 1, &count));
  CHECK(count == 1 && there.length == size && there.rights == both);

  write_pages(agent, kv, peer, &there);
  expect_notice(agent, "child", "as it should be");

  troupe_io_plan over = 0;
  troupe_io_transfer back = 0;
  MUST(troupe_io_session(agent, kv, peer, there.number, &over));
  const troupe_io_segment all = {.length = size};
  MUST(troupe_io_move(agent, TROUPE_IO_READ, over, &all, 1, NULL, 0, patience, &back));
  CHECK(ended(agent, back).state == TROUPE_IO_DONE);
  for (size_t i = 0; i < size; ++i) CHECK(bytes[i] == 0x5a);

  tell(agent, peer, "take it back");
  expect_notice(agent, "child", "taken back");
  MUST(troupe_io_move(agent, TROUPE_IO_WRITE, over, &all, 1, NULL, 0, patience, &back));
  const troupe_io_status refused = ended(agent, back);
  CHECK(refused.state == TROUPE_IO_FAILED && refused.code == TROUPE_GRANT_REVOKED);
  CHECK(refused.bad_count == 1 && refused.reason[0] != '\0');
  tell(agent, peer, "end");
  /* Nothing here waits for a notice to be delivered: one in flight is lost when this agent ends. */
  MUST(troupe_io_agent_close(agent));
  CHECK(troupe_io_cancel(agent, back) == TROUPE_ABORTED);
  troupe_io_agent_free(agent);
}

int main(int count, char** words) {
  if (count != 2) return fprintf(stderr, "usage: io_agents shm|tcp|polled\n"), 2;
  int ways[2];
  CHECK(pipe(ways) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(200);
    close(ways[0]);
    return lend(words[1], ways[1]);
  }
  close(ways[1]);
  alarm(200);
  move_bytes(words[1], ways[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return 0;
}
