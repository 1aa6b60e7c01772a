# The CUDA plugin, libsurogate_cuda.so: kernels, and calls of cuBLASLt and cuDNN through functions looked up at run time.
# It needs nvcc and four sets of headers at build time, and links nothing of CUDA's but the static runtime.

# NVIDIA's wheels of this interpreter. A build in isolation does not see what is installed outside it: hence
# SUROGATE_CUDA_PATH.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import site, sys; print(';'.join(dict.fromkeys([*site.getsitepackages(), *sys.path])))"
  OUTPUT_VARIABLE SITE_PACKAGES OUTPUT_STRIP_TRAILING_WHITESPACE)
set(ROOTS ${SUROGATE_CUDA_PATH} ${SITE_PACKAGES})

set(MISSING "")
find_program(SUROGATE_NVCC nvcc HINTS ${ROOTS} /usr/local/cuda PATH_SUFFIXES bin nvidia/cu13/bin)
if(NOT SUROGATE_NVCC)
  list(APPEND MISSING "nvcc (CUDA toolkit 13)")
endif()
function(find_header name variable wheel)
  find_path(${variable} ${name} HINTS ${ROOTS} /usr/local/cuda ENV CUDA_HOME ENV CUDA_PATH
    PATH_SUFFIXES nvidia/cu13/include nvidia/cudnn/include include)
  if(NOT ${variable})
    set(MISSING ${MISSING} "${name} (pip install --no-deps ${wheel})" PARENT_SCOPE)
  endif()
endfunction()
find_header(cublasLt.h SUROGATE_CUBLASLT_INCLUDE nvidia-cublas)
find_header(cudnn.h SUROGATE_CUDNN_INCLUDE nvidia-cudnn-cu13)
find_header(cudnn_frontend.h SUROGATE_CUDNN_FRONTEND_INCLUDE nvidia-cudnn-frontend)
find_header(nvrtc.h SUROGATE_NVRTC_INCLUDE nvidia-cuda-nvrtc)

if(MISSING)
  list(JOIN MISSING ", " MISSING)
  if(SUROGATE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CUDA plugin: not found: ${MISSING}. If it is installed, name its folder: "
      "pip install . -C cmake.define.SUROGATE_CUDA_PATH=<site-packages>")
  endif()
  message(NOTICE "** CUDA plugin: NOT built, this package will train on the CPU alone. Not found: ${MISSING}")
  return()
endif()
message(NOTICE "** CUDA plugin: built with ${SUROGATE_NVCC} for ${SUROGATE_CUDA_TARGETS}; headers: "
  "${SUROGATE_CUBLASLT_INCLUDE}, ${SUROGATE_CUDNN_INCLUDE}, ${SUROGATE_CUDNN_FRONTEND_INCLUDE}")

# CMake's own list of architectures does not know the newest: -gencode says it.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_COMPILER ${SUROGATE_NVCC})
enable_language(CUDA)
set(GENCODE "")
foreach(target ${SUROGATE_CUDA_TARGETS})
  if(target MATCHES "^(.*)-ptx$")
    list(APPEND GENCODE "-gencode=arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
  else()
    list(APPEND GENCODE "-gencode=arch=compute_${target},code=sm_${target}")
  endif()
endforeach()

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS csrc/cuda/*.cu csrc/cuda/*.cpp)
# What the plugin needs of the core, in a copy of its own: its kernels are not the extension's.
add_library(surogate_cuda MODULE ${CUDA_SOURCES} csrc/core/kernel.cpp csrc/core/program.cpp)
target_include_directories(surogate_cuda PRIVATE csrc)
set(WARNINGS -Wall -Wextra)
if(SUROGATE_WERROR)
  list(APPEND WARNINGS -Werror)
endif()
list(JOIN WARNINGS "," CUDA_WARNINGS)
target_compile_options(surogate_cuda PRIVATE
  "$<$<COMPILE_LANGUAGE:CXX>:-O2;${WARNINGS}>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-O3;${GENCODE};--compress-mode=size;--threads=2;-Xcompiler=${CUDA_WARNINGS}>")
set_target_properties(surogate_cuda PROPERTIES
  CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static
  CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden)
# The toolkit's own headers come first; the wheels hold other versions of some of them.
target_include_directories(surogate_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
set_source_files_properties(csrc/cuda/cublaslt.cpp PROPERTIES
  COMPILE_OPTIONS "-isystem;${SUROGATE_CUBLASLT_INCLUDE}")
# The frontend is templates and inline functions: optimising them takes long and gains nothing.
set_source_files_properties(csrc/cuda/cudnn.cpp PROPERTIES
  COMPILE_OPTIONS "-O1;-isystem;${SUROGATE_CUDNN_INCLUDE};-isystem;${SUROGATE_CUDNN_FRONTEND_INCLUDE};-isystem;${SUROGATE_NVRTC_INCLUDE}"
  COMPILE_DEFINITIONS "CUDNN_FRONTEND_SKIP_JSON_LIB;NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING")
target_link_options(surogate_cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined)
target_link_libraries(surogate_cuda PRIVATE ${CMAKE_DL_LIBS})

install(TARGETS surogate_cuda LIBRARY DESTINATION surogate)
