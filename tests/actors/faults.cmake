troupe_test(fault_test SOURCES killed_prefill_test.cpp killed_decode_test.cpp frozen_prefill_test.cpp
                                frozen_decode_test.cpp
                                retry_test.cpp refusal_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::gpu_double troupe::scratch LABELS faults TIMEOUT 60)
troupe_test(apart_test SOURCES apart_test.cpp LINKS troupe::actors troupe::sanitized LABELS faults TIMEOUT 60)
troupe_test(leases_test SOURCES leases_test.cpp reclaimed_test.cpp
            LINKS troupe::actors troupe::sanitized LABELS faults TIMEOUT 120)
troupe_test(value_test SOURCES value_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60
            COST 10)
troupe_test(hetero_test SOURCES hetero_test.cpp long_prompt_test.cpp full_link_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60)
troupe_test(receive_checks_test SOURCES receive_checks_test.cpp request_bounds_test.cpp sent_bytes_test.cpp LINKS troupe::actors troupe::sanitized troupe::scratch LABELS integration TIMEOUT 60)
troupe_test(rebuild_test SOURCES rebuild_test.cpp unmendable_test.cpp killed_linking_test.cpp broken_wire.cpp
            LINKS troupe::actors troupe::sanitized troupe::scratch LABELS faults TIMEOUT 120)
if(TROUPE_HAVE_VERBS)
  target_compile_definitions(rebuild_test PRIVATE TROUPE_TEST_VERBS)
  target_link_libraries(rebuild_test PRIVATE ibverbs)
endif()
troupe_test(silent_peer_test SOURCES silent_peer_test.cpp stalled_actors_test.cpp broken_wire.cpp
            LINKS troupe::actors troupe::sanitized troupe::gpu_double LABELS faults TIMEOUT 120 COST 10)
troupe_test(survive_test SOURCES failure_report_test.cpp supervisor_restart_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::scratch LABELS faults TIMEOUT 120)
troupe_test(watch_test SOURCES watch_test.cpp
            LINKS troupe::actors troupe::sanitized troupe::scratch LABELS faults TIMEOUT 120 COST 15)
troupe_test(crash_test SOURCES crash_test.cpp LINKS troupe::actors troupe::sanitized LABELS faults TIMEOUT 60)
