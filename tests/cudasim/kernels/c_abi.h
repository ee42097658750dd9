// How the fixture kernels are called from ctypes: null on success, else the error.
#pragma once

#include <exception>
#include <string>

#include "launch.h"

#define FIXTURE extern "C" __attribute__((visibility("default"))) const char*

template <class Body>
const char* guarded(const Body& body) {
  static std::string message;
  try {
    body();
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
