troupe_test(fault_test SOURCES fault_test.cpp refusal_test.cpp LINKS troupe::actors troupe::sanitized LABELS faults TIMEOUT 60)
troupe_test(value_test SOURCES value_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60)
troupe_test(hetero_test SOURCES hetero_test.cpp LINKS troupe::actors troupe::sanitized LABELS integration TIMEOUT 60)
