# Installs BUILD into WORK/prefix, checks that it contains the right files and no others, and moves it to
# WORK/moved: a package that names the place where it was made would be found only there. PUBLIC: the headers that
# are installed, below troupe/. Run by ctest.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/must.cmake")
string(REPLACE "," ";" PUBLIC "${PUBLIC}")

file(REMOVE_RECURSE "${WORK}/prefix" "${WORK}/moved")
file(MAKE_DIRECTORY "${WORK}")
must("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")

foreach(file bin/troupe lib/systemd/system/troupe-supervisor.service lib/systemd/system/troupe-node@.service
        share/man/man1/troupe.1 share/man/man5/troupe.yaml.5 share/doc/troupe/README.md share/doc/troupe/docs/failures.md share/doc/troupe/LICENSE
        share/doc/troupe/examples/quickstart.yaml share/doc/troupe/examples/engine/main.cpp
        share/doc/troupe/examples/engine/pair.cpp share/doc/troupe/examples/engine/pair.c
        lib/libtroupe.so.0 lib/libtroupe.so lib/pkgconfig/troupe.pc)
  if(NOT EXISTS "${WORK}/prefix/${file}")
    message(FATAL_ERROR "${file} was not installed")
  endif()
endforeach()

file(GLOB_RECURSE headers RELATIVE "${WORK}/prefix/include/troupe" "${WORK}/prefix/include/troupe/*")
list(SORT headers)
list(SORT PUBLIC)
if(NOT headers STREQUAL PUBLIC)
  message(FATAL_ERROR "installed are the headers\n  ${headers}\ninstead of\n  ${PUBLIC}")
endif()
foreach(private actors/runtime/system.hpp actors/messages/messages.hpp actors/client/request_watch.hpp actors/link/link.hpp config/reader.hpp
        kvcache/strided_copy.hpp transport/progress_engine.hpp transport/shm/wire.hpp transport/tcp/tcp_link.hpp)
  if(private IN_LIST headers)
    message(FATAL_ERROR "${private} is private and was installed")
  endif()
endforeach()

file(READ "${WORK}/prefix/lib/systemd/system/troupe-node@.service" unit)
string(FIND "${unit}" "ExecStart=${WORK}/prefix/bin/troupe node" at)
if(at EQUAL -1)
  message(FATAL_ERROR "the service does not start the command that was installed:\n${unit}")
endif()

file(RENAME "${WORK}/prefix" "${WORK}/moved")
