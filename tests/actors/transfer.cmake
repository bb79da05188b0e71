troupe_test(transfer_test SOURCES transfer_test.cpp gpu_pool_test.cpp held_streams_test.cpp split_cache_test.cpp rdma_options_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::gpu_double LABELS integration TIMEOUT 60)
troupe_test(allocated_cache_test SOURCES allocated_cache_test.cpp LINKS troupe::actors troupe::sanitized
            LABELS integration TIMEOUT 60)
troupe_test(request_terms_test SOURCES request_terms_test.cpp broken_wire.cpp LINKS troupe::actors troupe::sanitized
            LABELS integration TIMEOUT 60)
troupe_test(layer_groups_transfer_test SOURCES layer_groups_transfer_test.cpp broken_wire.cpp LINKS troupe::actors troupe::sanitized
            LABELS integration TIMEOUT 60)
troupe_test(layer_ranges_transfer_test SOURCES layer_ranges_transfer_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration
            TIMEOUT 60)
troupe_test(memory_test SOURCES memory_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60)
troupe_test(crowded_link_test SOURCES crowded_link_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 180)
