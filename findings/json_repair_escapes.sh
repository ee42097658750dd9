#!/usr/bin/env bash
# Expected: json-repair mends what is broken and leaves strings that are whole as JSON has them; what a cut answer gives is a part of what the whole gives.
# Seen: json-repair 0.64.6 does not read \/ and \f: an address with escaped slashes keeps its backslashes. A character that is written as two \u escapes becomes two halves, which no
# encoder takes. A closing brace that is missing is enough, and with skip_json_loads=True the same happens to valid JSON. A cut key gives a list, and a cut true a string, also with
# stream_stable=True.
# Output seen: a line for each text with what json-repair gives and what it should; "2 of 8 right".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import json_repair

cases = [  # text, options, what a reader expects, what comes
    ('{"u": "http:\\/\\/a.b\\/c"', {}, {"u": "http://a.b/c"}, {"u": "http:\\/\\/a.b\\/c"}),
    ('{"u": "http:\\/\\/a.b\\/c"}', {"skip_json_loads": True}, {"u": "http://a.b/c"}, {"u": "http:\\/\\/a.b\\/c"}),
    ('{"u": "a\\fb"', {}, {"u": "a\fb"}, {"u": "a\\fb"}),
    ('{"e": "\\ud83d\\ude00"', {}, {"e": "\U0001f600"}, {"e": "\ud83d\ude00"}),
    ('{"u": "a\\tb \\u00e9"', {}, {"u": "a\tb é"}, {"u": "a\tb é"}),
    ('{"key', {"stream_stable": True}, {}, ["key"]),
    ('[true, tru', {"stream_stable": True}, [True], [True, "tru"]),
    ('[true, "tr', {"stream_stable": True}, [True, "tr"], [True, "tr"]),
]
right, same = 0, True
for text, options, expected, wrong in cases:
    seen = json_repair.loads(text, **options)
    print(text, options, "gives", ascii(seen), "expected", ascii(expected))
    right += seen == expected
    same &= seen == wrong
print(f"{right} of {len(cases)} right")
sys.exit(not same)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check json_repair==0.64.6
"$folder/venv/bin/python" "$folder/seen.py"
