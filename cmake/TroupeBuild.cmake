# How every target of the project is compiled, and how the include direction is enforced.
#
# troupe_library(<folder> SOURCES ... LINKS ... PUBLIC_HEADERS ...) makes the library `troupe_<folder>`,
# alias `troupe::<folder>`. Its headers are beside its sources and are included as
# "troupe/<folder>/name.hpp" (those of actors/io, the library `troupe_io`, as "troupe/io/name.hpp"). PUBLIC_HEADERS are
# installed and include no private header of the project; all other headers are private
# (tests/build/check_public_headers.cmake). Each folder has an include root of its own in the build tree that contains
# only that folder, so a target can include only what it links.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

find_program(TROUPE_CCACHE ccache)
if(TROUPE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # All checkouts share compiled objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
      CCACHE_NOHASHDIR=true "${TROUPE_CCACHE}")
endif()

# Most links are of test programs, each with half of the project in it.
find_program(TROUPE_MOLD mold)
mark_as_advanced(TROUPE_MOLD)
if(TROUPE_MOLD AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_EXE_LINKER_FLAGS MATCHES "-fuse-ld")
  add_link_options(-fuse-ld=mold)
endif()

if(TROUPE_FUZZ AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "TROUPE_FUZZ needs clang's libFuzzer; configure with --preset fuzz, "
                      "or with -DCMAKE_CXX_COMPILER=clang++-14")
endif()

include(GNUInstallDirs)

# Adds a folder of the project if it has something to build.
function(troupe_add_folder folder)
  if(EXISTS "${PROJECT_SOURCE_DIR}/${folder}/CMakeLists.txt")
    add_subdirectory("${PROJECT_SOURCE_DIR}/${folder}" "${PROJECT_BINARY_DIR}/${folder}")
  endif()
endfunction()

