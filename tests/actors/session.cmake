# The session protocol: no CAF, built and run also where TROUPE_BUILD_ACTORS is off.
troupe_test(session_messages_test SOURCES session_messages_test.cpp LINKS troupe::session LABELS unit)
troupe_test(link_pulse_test SOURCES link_pulse_test.cpp LINKS troupe::session LABELS unit)
troupe_test(session_machines_test SOURCES session_send_table_test.cpp session_receive_table_test.cpp
                                   session_behaviour_test.cpp
            LINKS troupe::session LABELS unit)
troupe_test(session_simulation_test SOURCES session_simulation.cpp simulation_scenario.cpp simulation_judge.cpp
                                              session_simulation_test.cpp
            LINKS troupe::session troupe::sanitized troupe::scratch LABELS unit)
