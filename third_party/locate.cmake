# minfer_locate(<variable> <package>/<file>): where the Python environment keeps a package's file; empty if it has none.
function(minfer_locate variable file)
  execute_process(COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/third_party/locate.py" "${file}"
                  OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${variable} "${path}" PARENT_SCOPE)
endfunction()
