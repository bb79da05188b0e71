/* The cost of a call of the C ABI, in nanoseconds: the floor for bench/python_calls. One line each:
 * NAME NS. */

#define _POSIX_C_SOURCE 199309L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "troupe/troupe.h"

enum { rounds = 100000, blocks_of_one = 128 };

static void must(troupe_status status) {
  if (status == TROUPE_OK) return;
  fprintf(stderr, "c_calls: %s: %s\n", troupe_status_name(status), troupe_last_error());
  exit(1);
}

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

/* The shortest of five runs. */
#define MEASURE(name, count, call)                   \
  do {                                               \
    double best = 1e18;                              \
    for (int run = 0; run < 5; ++run) {              \
      const double begin = now();                    \
      for (int i = 0; i < (count); ++i) call;        \
      const double each = (now() - begin) / (count); \
      if (each < best) best = each;                  \
    }                                                \
    printf("%s %.0f\n", name, best);                 \
  } while (0)

static void send_and_end(troupe_engine* node, const uint32_t* blocks) {
  const troupe_send_spec spec = {
      .size = sizeof spec, .request = "r", .blocks = blocks, .block_count = blocks_of_one};
  troupe_operation send;
  must(troupe_engine_send(node, &spec, &send));
  must(troupe_engine_abort(node, send, "measured"));
  (void)troupe_engine_wait(node, send, UINT64_MAX, NULL);
}

int main(void) {
  const troupe_log_options quiet = {.size = sizeof quiet, .level = "off"};
  must(troupe_log(&quiet));
  const troupe_cache_geometry geometry = {
      .size = sizeof geometry, .dtype = "bf16", .block_tokens = 16, .blocks = 256};
  const troupe_layer_shape shape = {TROUPE_LAYER_ATTENTION, 2, 64};
  troupe_layout* layout = NULL;
  must(troupe_layout_make(&geometry, &shape, 1, NULL, &layout));
  const troupe_engine_options options = {
      .size = sizeof options,
      .deployment_text =
          "cluster: calls\nsupervisor: {host: 127.0.0.1, port: 9, state_file: none}\n"
          "security: {mode: none}\nstages:\n"
          "  - {name: prefill, role: prefill, engine: external}\n"
          "  - {name: decode, role: decode, engine: external}\n"
          "edges: [{from: prefill, to: decode}]\n",
      .node = "prefill-0",
      .layout = layout,
      .allocate = TROUPE_ALLOCATE};
  troupe_engine* node = NULL;
  must(troupe_engine_start(&options, &node));
  uint32_t blocks[blocks_of_one];
  for (uint32_t i = 0; i < blocks_of_one; ++i) blocks[i] = i;
  const troupe_send_spec spec = {
      .size = sizeof spec, .request = "open", .blocks = blocks, .block_count = blocks_of_one};
  troupe_operation open;
  must(troupe_engine_send(node, &spec, &open));
  troupe_event event;
  size_t count;

  MEASURE("take", rounds, must(troupe_engine_take(node, &event, sizeof event, 1, 0, &count)));
  MEASURE("layers_ready", rounds, must(troupe_engine_layers_ready(node, open, 0, 1, 1, NULL)));
  MEASURE("set_queue_length", rounds, must(troupe_engine_set_queue_length(node, 1)));
  MEASURE("send_abort_wait", rounds / 50, send_and_end(node, blocks));
  troupe_engine_free(node);
  troupe_layout_free(layout);
  return 0;
}
