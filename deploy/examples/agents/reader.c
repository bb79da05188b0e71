#include <stdio.h>

#include "troupe/io.h"

/* Lends a megabyte, which it describes on its output, and waits for who writes: reader | writer */
int main(void) {
  static char memory[1 << 20];
  const troupe_io_options options = {.size = sizeof options, .name = "reader"};
  troupe_io_agent* agent = NULL;
  troupe_io_memory kv;
  void* mine;
  size_t size, count;
  troupe_io_notice notice;
  if (troupe_io_agent_create(&options, &agent) ||
      troupe_io_register(agent, memory, sizeof memory, "kv", TROUPE_IO_MAY_WRITE, &kv) ||
      troupe_io_describe(agent, &kv, 1, &mine, &size) || fwrite(mine, 1, size, stdout) != size ||
      fclose(stdout) || troupe_io_take_notices(agent, &notice, sizeof notice, 1, 10000, &count))
    return fprintf(stderr, "reader: %s\n", troupe_last_error()), 1;
  for (size_t i = 0; i < count; ++i) /* every byte is there */
    fprintf(stderr, "%s wrote %d\n", notice.from, memory[sizeof memory - 1]);
  troupe_io_notices_free(&notice, sizeof notice, count);
  troupe_io_agent_free(agent);
  return count == 1 ? 0 : 1;
}
