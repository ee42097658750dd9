#!/usr/bin/env bash
# Expected: what GGUFWriter is told to write is in the file, an empty string and an empty array too: GGUF has both.
# Seen: gguf 0.19.0 leaves them out without a word, keys and all, so that a reader takes what an absent key means: an empty chat template becomes none, and a
# reader that has a default takes it. A zero and a false are written.
# Output seen: "written: general.architecture, zero, false".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import gguf

file = sys.argv[1]
writer = gguf.GGUFWriter(file, "llama")
writer.add_uint32("zero", 0)
writer.add_bool("false", False)
writer.add_string("empty string", "")
writer.add_array("empty array", [])
writer.add_chat_template("")
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
seen = [name for name in gguf.GGUFReader(file).fields if not name.startswith("GGUF.")]
print("written:", ", ".join(seen))
sys.exit(seen != ["general.architecture", "zero", "false"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check gguf==0.19.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder/made.gguf"
