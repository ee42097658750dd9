#!/usr/bin/env bash
# Expected: the result of a tool, a string in ToolMessage, reaches the model as it is; a longer number in it is not another number.
# Seen: with the tokenizers v2 and v3, mistral-common 1.13.1 reads a result as JSON where it can and writes it anew: the version 1.10 is 1.1 for the model, digits beyond a float
# are gone, 1e400 becomes Infinity, which is no JSON, and of a repeated key the last is left. v7 keeps the text. Arguments of calls in the conversation are read and written so
# in all three.
# Output seen: a line for each result with what the model gets of it in v3 and in v7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import re
import sys

from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer


def prompt(tokenizer, result):
    call = ToolCall(id="abcdefghi", function=FunctionCall(name="f", arguments='{"x": 1.10}'))
    request = ChatCompletionRequest(
        tools=[Tool(function=Function(name="f", parameters={"type": "object"}))],
        messages=[
            UserMessage(content="Which version?"),
            AssistantMessage(content=None, tool_calls=[call]),
            ToolMessage(tool_call_id="abcdefghi", name="f", content=result),
        ],
    )
    return tokenizer.encode_chat_completion(request).text.replace("▁", " ")


def told(tokenizer, result):
    text = prompt(tokenizer, result)
    return re.search(r'\[TOOL_CONTENT\] ?(.*)\[/TOOL_RESULTS\]|\[TOOL_RESULTS\] ?\{"content": (.*), "call_id"', text)


v3, v7 = MistralTokenizer.v3(is_tekken=True), MistralTokenizer.v7()
expected = {
    "1.10": "1.1",
    "12345678901234567890.5": "1.2345678901234567e+19",
    "1e400": "Infinity",
    '{"a": 1, "a": 2}': '{"a": 2}',
    "version 1.10": '"version 1.10"',
}
right = True
for result, rewritten in expected.items():
    seen = told(v3, result)[2], told(v7, result)[1]
    print(f"{result}: v3 {seen[0]}, v7 {seen[1]}")
    right &= seen == (rewritten, result)
arguments = [re.search(r'"arguments": (\{.*?\})', prompt(tokenizer, "x"))[1] for tokenizer in (v3, v7)]
print('arguments {"x": 1.10}: v3', arguments[0], "v7", arguments[1])
sys.exit(not right or arguments != ['{"x": 1.1}', '{"x": 1.1}'])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3
"$folder/venv/bin/python" "$folder/seen.py"
