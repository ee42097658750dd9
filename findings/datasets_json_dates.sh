#!/usr/bin/env bash
# Expected: load_dataset("json") gives the values that the lines have: a string is text, and an integer stays itself, as it does where a column also has strings.
# Seen: datasets 5.2.0 with pyarrow 26.0.1 makes timestamps of a column whose texts all look like dates: prompts and answers "2020-01-01" come back as datetime objects, and one more text
# in the file decides. Integers beyond 64 bits are rounded to floats, and those beyond 2^53 where another row has a fraction. Nothing is said.
# Output seen: a line for each file with the type of the column and its values; one of four is what the lines have, the dates beside "none".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import datetime
import json
import os
import sys

import datasets

datasets.disable_progress_bars()
days = [datetime.datetime(2020, 1, 1), datetime.datetime(2021, 2, 3)]
cases = {
    "dates": (["2020-01-01", "2021-02-03"], "timestamp[s]", days),
    "dates and a word": (["2020-01-01", "none"], "string", ["2020-01-01", "none"]),
    "beyond 64 bits": ([2**64, 1], "float64", [1.8446744073709552e19, 1.0]),
    "beside a fraction": ([2**53 + 1, 0.5], "float64", [9007199254740992.0, 0.5]),
}
right = True
for name, (values, dtype, read) in cases.items():
    file = os.path.join(sys.argv[1], f"{name}.jsonl")
    with open(file, "w") as lines:
        lines.writelines(json.dumps({"answer": value}) + "\n" for value in values)
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=os.path.join(sys.argv[1], "cache", name))
    seen = rows.features["answer"].dtype, list(rows["answer"])
    print(f"{name}: {values} -> {seen[0]} {seen[1]}")
    right &= seen == (dtype, read)
sys.exit(not right)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile datasets==5.2.0 pyarrow==26.0.1
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" "$folder/venv/bin/python" "$folder/seen.py" "$folder"
