/* Two engines with caches of their own, in C: pair.cpp by way of troupe.h. Usage: pair FILE NAME */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "troupe/troupe.h"

enum { layers = 4, tokens = 100 };

/* Each call is a check: it ends the process with what went wrong. */
static void must(troupe_status status) {
  if (status == TROUPE_OK) return;
  fprintf(stderr, "%s: %s\n", troupe_status_name(status), troupe_last_error());
  exit(1);
}

static uint64_t prefill(troupe_engine* node, const uint32_t* blocks, size_t count, uint8_t* memory,
                        size_t size) {
  const troupe_send_spec what = {
      .size = sizeof what, .request = "r", .blocks = blocks, .block_count = count};
  troupe_operation send;
  must(troupe_engine_send(node, &what, &send));
  memset(memory, 7, size); /* your kernels; each layer, once it is computed: */
  for (uint32_t i = 0; i < layers; ++i)
    must(troupe_engine_layers_ready(node, send, i, i + 1, tokens, NULL));
  must(troupe_engine_seal(node, send, tokens, "first", 5)); /* aux: the first token, say */
  troupe_outcome done = {.size = sizeof done};
  must(troupe_engine_wait(node, send, UINT64_MAX, &done));
  troupe_detail_free(done.detail);
  return done.bytes;
}

static uint64_t decode(troupe_engine* node, const uint32_t* blocks, size_t count) {
  const troupe_placement_request wanted = {.size = sizeof wanted,
                                           .timeout_ms = 10000,
                                           .request = "r",
                                           .from = "prefill",
                                           .to = "decode"};
  troupe_operation operation;
  troupe_outcome placed = {.size = sizeof placed};
  troupe_placement* where = NULL;
  must(troupe_engine_place(node, &wanted, &operation));
  must(troupe_engine_wait(node, operation, UINT64_MAX, &placed));
  must(troupe_detail_placement(placed.detail, &where));
  troupe_detail_free(placed.detail);

  const troupe_receive_spec what = {.size = sizeof what,
                                    .placement = where,
                                    .tokens = tokens,
                                    .blocks = blocks,
                                    .block_count = count};
  troupe_outcome done = {.size = sizeof done};
  must(troupe_engine_receive(node, &what, &operation));
  must(troupe_engine_wait(node, operation, UINT64_MAX, &done));
  must(troupe_engine_placed_request_ended(node, "r"));
  const void* aux = NULL;
  size_t aux_size = 0;
  must(troupe_detail_bytes(done.detail, &aux, &aux_size));
  if (aux_size != 5 || memcmp(aux, "first", 5) != 0) exit(2);
  troupe_detail_free(done.detail);
  troupe_placement_free(where);
  return done.bytes;
}

int main(int count, char** words) {
  if (count < 3) return fprintf(stderr, "usage: pair FILE NAME\n"), 2;
  const troupe_cache_geometry geometry = {
      .size = sizeof geometry, .dtype = "bf16", .block_tokens = 16, .blocks = 32};
  troupe_layer_shape shapes[layers];
  for (int i = 0; i < layers; ++i) shapes[i] = (troupe_layer_shape){TROUPE_LAYER_ATTENTION, 2, 64};
  troupe_layout* layout = NULL;
  must(troupe_layout_make(&geometry, shapes, layers, NULL, &layout));
  uint64_t size = 0;
  size_t regions = 0;
  must(troupe_layout_region_sizes(layout, &size, 1, &regions));
  uint8_t* memory = calloc(1, size);
  if (!memory) return 1;
  const troupe_memory region = {memory, size};

  const troupe_engine_options options = {.size = sizeof options,
                                         .deployment_file = words[1],
                                         .node = words[2],
                                         .layout = layout,
                                         .regions = &region,
                                         .region_count = 1};
  troupe_engine* node = NULL;
  must(troupe_engine_start(&options, &node));
  must(troupe_engine_wait_registered(node, 10000));
  const uint32_t blocks[] = {9, 4, 5, 6, 0, 21, 3}; /* 16 tokens each */
  const size_t block_count = sizeof blocks / sizeof *blocks;
  if (strncmp(words[2], "prefill", 7) == 0) {
    printf("%s: %llu bytes sent\n", words[2],
           (unsigned long long)prefill(node, blocks, block_count, memory, size));
  } else {
    const unsigned long long bytes = decode(node, blocks, block_count);
    const troupe_cache_place last = {.layer = 3, .plane = 1, .token = tokens - 1, .head = 1};
    troupe_region_bytes at;
    must(troupe_layout_locate(layout, blocks, block_count, &last, &at));
    for (uint64_t i = 0; i < at.length; ++i)
      if (memory[at.offset + i] != 7) return fprintf(stderr, "another cache arrived\n"), 1;
    printf("%s: %llu bytes arrived\n", words[2], bytes);
  }
  troupe_engine_free(node);
  troupe_layout_free(layout);
  free(memory);
  return 0;
}
