// Automata of grammars for Python. A header of host.cpp, because every unit with pybind11 costs much to compile.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "host/automaton.h"
#include "host/draft_masks.h"
#include "host/expression.h"
#include "host/texts_automaton.h"
#include "host/token_automaton.h"
#include "host_expression.h"

namespace py = pybind11;

namespace {

using pdkernels::ByteAutomaton;
using pdkernels::ByteEdge;
using pdkernels::TokenAutomaton;

ByteAutomaton parse_automaton(int64_t states, const std::vector<std::array<int32_t, 4>>& edges,
                              const std::vector<std::pair<int32_t, int32_t>>& empty, int32_t start, int32_t accept,
                              int64_t max_states, int64_t max_work) {
  const auto known = [&](int32_t state) { return state >= 0 && state < states; };
  bool fits = known(start) && known(accept);
  std::vector<ByteEdge> parsed;
  for (const auto& [from, first, last, to] : edges) {
    fits = fits && known(from) && known(to) && 0 <= first && first <= last && last < 256;
    parsed.push_back({from, first, last, to});
  }
  for (const auto& [from, to] : empty) fits = fits && known(from) && known(to);
  if (!fits) throw std::invalid_argument("pdkernels.ByteAutomaton: edges must join states, on bytes.");
  const py::gil_scoped_release release;
  return pdkernels::determinise(states, parsed, empty, start, accept, max_states, max_work);
}

ByteAutomaton automaton_of_expression(const py::object& expression, int64_t max_unfolded, int64_t max_of_texts,
                                      int64_t max_states, int64_t max_work) {
  const ExpressionReader reader(expression, max_of_texts);
  const auto& whole = reader.made.parts[reader.made.whole];
  if (whole.kind == pdkernels::Expression::Kind::automaton) return *whole.automaton;
  const py::gil_scoped_release release;
  return pdkernels::automaton_of(reader.made, max_unfolded, max_states, max_work);
}

int64_t unfolded_states(const py::object& expression, int64_t max_unfolded, int64_t max_of_texts, int64_t max_work) {
  const ExpressionReader reader(expression, max_of_texts);
  const py::gil_scoped_release release;
  return pdkernels::Unfolding(reader.made, max_unfolded, max_work).states();
}

void check_states(const TokenAutomaton& automaton, const std::vector<int32_t>& states) {
  for (const int32_t state : states) {
    if (state < 0 || state > automaton.done()) throw std::invalid_argument("pdkernels.TokenAutomaton: unknown state.");
  }
}

// What tokens write, one after another; `ends` must write nothing.
struct TokenTexts {
  TokenTexts(const std::string& owner, const std::vector<py::bytes>& tokens, const std::vector<int64_t>& ends) {
    for (const py::bytes& token : tokens) {
      const std::string text(token);
      bytes.insert(bytes.end(), text.begin(), text.end());
      offsets.push_back(static_cast<int64_t>(bytes.size()));
    }
    for (const int64_t id : ends) {
      if (id >= 0 && id + 1 < static_cast<int64_t>(offsets.size()) && offsets[id + 1] == offsets[id]) continue;
      throw std::invalid_argument("pdkernels." + owner + ": ends must be tokens without bytes.");
    }
  }

