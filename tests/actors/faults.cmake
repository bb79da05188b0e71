troupe_test(fault_test SOURCES fault_test.cpp refusal_test.cpp LINKS troupe::actors LABELS faults TIMEOUT 60)
