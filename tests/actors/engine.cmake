troupe_test(event_queue_test SOURCES event_queue_test.cpp event_claim_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(member_watch_test SOURCES member_watch_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(defaults_test SOURCES defaults_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(logging_test SOURCES logging_test.cpp LINKS troupe::actors troupe::scratch LABELS unit)
troupe_test(cache_leases_test SOURCES cache_leases_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(source_test SOURCES source_test.cpp movement_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(engine_test SOURCES engine_bounds_test.cpp engine_threads_test.cpp operation_wait_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::scratch LABELS integration TIMEOUT 180)
troupe_test(joined_engines_test SOURCES joined_engines_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::scratch LABELS integration TIMEOUT 180)
troupe_test(departure_test SOURCES departure_test.cpp LINKS troupe::actors troupe::sanitized LABELS faults TIMEOUT 60)
troupe_test(orderly_stop_test SOURCES orderly_stop_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::scratch LABELS faults TIMEOUT 120)
troupe_test(put_phases_test SOURCES put_phases_test.cpp LINKS troupe::actors troupe::sanitized LABELS unit TIMEOUT 60)
troupe_test(value_store_test SOURCES value_store_test.cpp LINKS troupe::actors LABELS unit TIMEOUT 60)
troupe_test(whole_receive_test SOURCES whole_receive_test.cpp LINKS troupe::actors troupe::sanitized LABELS unit TIMEOUT 60)
troupe_test(told_deadline_test SOURCES told_deadline_test.cpp LINKS troupe::actors troupe::sanitized LABELS unit TIMEOUT 60)
troupe_test(node_test SOURCES node_test.cpp lost_link_test.cpp link_choice_test.cpp late_dialler_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::gpu_double LABELS unit TIMEOUT 60)
