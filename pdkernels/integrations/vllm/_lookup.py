"""The proposer: drafts looked up in a request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

from pdkernels.decoding.causal.lookup import GROWTH, LEAST, REACH


def looked_up(text: numpy.ndarray, maximum: int) -> list[int]:
    """The tokens that followed an earlier occurrence of the last tokens of `text` ``(tokens,)``, at most `maximum`.

    The rule of ``jacobi(draft="lookup")`` without its pool of rejected tokens: the longest match of at most `REACH`
    tokens wins, and the latest on ties. A short match gives a short draft, and a match of a single token gives none.

    >>> import numpy
    >>> looked_up(numpy.array([1, 2, 3, 1, 2]), 9), looked_up(numpy.array([1, 2, 3]), 9)
    ([3, 1, 2, 3, 1, 2], [])
    """
    import numpy

    size = len(text)
    ends = numpy.arange(1, size)  # each end is the index after a match
    length = 0
    for compared in range(1, REACH + 1):
        ends = ends[ends >= compared]
        ends = ends[text[ends - compared] == text[size - compared]] if compared < size else ends[:0]
        if len(ends) == 0:
            break
        length, after = compared, int(ends[-1])
    if length < LEAST:
        return []
    count = maximum if length == REACH else min(maximum, GROWTH * length)
    followed: list[int] = text[after : after + count].tolist()
    # A repeating text is drafted at full length.
    return (followed * -(-count // len(followed)))[:count]


class LookupProposer:
    """Drafts for speculative decoding in vLLM from what followed earlier occurrences of a request's last tokens.

    Drafting takes no forward, and drafts are accepted wherever an answer quotes its prompt or repeats itself. vLLM
    verifies the drafts, so the tokens are those without drafts. Unlike vLLM's own method "ngram", a longer match gives
    a longer draft, a match of one token gives none, and a repeating text is drafted at full length. An engine's
    arguments enable it, with the maximum length of a draft::

        speculative_config={"method": "custom_class", "model": "pdkernels.integrations.vllm.LookupProposer",
        "num_speculative_tokens": 8}

    Args:
        vllm_config: of the engine.

    Source: Saxena, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding, 2023), as in
        ``jacobi(draft="lookup")``.

    Example:
        >>> import numpy
        >>> from types import SimpleNamespace
        >>> from pdkernels.integrations.vllm import LookupProposer
        >>> engine = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=4))
        >>> texts = numpy.array([[1, 2, 3, 1, 2, 0], [5, 6, 7, 0, 0, 0]])
        >>> LookupProposer(engine).propose([[2], [7]], numpy.array([5, 3]), texts)
        [[3, 1, 2, 3], []]
    """

    def __init__(self, vllm_config: Any) -> None:
        self.maximum = int(vllm_config.speculative_config.num_speculative_tokens)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: numpy.ndarray,
        token_ids_cpu: numpy.ndarray,
        **_: Any,
    ) -> list[list[int]]:
        """A draft for each request that has just received tokens.

        Args:
            sampled_token_ids: the tokens of each request in this step; empty while its prompt is still being processed.
            num_tokens_no_spec: ``(requests,)`` tokens of each text.
            token_ids_cpu: ``(requests, longest)`` the texts.
        """
        return [
            looked_up(token_ids_cpu[request, : num_tokens_no_spec[request]], self.maximum) if len(new) else []
            for request, new in enumerate(sampled_token_ids)
        ]
