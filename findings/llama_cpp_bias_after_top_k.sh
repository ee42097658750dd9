#!/usr/bin/env bash
# Expected: samplers of a chain may stand in any order. A bias after top-k changes the probabilities, and what follows sees the new ones: a banned token
# has the probability 0, and the nucleus begins with the token that a bias of +10 made the likeliest.
# Seen: llama.cpp 0.5.0 (prebuilt, @node-llama-cpp/linux-x64 3.22.1). top-k leaves the candidates sorted, logit_bias changes their logits, and the mark that
# they are sorted stays. The first one is then taken for the likeliest. If it is banned, every probability is NaN and the last candidate is drawn. If
# another one is raised to 0.999, min-p of 0.5 throws that one away, and top-p of 0.5 keeps all four. Bias before top-k gives what was expected.
# Output seen: "ban after top-k: nan nan nan, drawn: 2", "raise 3 after top-k, min-p 0.5: 0 1", "raise 3 after top-k, top-p 0.5: 0 1 2 3", and in the other
# order "ban: 0.667 0.333, drawn 1", "min-p 0.5: 3", "top-p 0.5: 3".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm pack --silent @node-llama-cpp/linux-x64@3.22.1 > /dev/null
tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
cat > seen.py <<'PYTHON'
import ctypes as c
import math
import pathlib
import sys

folder = pathlib.Path("package/bins/linux-x64").resolve()
for name in ("libggml-base.so", "libggml.v0.5.0.so"):
    c.CDLL(str(folder / name), mode=c.RTLD_GLOBAL)
llama = c.CDLL(str(folder / "libllama.v0.5.0.so"))


class Bias(c.Structure):
    _fields_ = [("token", c.c_int32), ("bias", c.c_float)]


class Token(c.Structure):
    _fields_ = [("id", c.c_int32), ("logit", c.c_float), ("p", c.c_float)]


class Tokens(c.Structure):
    _fields_ = [("data", c.POINTER(Token)), ("size", c.c_size_t), ("selected", c.c_int64), ("sorted", c.c_bool)]


def made(name: str, kinds: list[type], *given: object) -> c.c_void_p:
    function = getattr(llama, f"llama_sampler_init_{name}")
    function.argtypes, function.restype = kinds, c.c_void_p
    return function(*given)


llama.llama_sampler_apply.argtypes, llama.llama_sampler_apply.restype = [c.c_void_p, c.c_void_p], None
PROBABILITIES = (0.5, 0.3, 0.15, 0.05)


def bias(token: int, by: float) -> c.c_void_p:
    return made("logit_bias", [c.c_int32, c.c_int32, c.POINTER(Bias)], len(PROBABILITIES), 1, Bias(token, by))


def top_k(k: int) -> c.c_void_p:
    return made("top_k", [c.c_int32], k)


def top_p(p: float) -> c.c_void_p:
    return made("top_p", [c.c_float, c.c_size_t], p, 1)


def min_p(p: float) -> c.c_void_p:
    return made("min_p", [c.c_float, c.c_size_t], p, 1)


def draw(seed: int) -> c.c_void_p:
    return made("dist", [c.c_uint32], seed)


def run(*samplers: c.c_void_p) -> tuple[list[tuple[int, float]], int | None]:
    """Ids and probabilities that are left, and the id that was drawn."""
    data = (Token * len(PROBABILITIES))(*(Token(i, math.log(p), 0) for i, p in enumerate(PROBABILITIES)))
    tokens = Tokens(data, len(data), -1, False)
    for sampler in samplers:
        llama.llama_sampler_apply(sampler, c.byref(tokens))
    left = [(tokens.data[i].id, tokens.data[i].p) for i in range(tokens.size)]
    return left, left[tokens.selected][0] if tokens.selected >= 0 else None


def ids(*samplers: c.c_void_p) -> str:
    return " ".join(str(token) for token, _ in sorted(run(*samplers)[0]))


def drawn(*samplers: c.c_void_p) -> str:
    """With twenty seeds."""
    return " ".join(map(str, sorted({run(*samplers, draw(seed))[1] for seed in range(20)})))


ban, raised = bias(0, -math.inf), bias(3, 10)
banned, before = run(top_k(3), ban, draw(1))[0], run(ban, top_k(2), draw(1))[0]
seen = [
    f"ban after top-k: {' '.join(f'{p:.3f}' for _, p in banned)}, drawn: {drawn(top_k(3), ban)}",
    f"raise 3 after top-k, min-p 0.5: {ids(top_k(4), raised, min_p(0.5))}",
    f"raise 3 after top-k, top-p 0.5: {ids(top_k(4), raised, top_p(0.5))}",
    f"ban before top-k: {' '.join(f'{p:.3f}' for _, p in before)}, drawn: {drawn(ban, top_k(2))}",
    f"raise 3 before top-k, min-p 0.5: {ids(raised, top_k(4), min_p(0.5))}",
    f"raise 3 before top-k, top-p 0.5: {ids(raised, top_k(4), top_p(0.5))}",
]
print(*seen, sep="\n")
sys.exit(
    seen
    != [
        "ban after top-k: nan nan nan, drawn: 2",
        "raise 3 after top-k, min-p 0.5: 0 1",
        "raise 3 after top-k, top-p 0.5: 0 1 2 3",
        "ban before top-k: 0.667 0.333, drawn: 1 2",
        "raise 3 before top-k, min-p 0.5: 3",
        "raise 3 before top-k, top-p 0.5: 3",
    ]
)
PYTHON
python3 seen.py
