// Whether Python dictionaries and the classes of objects are what they were.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

// By identity: `entries` are the keys and values of all `dictionaries` as they were, one after the other, and `classes`
// those of `objects`. In a step of a model nothing of them is in the caches, so the loops follow one pointer of each at
// a time: their reads from memory overlap.
bool unchanged(const py::tuple& dictionaries, const py::tuple& entries, const py::tuple& objects,
               const py::tuple& classes) {
  const py::ssize_t count = PyTuple_GET_SIZE(dictionaries.ptr()), object_count = PyTuple_GET_SIZE(objects.ptr());
  if (PyTuple_GET_SIZE(classes.ptr()) != object_count) return false;
  bool same = true;
  for (py::ssize_t i = 0; i < object_count; ++i) {
    const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(objects.ptr(), i)));
    same &= PyTuple_GET_ITEM(classes.ptr(), i) == type;
  }
  py::ssize_t size = 0, next = 0;
  for (py::ssize_t i = 0; i < count; ++i) {
    PyObject* dictionary = PyTuple_GET_ITEM(dictionaries.ptr(), i);
    if (!PyDict_Check(dictionary)) throw py::type_error("dictionaries must hold dicts");
    size += PyDict_Size(dictionary);
  }
  if (!same || 2 * size != PyTuple_GET_SIZE(entries.ptr())) return false;
  PyObject *key, *value;
  for (py::ssize_t i = 0, at = 0; i < count; ++i, at = 0) {
    PyDict_Next(PyTuple_GET_ITEM(dictionaries.ptr(), i), &at, &key, &value);
  }
  for (py::ssize_t i = 0, at = 0; i < count; ++i, at = 0) {
    while (PyDict_Next(PyTuple_GET_ITEM(dictionaries.ptr(), i), &at, &key, &value)) {
      same &= PyTuple_GET_ITEM(entries.ptr(), next) == key && PyTuple_GET_ITEM(entries.ptr(), next + 1) == value;
      next += 2;
    }
  }
  return same;
}

void bind_unchanged(py::module_& m) {
  m.def("unchanged", &unchanged, py::arg("dictionaries"), py::arg("entries"), py::arg("objects"), py::arg("classes"),
        R"(Whether dictionaries have the entries, and objects the classes, that they had, compared by identity.

Args:
    dictionaries: a tuple of dicts.
    entries: their keys and values as they were, in order: key, value, key, value.
    objects: a tuple of any objects.
    classes: what their classes were.

Example:
    >>> from pdkernels._host import unchanged
    >>> held = {"a": 1}
    >>> unchanged((held,), ("a", held["a"]), (held,), (dict,))
    True
    >>> held["b"] = 2; unchanged((held,), ("a", held["a"]), (held,), (dict,))
    False
)");
}

}  // namespace
