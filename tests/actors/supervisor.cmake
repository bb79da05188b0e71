troupe_test(membership_test SOURCES membership_test.cpp open_membership_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(router_test SOURCES router_test.cpp affinity_test.cpp ease_in_test.cpp routing_test.cpp once_more_test.cpp open_routing_test.cpp
            LINKS troupe::actors LABELS unit)
troupe_test(event_log_test SOURCES event_log_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(local_address_test SOURCES local_address_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(slot_claims_test SOURCES slot_claims_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(drains_test SOURCES drains_test.cpp LINKS troupe::actors LABELS unit)

add_executable(cluster_peer cluster_peer.cpp)
target_link_libraries(cluster_peer PRIVATE troupe::actors troupe::scratch)
troupe_compile_settings(cluster_peer)
troupe_test(supervisor_test SOURCES supervisor_test.cpp LINKS troupe::actors troupe::sanitized troupe::scratch LABELS integration
            DEPENDS cluster_peer TIMEOUT 60)
target_compile_definitions(supervisor_test PRIVATE CLUSTER_PEER="$<TARGET_FILE:cluster_peer>")
troupe_test(placement_test SOURCES placement_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration
            DEPENDS cluster_peer TIMEOUT 60)
target_compile_definitions(placement_test PRIVATE CLUSTER_PEER="$<TARGET_FILE:cluster_peer>")
add_library(simulated_cluster STATIC EXCLUDE_FROM_ALL cluster_simulation/faults.cpp cluster_simulation/frontend.cpp
            cluster_simulation/leases.cpp cluster_simulation/link.cpp cluster_simulation/nodes.cpp
            cluster_simulation/shrink.cpp cluster_simulation/supervisor_life.cpp cluster_simulation/transfer.cpp
            cluster_simulation/world.cpp simulation_scenario.cpp)
target_link_libraries(simulated_cluster PUBLIC troupe::actors)
target_include_directories(simulated_cluster PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
troupe_compile_settings(simulated_cluster)
troupe_without_false_warnings(simulated_cluster)
troupe_unity(simulated_cluster)
troupe_test(strangers_simulation_test SOURCES strangers_simulation_test.cpp LINKS troupe::actors troupe::sanitized troupe::scratch
            LABELS simulation TIMEOUT 120)
troupe_test(cluster_simulation_test SOURCES cluster_simulation_test.cpp LINKS simulated_cluster troupe::scratch LABELS simulation
            TIMEOUT 600 COST 20)
add_executable(cluster_explorer EXCLUDE_FROM_ALL cluster_simulation/explore.cpp)
target_link_libraries(cluster_explorer PRIVATE simulated_cluster CLI11::CLI11)
troupe_compile_settings(cluster_explorer)
troupe_without_false_warnings(cluster_explorer)
troupe_test(supervisor_events_test SOURCES supervisor_events_test.cpp LINKS troupe::actors troupe::sanitized
            LABELS integration TIMEOUT 60)
troupe_test(membership_survival_test SOURCES membership_survival_test.cpp membership_record_test.cpp
            LINKS troupe::actors LABELS unit)
troupe_test(membership_store_test SOURCES membership_store_test.cpp LINKS troupe::actors troupe::sanitized
            troupe::scratch LABELS integration)
add_executable(supervisor_double supervisor_double.cpp)
target_link_libraries(supervisor_double PRIVATE troupe::actors)
troupe_compile_settings(supervisor_double)
troupe_test(supervisor_begin_test SOURCES supervisor_begin_test.cpp LINKS troupe::actors troupe::sanitized troupe::scratch
            LABELS integration DEPENDS supervisor_double TIMEOUT 120)
target_compile_definitions(supervisor_begin_test PRIVATE SUPERVISOR_DOUBLE="$<TARGET_FILE:supervisor_double>")
troupe_test(drain_test SOURCES drain_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60)
troupe_test(network_test SOURCES network_test.cpp LINKS troupe::actors troupe::sanitized troupe::scratch LABELS integration TIMEOUT 60
            COST 40)
troupe_test(crossing_dials_test SOURCES crossing_dials_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60
            COST 40)
troupe_test(closed_connection_test SOURCES closed_connection_test.cpp host_end_test.cpp LINKS troupe::actors troupe::sanitized
            troupe::scratch LABELS integration TIMEOUT 60)
troupe_test(placement_epochs_test SOURCES placement_epochs_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(request_blame_test SOURCES request_blame_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(side_threads_test SOURCES side_threads_test.cpp LINKS troupe::actors troupe::scratch LABELS unit)
