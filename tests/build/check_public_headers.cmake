# Whatever an installed header includes of Troupe is installed too, and it includes no library that only sources
# need:
#   cmake -DROOT=<folder> "-DPUBLIC=kvcache/errc.hpp;..." -P check_public_headers.cmake
# Prints one line for each wrong include, and fails if there is one.

cmake_minimum_required(VERSION 3.25)

set(wrong)
foreach(header IN LISTS PUBLIC)
  if(NOT EXISTS "${ROOT}/${header}")
    list(APPEND wrong "${header}: is not there")
    continue()
  endif()
  file(STRINGS "${ROOT}/${header}" lines REGEX "^[ \t]*#[ \t]*include")
  foreach(line IN LISTS lines)
    if(line MATCHES "\"troupe/([^\"]+)\"")
      if(NOT CMAKE_MATCH_1 IN_LIST PUBLIC)
        list(APPEND wrong "${header}: includes ${CMAKE_MATCH_1}, which is private")
      endif()
    elseif(line MATCHES "<((caf|openssl|nlohmann|yaml-cpp|infiniband|hip|CLI)/[^>]*|cuda[^>]*|xx[^>]*)>")
      list(APPEND wrong "${header}: shows ${CMAKE_MATCH_1} to those who include it")
    endif()
  endforeach()
endforeach()

foreach(line IN LISTS wrong)
  message("${line}")
endforeach()
list(LENGTH wrong count)
if(count GREATER 0)
  message(FATAL_ERROR "${count} wrong includes of public headers; see PUBLIC_HEADERS in each folder's CMakeLists.txt")
endif()
