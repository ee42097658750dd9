// pdkernels._host: host-side pieces that never touch tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/cpu_isa.h"
#include "host/page_allocator.h"
#include "host_planner.h"

namespace py = pybind11;

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side pieces of pdkernels: page allocation, what the processor can do.";

  m.def(
      "cpu_isa", [] { return pdkernels::name_of(pdkernels::cpu_isa()); },
      "The vector units CPU kernels may use here: portable, avx2, avx512 or amx. PDKERNELS_CPU_ISA lowers it.");

  py::class_<pdkernels::PageAllocator>(m, "PageAllocator", py::module_local(),
                                       R"(Hands out page ids of a paged KV cache.

Args:
    num_pages: pages in the pool; ids are 0 .. num_pages - 1.

Example:
    >>> from pdkernels._host import PageAllocator
    >>> pool = PageAllocator(3)
    >>> pool.allocate(2), pool.available
    ([0, 1], 1)
    >>> pool.release([0]); pool.allocate(2)
    [0, 2]
)")
      .def(py::init<int64_t>(), py::arg("num_pages"))
      .def("allocate", &pdkernels::PageAllocator::allocate, py::arg("count"),
           "Lowest free ids, ascending. MemoryError if fewer are free; nothing is handed out then.")
      .def("release", &pdkernels::PageAllocator::release, py::arg("pages"),
           "Returns pages. ValueError for an id that is unknown or not in use; nothing is returned then.")
      .def_property_readonly("available", &pdkernels::PageAllocator::available, "Pages that are free.")
      .def_property_readonly("num_pages", &pdkernels::PageAllocator::num_pages, "Pages in the pool.");

  bind_planner(m);
}
