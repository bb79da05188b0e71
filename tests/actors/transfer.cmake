troupe_test(transfer_test SOURCES transfer_test.cpp LINKS troupe::actors LABELS integration TIMEOUT 60)
