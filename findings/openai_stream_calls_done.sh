#!/usr/bin/env bash
# Expected: the client's stream says tool_calls.function.arguments.done once for each call, with all of its arguments, and gives a message with the role that its type allows.
# Seen: openai 3.57.0 takes another index for the end of the call before. Where the pieces of two calls alternate, as their indices allow, each is "done" with the half of its
# arguments that has come, and a call that starts in the chunk of the finish_reason is never done, alone or behind another. The final completion is right. A role in every
# chunk, as the type of a delta allows, ends as "assistantassistant" in the final message.
# Output seen: a line for each stream with the index and the arguments of its events and what the final message holds; one of five is right, the last.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import httpx2
from openai import OpenAI


def stream(*pieces):
    """What the client makes of a stream of (delta, finish_reason)."""
    chunks = [
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in pieces
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    answer = lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=body)
    client = OpenAI(api_key="none", base_url="http://x/v1", http_client=httpx2.Client(transport=httpx2.MockTransport(answer)))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}], tools=tools) as events:
        done = [(event.index, event.arguments) for event in events if event.type == "tool_calls.function.arguments.done"]
        message = events.get_final_completion().choices[0].message
    return done, [call.function.arguments for call in message.tool_calls or []], message.role


def start(index, arguments):
    call = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]} if index == 0 else {"tool_calls": [call]}


def more(index, arguments):
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


end = {}, "tool_calls"
cases = {
    "alternating": [(start(0, '{"a":'), None), (start(1, '{"b":'), None), (more(0, "0}"), None), (more(1, "1}"), None), end],
    "finished with the second call": [(start(0, '{"a":0}'), None), (start(1, '{"b":1}'), "tool_calls")],
    "finished with the only call": [(start(0, '{"a":0}'), "tool_calls")],
    "role in every chunk": [({"role": "assistant", "content": "a"}, None), ({"role": "assistant", "content": "b"}, None), ({}, "stop")],
    "one after the other": [(start(0, '{"a":'), None), (more(0, "0}"), None), (start(1, '{"b":'), None), (more(1, "1}"), None), end],
}
whole = ['{"a":0}', '{"b":1}']
expected = {
    "alternating": ([(0, '{"a":'), (1, '{"b":')], whole, "assistant"),
    "finished with the second call": ([(0, '{"a":0}')], whole, "assistant"),
    "finished with the only call": ([], whole[:1], "assistant"),
    "role in every chunk": ([], [], "assistantassistant"),
    "one after the other": ([(0, '{"a":0}'), (1, '{"b":1}')], whole, "assistant"),
}
seen = {name: stream(*pieces) for name, pieces in cases.items()}
for name, (done, calls, role) in seen.items():
    print(f"{name}: done {done}; final {calls}, role {role}")
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openai==3.57.0 httpx2==2.16.2
"$folder/venv/bin/python" "$folder/seen.py"
