// Whether Python dictionaries and the classes of objects are what they were.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

namespace py = pybind11;

namespace {

// The version of a dictionary, which every change of it replaces (PEP 509); 0: this Python has none.
uint64_t version_of(PyObject* dictionary) {
  if (!PyDict_Check(dictionary)) throw py::type_error("dictionaries must hold dicts");
#if PY_VERSION_HEX < 0x030C0000 && !defined(PYPY_VERSION)
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#else
  return 0;
#endif
}

py::bytes dictionary_versions(const py::tuple& dictionaries) {
  std::string versions;
  for (const py::handle dictionary : dictionaries) {
    const uint64_t version = version_of(dictionary.ptr());
    versions.append(reinterpret_cast<const char*>(&version), sizeof(version));
  }
  return py::bytes(versions);
}

bool same_versions(const py::tuple& dictionaries, const py::bytes& versions) {
  const py::ssize_t count = PyTuple_GET_SIZE(dictionaries.ptr());
  if (PyBytes_GET_SIZE(versions.ptr()) != count * static_cast<py::ssize_t>(sizeof(uint64_t))) return false;
  const char* expected = PyBytes_AS_STRING(versions.ptr());
  bool same = true;
  for (py::ssize_t i = 0; i < count; ++i) {
    uint64_t before;
    std::memcpy(&before, expected + i * sizeof(before), sizeof(before));
    same &= before != 0 && before == version_of(PyTuple_GET_ITEM(dictionaries.ptr(), i));
  }
  return same;
}

bool same_entries(const py::tuple& dictionaries, const py::tuple& entries) {
  const py::ssize_t entry_count = PyTuple_GET_SIZE(entries.ptr());
  py::ssize_t next = 0;
  for (py::ssize_t i = 0; i < PyTuple_GET_SIZE(dictionaries.ptr()); ++i) {
    PyObject *key, *value;
    for (py::ssize_t at = 0; PyDict_Next(PyTuple_GET_ITEM(dictionaries.ptr(), i), &at, &key, &value); next += 2) {
      if (next + 2 > entry_count || PyTuple_GET_ITEM(entries.ptr(), next) != key) return false;
      if (PyTuple_GET_ITEM(entries.ptr(), next + 1) != value) return false;
    }
  }
  return next == entry_count;
}

// By identity: `entries` are the keys and values of all `dictionaries` as they were, one after the other, `versions`
// those of the dictionaries, and `classes` those of `objects`. In a step of a model nothing of them is in the caches:
// dictionaries of their old versions are not looked at further, and the reads of versions overlap.
bool unchanged(const py::tuple& dictionaries, const py::tuple& entries, const py::bytes& versions,
               const py::tuple& objects, const py::tuple& classes) {
  const py::ssize_t count = PyTuple_GET_SIZE(objects.ptr());
  bool same = PyTuple_GET_SIZE(classes.ptr()) == count;
  for (py::ssize_t i = 0; same && i < count; ++i) {
    const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(objects.ptr(), i)));
    same = PyTuple_GET_ITEM(classes.ptr(), i) == type;
  }
  return same && (same_versions(dictionaries, versions) || same_entries(dictionaries, entries));
}

void bind_unchanged(py::module_& m) {
  m.def("dictionary_versions", &dictionary_versions, py::arg("dictionaries"),
        "The versions that `unchanged` compares.");
  m.def("unchanged", &unchanged, py::arg("dictionaries"), py::arg("entries"), py::arg("versions"), py::arg("objects"),
        py::arg("classes"),
        R"(Whether dictionaries have the entries, and objects the classes, that they had, compared by identity.

Args:
    dictionaries: a tuple of dicts.
    entries: their keys and values as they were, in order: key, value, key, value.
    versions: their `dictionary_versions` as they were; b"": unknown. Those of the same version have the same entries.
    objects: a tuple of any objects.
    classes: what their classes were.

Example:
    >>> from pdkernels._host import dictionary_versions, unchanged
    >>> held = {"a": 1}
    >>> then = ("a", held["a"]), dictionary_versions((held,)), (held,), (dict,)
    >>> unchanged((held,), *then)
    True
    >>> held["b"] = 2; unchanged((held,), *then)
    False
)");
}

}  // namespace
