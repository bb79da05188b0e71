troupe_test(membership_test SOURCES membership_test.cpp LINKS troupe::actors LABELS unit)
troupe_test(router_test SOURCES router_test.cpp affinity_test.cpp ease_in_test.cpp routing_test.cpp LINKS troupe::actors LABELS unit)

add_executable(cluster_peer cluster_peer.cpp)
target_link_libraries(cluster_peer PRIVATE troupe::actors)
troupe_compile_settings(cluster_peer)
troupe_test(supervisor_test SOURCES supervisor_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration
            DEPENDS cluster_peer TIMEOUT 60)
target_compile_definitions(supervisor_test PRIVATE CLUSTER_PEER="$<TARGET_FILE:cluster_peer>")
troupe_test(placement_test SOURCES placement_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration
            DEPENDS cluster_peer TIMEOUT 60)
target_compile_definitions(placement_test PRIVATE CLUSTER_PEER="$<TARGET_FILE:cluster_peer>")
