// The parts of pdkernels._host, one unit each: pybind11 code compiles slowly.
#pragma once

#include <pybind11/pybind11.h>

void bind_planner(pybind11::module_& m);
