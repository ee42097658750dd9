"""The values of the keyword `format`."""

from __future__ import annotations

_DAY = r"(0[1-9]|1\d|2[0-8])"
_LEAP = r"([1-9]\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DATE = rf"([1-9]\d{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP})"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,12}){0,2}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}(\.[A-Za-z]{{2,8}})?"
_NAME = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,32}"
_CHARS = r"([A-Za-z0-9_.~!$&'()*+,;=:@%s-]|%%[0-9A-Fa-f]{2})*"  # of a path, a query, a fragment
_SEGMENT, _QUERY = _CHARS % "", _CHARS % "/?"
_AFTER, _PATH = rf"(\?{_QUERY})?(#{_QUERY})?", rf"(/{_SEGMENT})*"
_NAMED = r"[A-Za-z0-9_~-]+(\.[A-Za-z0-9_~-]+)*"  # a host of a URI, which has no longest name
_SCHEMES, _OTHERS = "(https?|ftps?|wss?|git|ssh|s3|gs)", "(urn:[a-z0-9]{2,12}|[a-z][a-z0-9+-]{2,24})"
_URI = rf"({_SCHEMES}://{_NAMED}(:[1-9]\d{{0,4}})?{_PATH}|{_OTHERS}:{_SEGMENT}[a-z0-9]){_AFTER}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_GROUPS = [rf"{_GROUP}(:{_GROUP}){{{count - 1}}}" if count else "" for count in range(9)]
_SHORT_IPV6 = (
    rf"{head}::({_GROUP}(:{_GROUP}){{0,{6 - n}}})?" if n < 7 else f"{head}::" for n, head in enumerate(_GROUPS[:8])
)
_MONTHS, _SECONDS = r"\d{1,2}M(\d{1,3}D)?", r"\d{1,4}M(\d{1,4}S)?"
_UNITS = rf"(\d{{1,4}}H({_SECONDS})?|{_SECONDS}|\d{{1,4}}S)"
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P((\d{{1,4}}Y({_MONTHS})?|\d{{1,4}}M(\d{{1,3}}D)?|\d{{1,4}}D)(T{_UNITS})?|\d{{1,4}}W|T{_UNITS})",
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "|".join((_GROUPS[8], *_SHORT_IPV6)),
    "email": rf"{_NAME}(\.{_NAME}){{0,3}}@({_LABEL}\.){{1,3}}[A-Za-z]{{2,8}}",
    "hostname": _HOST,
    "uri": _URI,
    "uri-reference": rf"{_URI}|{_PATH}{_AFTER}",
    "uri-template": rf"(https?://{_NAMED})?(/([A-Za-z0-9_.~-]*|\{{[a-z]{{1,12}}(,[a-z]{{1,12}}){{0,3}}\}}))*",
    "relative-json-pointer": r"(0|[1-9]\d{0,2})(#|(/([^~/\x00-\x1f]|~[01])*)*)",
    "regex": r"\^?([A-Za-z0-9 _,:;@#%&=!~<>/.-]|\\[dsw.]|\[[a-y]-z\]\+?)*\$?",
    "json-pointer": r"(/([^~/\x00-\x1f]|~[01])*)*",
    "byte": r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
}
"""Patterns of texts that have a format; not all that have it."""
PATTERNS |= {"url": PATTERNS["uri"], "idn-email": PATTERNS["email"], "idn-hostname": PATTERNS["hostname"]}
PATTERNS |= {"iri": PATTERNS["uri"], "iri-reference": PATTERNS["uri-reference"]}
PATTERNS |= {"host-name": PATTERNS["hostname"], "ip-address": PATTERNS["ipv4"]}  # of draft 3
ANY = frozenset({"binary", "password"})
"""Formats that every string has."""
OF_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "uint": (0, None),
    "float": (None, None),
    "double": (None, None),
}
"""OpenAPI's and Rust's."""
OF_STRINGS = ANY | PATTERNS.keys()
KNOWN = OF_STRINGS | OF_NUMBERS.keys()
"""Others demand nothing, as keywords that JSON Schema does not have."""
