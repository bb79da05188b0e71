# The door of the cluster port: no CAF, built and run also where TROUPE_BUILD_ACTORS is off.
troupe_test(door_handshake_test SOURCES door_handshake_test.cpp LINKS troupe::door LABELS unit)
troupe_test(door_eviction_test SOURCES door_eviction_test.cpp LINKS troupe::door LABELS unit)
troupe_test(door_user_secret_test SOURCES door_user_secret_test.cpp LINKS troupe::door troupe::scratch LABELS unit)
troupe_test(door_test SOURCES door_test.cpp door_strangers_test.cpp LINKS troupe::door troupe::sanitized
            troupe::scratch LABELS integration TIMEOUT 60)
troupe_test(door_tls_test SOURCES door_tls_test.cpp door_pump_test.cpp door_sockets_test.cpp certificates_test.cpp
            LINKS troupe::door troupe::sanitized OpenSSL::SSL troupe::scratch LABELS integration TIMEOUT 60)
