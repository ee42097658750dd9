#!/usr/bin/env bash
# Expected: a token that is excluded has the probability 0 and adds nothing to the entropy by which typical sampling judges the others, as 0 log 0 is 0.
# Seen: llama.cpp 0.5.0 (prebuilt, @node-llama-cpp/linux-x64 3.22.1). Biased to minus infinity, or cut off by top-n-sigma, which comes before typical-p in the
# default order, the token stays in the list; 0 times minus infinity makes the entropy NaN, and the list is cut as it happens to be sorted. Of
# probabilities 0.6, 0.3, 0.1 beside an excluded token, typical-p of 0.5 keeps the first alone. If min-p takes the token out of the list before, it
# keeps the first two, which is right: 0.3 is nearest to the entropy, and 0.6 the next.
# Output seen: "banned: 1", "banned and taken out: 1 2", "cut by top-n-sigma: 1", "cut and taken out: 1 2".
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
ENTRIES = (0.001, 0.6, 0.3, 0.1)


def ban(token: int) -> c.c_void_p:
    return made("logit_bias", [c.c_int32, c.c_int32, c.POINTER(Bias)], len(ENTRIES), 1, Bias(token, -math.inf))


def sigma(n: float) -> c.c_void_p:
    return made("top_n_sigma", [c.c_float], n)


def typical(p: float) -> c.c_void_p:
    return made("typical", [c.c_float, c.c_size_t], p, 1)


def min_p(p: float) -> c.c_void_p:
    return made("min_p", [c.c_float, c.c_size_t], p, 1)


def ids(*samplers: c.c_void_p) -> str:
    """Of what is left."""
    data = (Token * len(ENTRIES))(*(Token(i, math.log(p), 0) for i, p in enumerate(ENTRIES)))
    tokens = Tokens(data, len(data), -1, False)
    for sampler in samplers:
        llama.llama_sampler_apply(sampler, c.byref(tokens))
    return " ".join(str(token) for token in sorted(tokens.data[i].id for i in range(tokens.size)))


seen = [
    f"banned: {ids(ban(0), typical(0.5))}",
    f"banned and taken out: {ids(ban(0), min_p(0.01), typical(0.5))}",
    f"cut by top-n-sigma: {ids(sigma(1), typical(0.5))}",
    f"cut and taken out: {ids(sigma(1), min_p(0.01), typical(0.5))}",
]
print(*seen, sep="\n")
sys.exit(
    seen != ["banned: 1", "banned and taken out: 1 2", "cut by top-n-sigma: 1", "cut and taken out: 1 2"]
)
PYTHON
python3 seen.py
