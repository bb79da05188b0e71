# How tests and fuzz targets are declared.
#
#   troupe_test(<name> SOURCES a.cpp b.cpp LINKS troupe::kvcache LABELS unit
#               [TIMEOUT seconds] [COST seconds] [RUN_SERIAL] [SHARDS n] [ENVIRONMENT "NAME=value"...] [DEPENDS target...])
#
# makes the executable `<name>` with GoogleTest's main and registers each of its tests with ctest as
# `<name>.<suite>.<test>` under one of the labels unit, integration, faults, simulation. DEPENDS names targets that
# the tests run, such as the `troupe` command, so that they are built first. Tests with the greatest COST, the time of
# the slowest of them, start first, so that no long test is left for the end.
#
# Under a sanitizer, starting a process costs more than most unit tests: there all tests of a program are one ctest
# test, or `SHARDS` of them that may run at once, `<name>.shard_<i>`.
#
#   troupe_fuzz_target(<name> SOURCES a.cpp LINKS troupe::transport)
#
# makes a libFuzzer executable out of a source that defines LLVMFuzzerTestOneInput and registers it under
# the label fuzz. It does nothing unless TROUPE_FUZZ is on. Only code without CAF can be fuzzed.
# The fuzzer starts from the inputs in corpus/<name>/ beside the CMakeLists.txt.

find_package(GTest REQUIRED)
include(GoogleTest)

# "sanitized.hpp": what a test must know about its build.
add_library(troupe_sanitized INTERFACE)
add_library(troupe::sanitized ALIAS troupe_sanitized)
target_include_directories(troupe_sanitized INTERFACE "${PROJECT_SOURCE_DIR}/tests/sanitizers")

# `troupe_tests_unit` and so on build all tests of one label.
foreach(label unit integration faults simulation fuzz)
  add_custom_target(troupe_tests_${label})
endforeach()

function(troupe_test name)
  cmake_parse_arguments(arg "RUN_SERIAL" "TIMEOUT;COST;SHARDS" "SOURCES;LINKS;LABELS;ENVIRONMENT;DEPENDS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "troupe_test(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    message(FATAL_ERROR "troupe_test(${name}): name its sources after SOURCES")
  endif()
  if(NOT arg_LABELS MATCHES "^(unit|integration|faults|simulation)$")
    message(FATAL_ERROR "troupe_test(${name}): LABELS must be one of unit, integration, faults, "
                        "simulation, found '${arg_LABELS}'")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 4")  # `patience` of tests/sanitizers/sanitized.hpp
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINKS} troupe_support GTest::gmock_main)
  troupe_compile_settings(${name})
  troupe_without_false_warnings(${name})
  if(arg_LINKS MATCHES "troupe::(actors|deploy)")  # and so CAF, whose headers take most of the time
    troupe_unity(${name})
    # The generated source includes its parts by absolute path, and failure messages would contain those paths: no other
    # checkout could then reuse the objects in ccache.
    target_compile_options(${name} PRIVATE "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")
    target_compile_options(${name} PRIVATE -Wno-subobject-linkage)  # fixtures are in anonymous namespaces
  endif()
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    # The code under test is fully optimised; the tests themselves compile in three quarters of the time with less.
    target_compile_options(${name} PRIVATE -O1)
  endif()
  if(TROUPE_SANITIZE)
    # The code under test is fully instrumented. The tests themselves compile in half the time
    # without optimisation and without checks for undefined behaviour in them.
    target_compile_options(${name} PRIVATE -O0 -fno-sanitize=undefined)
  endif()
  if(arg_DEPENDS)
    add_dependencies(${name} ${arg_DEPENDS})
  endif()
  add_dependencies(troupe_tests_${arg_LABELS} ${name})

  set(properties LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
  if(arg_COST)
    list(APPEND properties COST ${arg_COST})
  endif()
  if(arg_RUN_SERIAL)
    list(APPEND properties RUN_SERIAL TRUE)
  endif()
  if(arg_ENVIRONMENT)
    # gtest_discover_tests passes the list through three calls, each of which removes one level of quoting.
    list(JOIN arg_ENVIRONMENT [[\\\\\\\\;]] environment)
    list(APPEND properties ENVIRONMENT "${environment}")
  endif()
  if(TROUPE_SANITIZE AND arg_LABELS STREQUAL "unit" AND NOT arg_ENVIRONMENT)
    if(NOT arg_SHARDS)
      set(arg_SHARDS 1)
    endif()
    math(EXPR last "${arg_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${name}.shard_${shard} COMMAND ${name} --gtest_brief=1)
      set_tests_properties(${name}.shard_${shard} PROPERTIES ${properties} TIMEOUT 600
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
    return()
  endif()
  # Tests are listed when ctest starts, not while building: a build never runs its own programs.
  gtest_discover_tests(${name} TEST_PREFIX "${name}." DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                       PROPERTIES ${properties})
endfunction()

function(troupe_fuzz_target name)
  if(NOT TROUPE_FUZZ)
    return()
  endif()
  cmake_parse_arguments(arg "" "" "SOURCES;LINKS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINKS})
  troupe_compile_settings(${name})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(troupe_tests_fuzz ${name})

  # New inputs of the fuzzer go to the build tree; the inputs in the repository are only read.
  set(found "${CMAKE_CURRENT_BINARY_DIR}/corpus/${name}")
  set(seeds "${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name}")
  file(MAKE_DIRECTORY "${found}")
  if(NOT IS_DIRECTORY "${seeds}")
    set(seeds)
  endif()
  add_test(NAME fuzz.${name}
           COMMAND sh -c "exec \"$0\" -max_total_time=\"\${TROUPE_FUZZ_SECONDS:-60}\" -seed=\"\${TROUPE_COMMIT_SEED:-1}\" \"$@\""
                   $<TARGET_FILE:${name}> -timeout=10 -rss_limit_mb=2048 -max_len=65536
                   -print_final_stats=1 "-artifact_prefix=${CMAKE_CURRENT_BINARY_DIR}/${name}."
                   "${found}" ${seeds})
  set_tests_properties(fuzz.${name} PROPERTIES LABELS fuzz TIMEOUT 3600)
endfunction()
