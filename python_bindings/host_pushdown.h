// Pushdown automata of recursive grammars for Python: a header of host.cpp, as host_grammar.h.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "host/pushdown_best.h"
#include "host/pushdown_canvas.h"
#include "host/pushdown_rules.h"
#include "host/pushdown_states.h"
#include "host/pushdown_tokens.h"
#include "host_grammar.h"

namespace py = pybind11;

namespace {

using pdkernels::PushdownCanvas;
using pdkernels::PushdownRules;
using pdkernels::PushdownStates;
using pdkernels::PushdownTokens;

void check_state(const PushdownStates& text, int32_t state) {
  if (!text.known(state)) throw std::invalid_argument("pdkernels.PushdownText: unknown state.");
}

int32_t* bits_of(const PushdownTokens& tokens, const py::buffer_info& bits) {
  if (bits.itemsize != 4 || bits.size != tokens.words() || (bits.ndim == 1 && bits.strides[0] != 4)) {
    throw std::invalid_argument("pdkernels.PushdownText: bits must be a row of int32, one for 32 tokens.");
  }
  return static_cast<int32_t*>(bits.ptr);
}

std::shared_ptr<PushdownTokens> pushdown_tokens(const PushdownRules& rules, const std::vector<py::bytes>& tokens,
                                                const std::vector<int64_t>& ends, int64_t max_work) {
  const TokenTexts texts("PushdownTokens", tokens, ends);
  if (rules.empty()) throw std::invalid_argument("pdkernels.PushdownTokens: no text is accepted.");
  if (rules.looping() >= 0) throw std::invalid_argument("pdkernels.PushdownTokens: a rule begins with itself.");
  const py::gil_scoped_release release;
  return std::make_shared<PushdownTokens>(rules, texts.bytes, texts.offsets, ends, max_work);
}

void bind_pushdown(py::module_& m) {
  py::class_<PushdownRules>(m, "PushdownRules", py::module_local(),
                            R"(Automata over bytes that call each other.

Args:
    rules: the automata of the rules; the first one is the whole grammar. The bytes ``0xFE, n // 256, n % 256``
        call rule n. A rule that begins with a call of itself repeats what follows there.

Example:
    >>> from pdkernels._host import ByteAutomaton, PushdownRules
    >>> edges = [(0, 97, 97, 1), (1, 0xFE, 0xFE, 2), (2, 0, 0, 3), (3, 0, 0, 4), (4, 98, 98, 5), (1, 98, 98, 5)]
    >>> nested = PushdownRules([ByteAutomaton(6, edges, [], 0, 5, 100, 10000)])  # ab, aabb, aaabbb, ..
    >>> nested.empty, nested.looping
    (False, -1)
)")
      .def(py::init([](const std::vector<pdkernels::ByteAutomaton>& rules) {
             if (rules.empty()) throw std::invalid_argument("pdkernels.PushdownRules: there must be a rule.");
             return PushdownRules(rules);
           }),
           py::arg("rules"))
      .def_property_readonly("states", &PushdownRules::states, "States of all rules.")
      .def_property_readonly("empty", &PushdownRules::empty, "Whether there is no text.")
      .def_property_readonly("looping", &PushdownRules::looping,
                             "A rule that begins with itself by way of others, or after what may be empty; -1: none.");

  py::class_<PushdownTokens, std::shared_ptr<PushdownTokens>>(m, "PushdownTokens", py::module_local(),
                                                              R"(A pushdown automaton over the tokens of a vocabulary.

Args:
    rules: PushdownRules with a text, none of which loops.
    tokens, ends, max_work: as of TokenAutomaton.
)")
      .def(py::init(&pushdown_tokens), py::arg("rules"), py::arg("tokens"), py::arg("ends"), py::arg("max_work"))
      .def_property_readonly("states", &PushdownTokens::states, "States that tokens reach, of all rules.")
      .def_property_readonly("classes", &PushdownTokens::classes, "Classes of tokens that all states treat alike.")
      .def_property_readonly("rests", &PushdownTokens::rests,
                             "What of a token may be left when a call ends in it, told apart by what it does then.")
      .def_property_readonly(
          "chains", [](const PushdownTokens& made) { return made.chains().size(); }, "Ways to end inside calls.");

  py::class_<PushdownCanvas>(m, "PushdownCanvas", py::module_local(), "What may stand in a canvas.")
      .def("__bool__", [](const PushdownCanvas& made) { return made.possible; })
      .def(
          "allowed",
          [](const PushdownCanvas& made, int64_t position, py::buffer bits) {
            const py::buffer_info to = bits.request(true);
            if (!made.lists(position)) throw std::invalid_argument("pdkernels.PushdownCanvas: no such mask.");
            if (to.itemsize != 4 || to.size != made.words() || (to.ndim == 1 && to.strides[0] != 4)) {
              throw std::invalid_argument("pdkernels.PushdownCanvas: bits must be a row of int32, one for 32 tokens.");
            }
            return made.allowed(position, static_cast<int32_t*>(to.ptr));
          },
          py::arg("position"), py::arg("bits"),
          "Writes the bits of the tokens that may stand at a mask; how many they are, and the last one.");

  py::class_<PushdownStates>(m, "PushdownText", py::module_local(),
                             R"(The states of texts under a pushdown automaton, numbered as texts come to them.

State 0 starts; state `done` comes after an end token. Not for several threads at once.

Args:
    tokens: PushdownTokens.

Example:
    >>> from pdkernels._host import ByteAutomaton, PushdownRules, PushdownText, PushdownTokens
    >>> edges = [(0, 97, 97, 1), (1, 0xFE, 0xFE, 2), (2, 0, 0, 3), (3, 0, 0, 4), (4, 98, 98, 5), (1, 98, 98, 5)]
    >>> rules = PushdownRules([ByteAutomaton(6, edges, [], 0, 5, 100, 10000)])  # ab, aabb, aaabbb, ..
    >>> text = PushdownText(PushdownTokens(rules, [b"a", b"b", b"ab", b"bb", b""], [4], 1000))
    >>> text.distance(text.follow(0, [0, 0])), bool(text.fill([-1, 2, -1, 4], 0, 0)), bool(text.fill([2, -1, 4], 0, 0))
    (1, True, False)
)")
      .def(py::init([](std::shared_ptr<PushdownTokens> tokens) { return PushdownStates(std::move(tokens)); }),
           py::arg("tokens"))
      .def_property_readonly_static(
          "done", [](const py::object&) { return PushdownStates::kDone; }, "The state after an end token.")
      .def_property_readonly("states", &PushdownStates::size, "How many states texts came to.")
      .def(
          "accepting",
          [](const PushdownStates& text, int32_t state) {
            check_state(text, state);
            return text.accepting(state);
          },
          py::arg("state"), "Whether a text may end here.")
      .def(
          "distance",
          [](const PushdownStates& text, int32_t state) {
            check_state(text, state);
            return text.distance(state);
          },
          py::arg("state"), "As of TokenAutomaton.")
      .def(
          "next",
          [](PushdownStates& text, int32_t state, int64_t token) {
            check_state(text, state);
            return text.next(state, token);
          },
          py::arg("state"), py::arg("token"), "The state after a token; -1: there is none.")
      .def(
          "follow",
          [](PushdownStates& text, int32_t state, const std::vector<int64_t>& tokens) {
            check_state(text, state);
            for (const int64_t token : tokens) state = state < 0 ? state : text.next(state, token);
            return state;
          },
          py::arg("state"), py::arg("tokens"), "The state after some tokens; -1: there is none.")
      .def(
          "mask",
          [](const PushdownStates& text, int32_t state, int64_t budget, py::buffer bits) {
            check_state(text, state);
            const py::buffer_info to = bits.request(true);
            return text.mask(state, budget, bits_of(text.tokens(), to));
          },
          py::arg("state"), py::arg("budget"), py::arg("bits"), "As of TokenAutomaton.")
      .def(
          "masks",
          [](PushdownStates& text, int32_t state, const DraftRows& rows, const py::buffer& bits) {
            check_state(text, state);
            masks_of_draft(text, state, rows, bits);
          },
          py::arg("state"), py::arg("rows"), py::arg("bits"), kMasksDoc)
      .def(
          "fill",
          [](const PushdownStates& text, const std::vector<int64_t>& canvas, int32_t state, int64_t budget,
             bool listed) {
            check_state(text, state);
            const py::gil_scoped_release release;
            return PushdownCanvas(text, canvas, state, budget, listed);
          },
          py::arg("canvas"), py::arg("state"), py::arg("budget"), py::arg("listed") = true, py::keep_alive<0, 1>(),
          "What may stand in a canvas after a state: true if it can be completed with at most `budget` tokens after "
          "it. -1 in it is a mask. `listed`: whether tokens will be asked for.")
      .def(
          "best",
          [](const PushdownStates& text, const std::vector<int64_t>& canvas, int32_t state, int64_t budget,
             py::buffer scores) {
            check_state(text, state);
            const py::buffer_info rows = scores.request();
            const int64_t masks = std::count(canvas.begin(), canvas.end(), -1);
            if (rows.itemsize != 4 || rows.size != masks * text.tokens().vocabulary()) {
              throw std::invalid_argument("pdkernels.PushdownText: scores must be float32, a row for each mask.");
            }
            const py::gil_scoped_release release;
            return pdkernels::PushdownBest(text, canvas, state, budget, static_cast<const float*>(rows.ptr)).tokens;
          },
          py::arg("canvas"), py::arg("state"), py::arg("budget"), py::arg("scores"),
          "The tokens of the most probable completion of a canvas, given log-probabilities for each of its masks; "
          "empty if there is none.");
}

}  // namespace
