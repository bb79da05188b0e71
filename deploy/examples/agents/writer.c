#include <stdio.h>

#include "troupe/io.h"

int main(void) { /* Writes a megabyte into the memory that its input describes. */
  static char memory[1 << 20], theirs[1 << 20];
  memory[sizeof memory - 1] = 7;
  const troupe_io_options options = {.size = sizeof options, .name = "writer"};
  const troupe_io_segment all = {.length = sizeof memory};
  troupe_io_status end = {.size = sizeof end};
  troupe_io_agent* agent = NULL;
  uint64_t kv, peer, over, sent;
  troupe_io_remote_memory there;
  if (troupe_io_agent_create(&options, &agent) ||
      troupe_io_register(agent, memory, sizeof memory, "kv", TROUPE_IO_MAY_READ, &kv) ||
      troupe_io_add_peer(agent, theirs, fread(theirs, 1, sizeof theirs, stdin), &peer) ||
      troupe_io_remote_memories(agent, peer, &there, 1, &(size_t){0}) ||
      troupe_io_session(agent, kv, peer, there.number, &over) ||
      troupe_io_move(agent, TROUPE_IO_WRITE, over, &all, 1, "all", 3, 10000, &sent) ||
      troupe_io_wait(agent, &sent, 1, TROUPE_IO_ALL, UINT64_MAX, NULL) ||
      troupe_io_read_status(agent, sent, &end, NULL, 0))
    return fprintf(stderr, "writer: %s\n", troupe_last_error()), 1;
  printf("writer: %s\n", end.state == TROUPE_IO_DONE ? "done" : end.reason);
  troupe_io_agent_free(agent);
}