function(troupe_compile_settings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
                         -Wold-style-cast -Wconversion -Wno-sign-conversion)
  if(TROUPE_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # The garbage collection of g++, which starts at a few hundred MB, takes a tenth of the time. Without it below 1 GiB
    # the largest source takes 1.4 GB instead of 1.15.
    target_compile_options(${target} PRIVATE --param=ggc-min-heapsize=1048576)
  endif()
  if(TROUPE_SANITIZE)
    # Every finding ends the program.
    target_compile_options(${target} PRIVATE -fsanitize=${TROUPE_SANITIZE} -fno-omit-frame-pointer
                           -fno-sanitize-recover=all)
    target_link_options(${target} PRIVATE -fsanitize=${TROUPE_SANITIZE})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE")
      target_sources(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/sanitizers/options.cpp")
      if(TROUPE_SANITIZE MATCHES "address")
        # Else each start relocates a million addresses in the data of the checks.
        target_link_options(${target} PRIVATE -no-pie)
      endif()
    endif()
    if(TROUPE_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # The sanitizer does not model fences, and g++ warns at each fence; the sanitizer's reports are still right.
      target_compile_options(${target} PRIVATE -Wno-tsan)
    endif()
  endif()
  if(TROUPE_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# For libraries that use CAF, whose templates take twice as long to compile with checks of every dereferenced pointer.
# The address sanitizer still reports null and invalid pointers. The libraries that parse a peer's bytes or move bytes,
# `kvcache`, `transport`, `troupe_session` and `troupe_door`, keep all checks.
function(troupe_spare_pointer_checks target)
  if(TROUPE_SANITIZE MATCHES "address" AND TROUPE_SANITIZE MATCHES "undefined")
    target_compile_options(${target} PRIVATE -fno-sanitize=null,vptr,alignment,object-size)
  endif()
endfunction()

# False warnings of g++ 12: overlapping copies in `"text" + std::to_string(n)` at -O3 (GCC bug 105329, fixed in 13),
# and, under a sanitizer, uninitialised members of an empty optional. Libraries are written around them; tests,
# benchmarks and the command need not be.
function(troupe_without_false_warnings target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    if(NOT TROUPE_SANITIZE)
      target_compile_options(${target} PRIVATE -Wno-restrict)
    endif()
    if(TROUPE_SANITIZE)
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    endif()
  endif()
endfunction()

# Compiles several sources of a target at once to share the cost of their headers, which is most of the time with those
# of CAF. Each source still includes what it needs: the thread sanitizer's build groups sources differently, and the
# builds with clang and for a debugger compile each source alone.
function(troupe_unity target)
  if(TROUPE_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${TROUPE_UNITY_BATCH})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # g++ 12 inlines more here, and then reports members of an inactive variant alternative as uninitialised.
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    endif()
  endif()
endfunction()

# Less optimisation than -O3 for libraries that neither move bytes nor plan moves: the optimiser takes two thirds of the
# time of a source. -O2 saves a ninth of the total, -O1 a third.
function(troupe_optimise target level)
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${target} PRIVATE ${level})
  endif()
endfunction()

function(troupe_library folder)
  cmake_parse_arguments(arg "" "" "SOURCES;LINKS;PRIVATE_LINKS;PUBLIC_HEADERS" ${ARGN})
  set(target troupe_${folder})
  add_library(${target} STATIC ${arg_SOURCES})
  set_target_properties(${target} PROPERTIES TROUPE_PUBLIC_HEADERS "${arg_PUBLIC_HEADERS}")
  add_library(troupe::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder})
  set(root "${PROJECT_BINARY_DIR}/include/${folder}")
  file(MAKE_DIRECTORY "${root}/troupe")
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}" "${root}/troupe/${folder}" SYMBOLIC)
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${root}>"
                             "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${arg_LINKS} PRIVATE ${arg_PRIVATE_LINKS})
  troupe_compile_settings(${target})
  troupe_check_headers(${target} ${folder})
endfunction()

add_custom_target(troupe_header_checks)

# Checks that every header of a folder compiles by itself: one generated source per header, built with the library. A
# header with a source of its own needs none: that source includes it first (tests/build/check_includes.cmake enforces
# this), and is compiled alone by some preset.
function(troupe_check_headers target folder)
  if(NOT TROUPE_CHECK_HEADERS)
    return()
  endif()
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" "*.hpp")
  if(NOT TROUPE_HAVE_VERBS)
    list(FILTER headers EXCLUDE REGEX "^rdma/")
  endif()
  # Headers that another target compiles.
  if(folder STREQUAL "deploy")
    list(FILTER headers EXCLUDE REGEX "^c/")
  elseif(folder STREQUAL "actors")
    list(FILTER headers EXCLUDE REGEX "^io/")
  endif()
  # Headers for device compilers and the GPU builds only: tests/transport/xgmi compiles them.
  list(FILTER headers EXCLUDE REGEX "^xgmi/(hip_on_cuda|cuda_driver).hpp$")
  set(sources)
  foreach(header IN LISTS headers)
    string(REGEX REPLACE "\\.hpp$" ".cpp" own_source "${header}")
    file(GLOB in_a_room "${CMAKE_CURRENT_SOURCE_DIR}/*/${own_source}")  # of a header above the rooms of actors/
    if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${own_source}" OR in_a_room)
      continue()
    endif()
    string(MAKE_C_IDENTIFIER "${header}" name)
    set(source "${PROJECT_BINARY_DIR}/header_checks/${folder}/${name}.cpp")
    set(text "#include \"troupe/${folder}/${header}\"\n")
    set(old "")
    if(EXISTS "${source}")
      file(READ "${source}" old)
    endif()
    if(NOT old STREQUAL text)
      file(WRITE "${source}" "${text}")
    endif()
    list(APPEND sources "${source}")
  endforeach()
  if(sources)
    add_library(${target}_header_checks OBJECT ${sources})
    target_link_libraries(${target}_header_checks PRIVATE ${target})
    troupe_compile_settings(${target}_header_checks)
    # Nothing runs: compiling the header is the whole check.
    target_compile_options(${target}_header_checks PRIVATE -O0)
    add_dependencies(troupe_header_checks ${target}_header_checks)
  endif()
endfunction()