  std::vector<uint8_t> bytes;
  std::vector<int64_t> offsets{0};  // of each token, and of the end
};

int32_t* bits_of(const TokenAutomaton& automaton, const py::buffer_info& bits) {
  if (bits.itemsize != 4 || bits.size != automaton.words() || (bits.ndim == 1 && bits.strides[0] != 4)) {
    throw std::invalid_argument("pdkernels.TokenAutomaton: bits must be a row of int32, one for 32 tokens.");
  }
  return static_cast<int32_t*>(bits.ptr);
}

// (row, budget, tokens) of each row, and the rows of the bits.
using DraftRows = std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>>>;

template <typename Automaton>
void masks_of_draft(Automaton& automaton, int32_t state, const DraftRows& drafted, const py::buffer& bits) {
  const py::buffer_info to = bits.request(true);
  const int64_t rows = to.size / std::max<int64_t>(automaton.words(), 1);
  bool fits = to.itemsize == 4 && rows * automaton.words() == to.size && to.ndim <= 2 && to.ndim >= 1;
  fits = fits && to.strides[to.ndim - 1] == 4 && (to.ndim == 1 || to.strides[0] == 4 * automaton.words());
  std::vector<pdkernels::DraftRow> parsed;
  for (const auto& [row, budget, tokens] : drafted) {
    fits = fits && row >= 0 && row < rows;
    parsed.push_back({row, budget, tokens});
  }
  if (!fits) throw std::invalid_argument("pdkernels: bits must be rows of int32, one for 32 tokens.");
  pdkernels::draft_masks(automaton, state, parsed, static_cast<int32_t*>(to.ptr));
}

constexpr const char* kMasksDoc =
    "Writes the masks of a draft into rows of bits: of each ``(row, budget, tokens)`` as `mask` does after the tokens; "
    "a row that they lead nowhere is left as it is.";

void bind_grammar(py::module_& m) {
  py::register_local_exception<pdkernels::TooLarge>(m, "TooLarge", PyExc_ValueError);

  py::class_<ByteAutomaton>(m, "ByteAutomaton", py::module_local(),
                            R"(A deterministic automaton over bytes.

Args:
    states: of the nondeterministic automaton that it is made from.
    edges: ``(from, first, last, to)``, on the bytes ``first .. last``.
    empty: ``(from, to)``, without a byte.
    start, accept: states.
    max_states, max_work: TooLarge, a ValueError, if the construction needs more states or steps.

Example:
    >>> from pdkernels._host import ByteAutomaton
    >>> made = ByteAutomaton(2, [(0, 97, 98, 1)], [(1, 0)], 0, 1, 100, 1000)
    >>> made.states, made.accepts(b"ab"), made.accepts(b"")
    (2, True, False)
)")
      .def(py::init(&parse_automaton), py::arg("states"), py::arg("edges"), py::arg("empty"), py::arg("start"),
           py::arg("accept"), py::arg("max_states"), py::arg("max_work"))
      .def_static(
          "of_texts",
          [](const std::vector<py::bytes>& texts, int64_t max_states) {
            std::vector<std::string> strings(texts.begin(), texts.end());
            const py::gil_scoped_release release;
            return pdkernels::automaton_of_texts(std::move(strings), max_states);
          },
          py::arg("texts"), py::arg("max_states"),
          "The automaton of some texts with the fewest states. TooLarge: more than `max_states`.")
      .def_static(
          "of", &automaton_of_expression, py::arg("expression"), py::arg("max_unfolded"), py::arg("max_of_texts"),
          py::arg("max_states"), py::arg("max_work"),
          "The automaton of an expression of `pdkernels.grammar.language`. TooLarge says of what there is too much: "
          "\"levels\" inside each other, states that it is \"unfolded\" to or that its \"texts\" have, \"states\", "
          "\"work\"; and after a space how many steps it took to find that.")
      .def_static("unfolded", &unfolded_states, py::arg("expression"), py::arg("max_unfolded"), py::arg("max_of_texts"),
                  py::arg("max_work"),
                  "States of the nondeterministic automaton of an expression. TooLarge: as by `of`.")
      .def(
          "product",
          [](const ByteAutomaton& made, const ByteAutomaton& other, bool intersect, int64_t max_states,
             int64_t max_work) {
            const py::gil_scoped_release release;
            return pdkernels::product(made, other, intersect, max_states, max_work);
          },
          py::arg("other"), py::arg("intersect"), py::arg("max_states"), py::arg("max_work"),
          "The automaton of the texts that the other one has as well, or (`intersect` false) has not. TooLarge: more "
          "states or steps.")
      .def_property_readonly("states", &ByteAutomaton::states,
                             "States from which a text is accepted; the first one starts.")
      .def_property_readonly(
          "work", [](const ByteAutomaton& made) { return made.work; }, "Steps of the construction.")
      .def_property_readonly(
          "runs",
          [](const ByteAutomaton& made) {
            std::vector<std::vector<std::tuple<int32_t, int32_t, int32_t>>> lines(made.states());
            for (int64_t state = 0; state < made.states(); ++state) {
              made.runs(state,
                        [&](int32_t first, int32_t last, int32_t to) { lines[state].emplace_back(first, last, to); });
            }
            return lines;
          },
          "Of each state, ranges of bytes and where they lead: ``(first, last, to)``.")
      .def_property_readonly(
          "table",
          [](const ByteAutomaton& made) {
            std::vector<std::vector<int32_t>> lines;
            for (int64_t state = 0; state < made.states(); ++state) {
              lines.emplace_back(made.next.begin() + state * 256, made.next.begin() + (state + 1) * 256);
            }
            return lines;
          },
          "The next state of each state after each byte; -1: none.")
      .def_property_readonly(
          "accepting",
          [](const ByteAutomaton& made) { return std::vector<bool>(made.accepting.begin(), made.accepting.end()); },
          "Which states accept.")
      .def(
          "skipping",
          [](const ByteAutomaton& made, uint8_t byte) {
            ByteAutomaton other;
            if (made.states() == 0) return other;
            other.next.assign(made.next.begin(), made.next.begin() + 256);
            other.next[byte] = 0;
            for (const int32_t to : made.next) other.next.push_back(to);
            for (int32_t& to : other.next) to = to < 0 ? to : to + 1;
            other.accepting = made.accepting;
            other.accepting.insert(other.accepting.begin(), made.accepting[0]);
            return other;
          },
          py::arg("byte"),
          "The automaton of the same texts, and of those with this byte before them: a first one is left out.")
      .def(
          "accepts",
          [](const ByteAutomaton& made, const py::bytes& text) {
            int32_t state = made.states() > 0 ? 0 : -1;
            for (const char byte : std::string(text)) {
              if (state >= 0) state = made.next[static_cast<size_t>(state) * 256 + static_cast<uint8_t>(byte)];
            }
            return state >= 0 && made.accepting[state];
          },
          py::arg("text"), "Whether it accepts a text.");

  py::class_<TokenAutomaton>(m, "TokenAutomaton", py::module_local(),
                             R"(An automaton over the tokens of a vocabulary.

State 0 starts; state `done` comes after an end token.

Args:
    automaton: a ByteAutomaton with a state.
    tokens: the bytes of each token; none: it is never part of a text.
    ends: ids that may follow a whole text.
    max_work: TooLarge, a ValueError, for more pairs of a state and a token that leads on from it.

Example:
    >>> from pdkernels._host import ByteAutomaton, TokenAutomaton
    >>> ab = ByteAutomaton(3, [(0, 97, 97, 1), (1, 98, 98, 2)], [], 0, 2, 100, 1000)
    >>> made = TokenAutomaton(ab, [b"a", b"b", b"ab", b""], [3], 1000)
    >>> made.next(0, 2), made.distance(0), made.done
    (2, 1, 3)
)")
      .def(py::init([](const ByteAutomaton& automaton, const std::vector<py::bytes>& tokens,
                       const std::vector<int64_t>& ends, int64_t max_work) {
             const TokenTexts texts("TokenAutomaton", tokens, ends);
             if (automaton.states() == 0) throw std::invalid_argument("pdkernels.TokenAutomaton: no text is accepted.");
             const py::gil_scoped_release release;
             return TokenAutomaton(automaton, texts.bytes, texts.offsets, ends, max_work);
           }),
           py::arg("automaton"), py::arg("tokens"), py::arg("ends"), py::arg("max_work"))
      .def_property_readonly("states", &TokenAutomaton::states, "States that tokens reach.")
      .def_property_readonly("classes", &TokenAutomaton::classes, "Classes of tokens that all states treat alike.")
      .def_property_readonly("done", &TokenAutomaton::done, "The state after an end token.")
      .def(
          "accepting",
          [](const TokenAutomaton& made, int32_t state) {
            check_states(made, {state});
            return made.accepting(state);
          },
          py::arg("state"), "Whether a text may end here.")
      .def(
          "distance",
          [](const TokenAutomaton& made, int32_t state) {
            check_states(made, {state});
            return made.distance(state);
          },
          py::arg("state"),
          "The fewest tokens from here to a whole text, an end token not counted; 2**31 - 1: no tokens lead to one.")
      .def(
          "next",
          [](const TokenAutomaton& made, int32_t state, int64_t token) {
            check_states(made, {state});
            return made.next(state, token);
          },
          py::arg("state"), py::arg("token"), "The state after a token; -1: there is none.")
      .def(
          "follow",
          [](const TokenAutomaton& made, int32_t state, const std::vector<int64_t>& tokens) {
            check_states(made, {state});
            for (const int64_t token : tokens) state = state < 0 ? state : made.next(state, token);
            return state;
          },
          py::arg("state"), py::arg("tokens"), "The state after some tokens; -1: there is none.")
      .def(
          "forced",
          [](const TokenAutomaton& made, int32_t state) {
            check_states(made, {state});
            const auto& bytes = made.forced(state);
            return std::vector<int32_t>(bytes.begin(), bytes.end());
          },
          py::arg("state"), "The bytes that every text has next, as far as there is no choice.")
      .def(
          "mask",
          [](const TokenAutomaton& made, int32_t state, int64_t budget, py::buffer bits) {
            check_states(made, {state});
            const py::buffer_info to = bits.request(true);
            return made.mask(state, budget, bits_of(made, to));
          },
          py::arg("state"), py::arg("budget"), py::arg("bits"),
          "Writes the bits of the tokens after which at most `budget` more complete the text; how many they are, and "
          "the last one.")
      .def(
          "masks",
          [](const TokenAutomaton& made, int32_t state, const DraftRows& rows, const py::buffer& bits) {
            check_states(made, {state});
            masks_of_draft(made, state, rows, bits);
          },
          py::arg("state"), py::arg("rows"), py::arg("bits"), kMasksDoc)
      .def(
          "places",
          [](const TokenAutomaton& made, const std::vector<int64_t>& canvas, const std::vector<int32_t>& starts,
             int64_t budget) {
            check_states(made, starts);
            const py::gil_scoped_release release;
            return made.places(canvas, starts, budget);
          },
          py::arg("canvas"), py::arg("starts"), py::arg("budget"),
          "The states before each token of a canvas and after the last one; -1 in it is a mask. Empty if nothing "
          "completes it.")
      .def(
          "allowed",
          [](const TokenAutomaton& made, const std::vector<int32_t>& before, const std::vector<int32_t>& after,
             py::buffer bits) {
            check_states(made, before);
            check_states(made, after);
            const py::buffer_info to = bits.request(true);
            return made.allowed(before, after, bits_of(made, to));
          },
          py::arg("before"), py::arg("after"), py::arg("bits"),
          "Writes the bits of the tokens that lead from a state before them to a state after them; how many they are, "
          "and the last one.")
      .def(
          "best",
          [](const TokenAutomaton& made, const std::vector<int64_t>& canvas, const std::vector<int32_t>& starts,
             int64_t budget, py::buffer scores) {
            check_states(made, starts);
            const py::buffer_info rows = scores.request();
            const int64_t masks = std::count(canvas.begin(), canvas.end(), -1);
            if (rows.itemsize != 4 || rows.size != masks * made.vocabulary()) {
              throw std::invalid_argument("pdkernels.TokenAutomaton: scores must be float32, a row for each mask.");
            }
            const py::gil_scoped_release release;
            return made.best(canvas, starts, budget, static_cast<const float*>(rows.ptr));
          },
          py::arg("canvas"), py::arg("starts"), py::arg("budget"), py::arg("scores"),
          "The tokens of the most probable completion of a canvas, given log-probabilities for each of its masks; "
          "empty if there is none.");
}

}  // namespace
