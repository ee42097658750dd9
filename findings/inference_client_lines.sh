#!/usr/bin/env bash
# Expected: a stream of events is cut at line feeds and carriage returns alone, as its standard has it, so that a text may hold any other character as JSON allows.
# Seen: InferenceClient of huggingface_hub 2.4.0 also cuts at U+2028, U+2029 and U+0085, which models write and servers that write JSON in UTF-8 send as
# they are: the rest of the answer is lost in a JSONDecodeError. Escaped, the same text is read.
# Output seen: "U+2028: ['a'] and JSONDecodeError, escaped ['a', 'b\u2028c', 'd']", the same for U+2029 and U+0085, and "U+00E9: ['a', 'béc', 'd'], escaped ['a', 'béc', 'd']".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import http.server
import json
import sys
import threading

import huggingface_hub

print("huggingface_hub", huggingface_hub.__version__)


class Server(http.server.BaseHTTPRequestHandler):
    """Streams the texts that the last message names, in UTF-8 or escaped."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts, escaped = json.loads(request["messages"][-1]["content"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for text in texts:
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=escaped)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()


def read(texts, escaped):
    """The texts that the client reads, and whether an error ended them."""
    client, seen = huggingface_hub.InferenceClient(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none"), []
    try:
        for event in client.chat_completion([{"role": "user", "content": json.dumps([texts, escaped])}], model="m", stream=True):
            seen.append(event.choices[0].delta.content)
    except json.JSONDecodeError:
        seen.append(json.JSONDecodeError)
    return seen


right = []
for character in "\u2028\u2029\u0085\u00e9":
    texts = ["a", f"b{character}c", "d"]
    plain, escaped = read(texts, False), read(texts, True)
    broken = plain[-1] is json.JSONDecodeError
    print(f"U+{ord(character):04X}: {plain[:-1]} and JSONDecodeError, escaped {escaped}" if broken else f"U+{ord(character):04X}: {plain}, escaped {escaped}")
    right.append((plain == (["a", json.JSONDecodeError] if character != "\u00e9" else texts), escaped == texts))
sys.exit(right != [(True, True)] * 4)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile huggingface_hub==2.4.0
NO_PROXY=127.0.0.1 no_proxy=127.0.0.1 "$folder/venv/bin/python" "$folder/seen.py"
