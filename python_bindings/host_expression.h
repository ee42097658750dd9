// Expressions of pdkernels/grammar/language.py, read from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/expression.h"

namespace py = pybind11;

namespace {

// Named tuples, told by the names of their classes. An object that is there several times is one part, and so are equal
// characters; many alternatives that are texts become the smallest automaton of them.
class ExpressionReader {
 public:
  using Expression = pdkernels::Expression;
  using Kind = Expression::Kind;
  static constexpr size_t kMany = 16;  // so many texts have an automaton of their own

  ExpressionReader(const py::handle& expression, int64_t max_of_texts) {
    made.whole = number(expression.ptr());
    for (size_t at = 0; at < objects_.size(); ++at) read(static_cast<int32_t>(at), objects_[at]);
    for (size_t at = 0; at < objects_.size(); ++at) join_texts(static_cast<int32_t>(at), max_of_texts);
  }

  Expression made;

 private:
  static PyObject* field(PyObject* object, Py_ssize_t at) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) <= at) throw std::invalid_argument(kFault);
    return PyTuple_GET_ITEM(object, at);
  }

  static int64_t count(PyObject* object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return overflow != 0 ? INT64_MAX : value;
  }

  static int64_t maximum(PyObject* object) { return object == Py_None ? -1 : count(object); }

  Kind kind_of(PyObject* object) {
    const auto [place, fresh] = kinds_.emplace(Py_TYPE(object), Kind::sequence);
    if (fresh) {
      static const std::map<std::string, Kind> names{{"Chars", Kind::characters},
                                                     {"Seq", Kind::sequence},
                                                     {"Alt", Kind::either},
                                                     {"Repeat", Kind::repeat},
                                                     {"Subsequence", Kind::subsequence},
                                                     {"Machine", Kind::automaton}};
      const auto known = names.find(py::type::of(py::handle(object)).attr("__name__").cast<std::string>());
      if (known == names.end() || !PyTuple_Check(object)) throw std::invalid_argument(kFault);
      place->second = known->second;
    }
    return place->second;
  }

  int32_t number(PyObject* object) {
    const auto [place, fresh] = numbers_.emplace(object, 0);
    if (!fresh) return place->second;
    const Kind kind = kind_of(object);
    std::vector<std::pair<int32_t, int32_t>> ranges;
    if (kind == Kind::characters) {
      ranges = ranges_of(field(object, 0));
      const auto [equal, first] = characters_.emplace(ranges, static_cast<int32_t>(made.parts.size()));
      if (!first) return place->second = equal->second;
    }
    place->second = static_cast<int32_t>(made.parts.size());
    made.parts.emplace_back();
    made.parts.back().kind = kind;
    made.parts.back().ranges = std::move(ranges);
    objects_.push_back(object);
    return place->second;
  }

  static std::vector<std::pair<int32_t, int32_t>> ranges_of(PyObject* object) {
    std::vector<std::pair<int32_t, int32_t>> ranges;
    for (Py_ssize_t at = 0; at < PyTuple_Size(object); ++at) {
      PyObject* range = field(object, at);
      const int64_t first = count(field(range, 0)), last = count(field(range, 1));
      if (first < 0 || first > last || last > 0x10FFFF) throw std::invalid_argument(kFault);
      ranges.emplace_back(static_cast<int32_t>(first), static_cast<int32_t>(last));
    }
    return ranges;
  }

  void read(int32_t at, PyObject* object) {
    Expression::Part part = std::move(made.parts[at]);  // reading its items adds parts
    if (part.kind == Kind::sequence || part.kind == Kind::either) {
      PyObject* items = field(object, 0);
      for (Py_ssize_t n = 0; n < PyTuple_Size(items); ++n) part.items.push_back(number(field(items, n)));
    } else if (part.kind == Kind::repeat) {
      part.items.push_back(number(field(object, 0)));
      part.minimum = count(field(object, 1));
      part.maximum = maximum(field(object, 2));
    } else if (part.kind == Kind::subsequence) {
      PyObject* items = field(object, 0);
      for (Py_ssize_t n = 0; n < PyTuple_Size(items); ++n) {
        part.needed.push_back(PyObject_IsTrue(field(field(items, n), 0)) == 1);
        part.items.push_back(number(field(field(items, n), 1)));
      }
      part.separator = number(field(object, 1));
      part.minimum = count(field(object, 2));
      part.maximum = maximum(field(object, 3));
      if (field(object, 4) != Py_None) part.others = number(field(object, 4));
    } else if (part.kind == Kind::automaton) {
      part.automaton = py::handle(field(object, 0)).cast<const pdkernels::ByteAutomaton*>();
    }
    made.parts[at] = std::move(part);
  }

  // Whether a part is written as one text, character by character, which is added to `text`.
  bool written(int32_t at, std::string& text) const {
    const Expression::Part& part = made.parts[at];
    if (part.kind == Kind::sequence) {
      for (const int32_t item : part.items) {
        if (made.parts[item].kind != Kind::characters || !written(item, text)) return false;
      }
      return true;
    }
    if (part.kind != Kind::characters || part.ranges.size() != 1 || part.ranges[0].first != part.ranges[0].second) {
      return false;
    }
    for (const uint8_t byte : pdkernels::expression_detail::utf8(part.ranges[0].first)) {
      text.push_back(static_cast<char>(byte));
    }
    return true;
  }

  void join_texts(int32_t at, int64_t max_of_texts) {
    if (made.parts[at].kind != Kind::either || made.parts[at].items.size() < kMany) return;
    std::vector<std::string> texts;
    std::vector<int32_t> items{-1};
    for (const int32_t item : made.parts[at].items) {
      std::string text;
      if (written(item, text)) {
        texts.push_back(std::move(text));
      } else {
        items.push_back(item);
      }
    }
    if (texts.size() < kMany) return;
    try {
      made.own.push_back(pdkernels::automaton_of_texts(std::move(texts), max_of_texts));
    } catch (const pdkernels::TooLarge&) { throw pdkernels::TooLarge("texts"); }
    Expression::Part joined;
    joined.kind = Kind::automaton;
    joined.automaton = &made.own.back();
    if (items.size() == 1) {
      made.parts[at] = std::move(joined);
      return;
    }
    items[0] = static_cast<int32_t>(made.parts.size());
    made.parts[at].items = std::move(items);
    made.parts.push_back(std::move(joined));
  }

  static constexpr const char* kFault =
      "pdkernels.ByteAutomaton: expression must be made of pdkernels.grammar.language.";
  std::unordered_map<PyObject*, int32_t> numbers_;
  std::unordered_map<PyTypeObject*, Kind> kinds_;
  std::map<std::vector<std::pair<int32_t, int32_t>>, int32_t> characters_;
  std::vector<PyObject*> objects_;
};

}  // namespace
