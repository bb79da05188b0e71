# must(COMMAND...) runs the command and leaves its output in `said`. must_fail_saying(SENTENCE COMMAND...) requires
# it to fail with that sentence, ignoring line breaks in its messages.

function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${status}:\n${said}")
  endif()
  set(said "${said}" PARENT_SCOPE)
endfunction()

function(must_fail_saying sentence)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE said ERROR_VARIABLE said)
  list(JOIN ARGN " " command)
  if(status EQUAL 0)
    message(FATAL_ERROR "${command}\nsucceeded, and should have said: ${sentence}")
  endif()
  string(REGEX REPLACE "[ \n]+" " " words "${said}")
  string(FIND "${words}" "${sentence}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "${command}\nfailed without saying: ${sentence}\n${said}")
  endif()
endfunction()
