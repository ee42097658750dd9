// pdkernels._host: host-side pieces that never touch tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/cpu_isa.h"
#include "host/huge_pages.h"
#include "host/page_allocator.h"
#include "host_grammar.h"
#include "host_planner.h"
#include "host_pushdown.h"
#include "host_quantized.h"
#include "host_unchanged.h"

namespace py = pybind11;

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side pieces of pdkernels: page allocation, what the processor can do.";

  m.def(
      "cpu_isa", [] { return pdkernels::name_of(pdkernels::cpu_isa()); },
      "The level of vector units that CPU kernels may use here, such as avx2 or neon_dot. PDKERNELS_CPU_ISA lowers "
      "it.");

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

  py::class_<pdkernels::HugePages>(m, "HugePages", py::module_local(), py::buffer_protocol(),
                                   R"(Zeroed memory in huge pages, if the system has them, as a writable buffer.

Args:
    bytes: its size. MemoryError if the system refuses it.

Example:
    >>> from pdkernels._host import HugePages
    >>> memory = memoryview(HugePages(5))
    >>> memory[0] = 7
    >>> bytes(memory)
    b'\\x07\\x00\\x00\\x00\\x00'
)")
      .def(py::init<int64_t>(), py::arg("bytes"))
      .def_buffer([](pdkernels::HugePages& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.bytes()));
      });

  pdkernels::bind_quantized(m);
  bind_planner(m);
  bind_grammar(m);
  bind_pushdown(m);
  bind_unchanged(m);
}
