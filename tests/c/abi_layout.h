/* How abi_layout prints what programs have compiled in. */
#ifndef TROUPE_TESTS_ABI_LAYOUT_H
#define TROUPE_TESTS_ABI_LAYOUT_H

#include <stddef.h>
#include <stdio.h>

#define STRUCT(type) printf("struct %s %zu\n", #type, sizeof(type))
#define FIELD(type, field) \
  printf("field %s.%s %zu %zu\n", #type, #field, offsetof(type, field), sizeof(((type*)0)->field))
#define NUMBER(name) printf("number %s %lld\n", #name, (long long)(name))

/* The declarations of io.h. */
void print_io_layout(void);

#endif
