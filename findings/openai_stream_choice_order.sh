#!/usr/bin/env bash
# Expected: `client.chat.completions.stream` with n above 1 follows the `index` of a choice, whichever choice the server writes first, since choices are made side by side.
# Seen: openai 3.57.0 raises IndexError where choice 1 comes before choice 0, or choice 2 before choice 1, since it takes the index for a place in its list (a fix is proposed
# in openai/openai-python#3709). With `create(stream=True)` the chunks come through, and both choices in one chunk are read whatever their order.
# Output seen: "0 before 1: Aa, Bb", "1 before 0: IndexError: list assignment index out of range", "2 before 1: IndexError: list index out of range", "1 and 0 in one chunk: Aa, Bb".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import httpx2
import openai

print("openai", openai.__version__)


def stream(*chunks):
    """The texts that the client reads from chunks of (index, text)."""
    body = ""
    for choices in chunks:
        new = [{"index": index, "delta": {"role": "assistant", "content": text} if text.isupper() else {"content": text}, "finish_reason": None} for index, text in choices]
        body += f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'created': 1, 'model': 'm', 'choices': new})}\n\n"
    number = 1 + max(index for choices in chunks for index, _ in choices)
    for index in range(number):
        end = [{"index": index, "delta": {}, "finish_reason": "stop"}]
        body += f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'created': 1, 'model': 'm', 'choices': end})}\n\n"
    answer = lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=body + "data: [DONE]\n\n")
    client = openai.OpenAI(api_key="none", base_url="http://x/v1", http_client=httpx2.Client(transport=httpx2.MockTransport(answer)))
    try:
        with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}], n=number) as events:
            return ", ".join(choice.message.content for choice in events.get_final_completion().choices)
    except IndexError as error:
        return f"IndexError: {error}"


cases = {
    "0 before 1": ([(0, "A")], [(1, "B")], [(0, "a")], [(1, "b")]),
    "1 before 0": ([(1, "B")], [(0, "A")], [(0, "a")], [(1, "b")]),
    "2 before 1": ([(0, "A")], [(2, "C")], [(1, "B")]),
    "1 and 0 in one chunk": ([(1, "B"), (0, "A")], [(0, "a")], [(1, "b")]),
}
seen = {name: stream(*chunks) for name, chunks in cases.items()}
for name, text in seen.items():
    print(f"{name}: {text}")
sys.exit([text[:10] for text in seen.values()] != ["Aa, Bb", "IndexError", "IndexError", "Aa, Bb"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile openai==3.57.0
"$folder/venv/bin/python" "$folder/seen.py"
