#!/usr/bin/env bash
# Expected: litellm.stream_chunk_builder makes of the chunks of a stream the answer that the same request gives without one.
# Seen: litellm 1.110.2 leaves the log-probabilities of a chat out, without a word, while text, calls and both of two choices are put together.
# Output seen: "chunks: ['a', 'b']", "answer: text ab, logprobs none".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import litellm
from litellm.types.utils import ModelResponseStream

litellm.suppress_debug_info = True


def chunk(delta, reason, token):
    logprobs = {"content": [{"token": token, "logprob": -0.5, "bytes": [*token.encode()], "top_logprobs": []}]}
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return ModelResponseStream(id="c", object="chat.completion.chunk", created=1, model="gpt-4o", choices=[choice])


chunks = [chunk({"role": "assistant", "content": "a"}, None, "a"), chunk({"content": "b"}, "stop", "b")]
print("chunks:", [entry.token for piece in chunks for entry in piece.choices[0].logprobs.content])
choice = litellm.stream_chunk_builder(chunks).choices[0]
logprobs = getattr(choice, "logprobs", None)
print(f"answer: text {choice.message.content}, logprobs {'none' if logprobs is None else logprobs}")
sys.exit((choice.message.content, logprobs) != ("ab", None))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" "$folder/seen.py"
