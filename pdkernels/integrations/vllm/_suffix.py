"""The proposer that drafts from suffix automata: a request's own text, and the texts of requests that are done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

from pdkernels.decoding.suffixes import Reader, SuffixPool


class SuffixProposer:
    """Drafts for speculative decoding in vLLM from the longest end of a text that occurred before, in it or in earlier
    requests.

    As `LookupProposer`, but matches may have any length, a token costs a few steps however long texts are, and requests
    that repeat each other are drafted from one another. An engine's arguments enable it, with the maximum length of a
    draft::

        speculative_config={"method": "custom_class", "model": "pdkernels.integrations.vllm.SuffixProposer",
        "num_speculative_tokens": 16}

    vLLM names no requests to a proposer: it shows the texts by their rows in the batch. A row whose text goes on is the
    same request, a text that has moved to another row is recognised, and one that is not shown any more is done and
    joins the pool.

    Args:
        vllm_config: of the engine.

    Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), as in the method "suffix".

    Example:
        >>> import numpy
        >>> from types import SimpleNamespace
        >>> from pdkernels.integrations.vllm import SuffixProposer
        >>> engine = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=4))
        >>> proposer = SuffixProposer(engine)
        >>> proposer.propose([[2]], numpy.array([5]), numpy.array([[1, 2, 3, 1, 2]]))
        [[3, 1, 2, 3]]
        >>> proposer.propose([[2]], numpy.array([2]), numpy.array([[7, 2, 0, 0, 0]]))
        [[]]
        >>> proposer.propose([[3]], numpy.array([3]), numpy.array([[7, 2, 3, 0, 0]]))  # from the first request, which is done
        [[1, 2]]
    """

    def __init__(self, vllm_config: Any) -> None:
        self.maximum = int(vllm_config.speculative_config.num_speculative_tokens)
        self.pool = SuffixPool()
        self._readers: list[Reader] = []
        """Of the rows of the last call."""

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
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        left, rows = list(self._readers), list[Reader | None]()
        for row, text in enumerate(texts):
            before = self._readers[row : row + 1]
            known = next((reader for reader in before if reader in left and _goes_on(reader, text)), None)
            if known is not None:
                left.remove(known)
            rows.append(known)
        for row, text in enumerate(texts):
            if rows[row] is None:
                moved = next((reader for reader in left if _goes_on(reader, text)), None)
                if moved is not None:
                    left.remove(moved)
                rows[row] = moved
        for reader in left:
            self.pool.add(reader.own.tokens)
        self._readers = [Reader(self.pool) if reader is None else reader for reader in rows]
        for reader, text in zip(self._readers, texts, strict=True):
            for token in text[len(reader.own.tokens) :].tolist():
                reader.append(token)
        return [
            reader.draft(self.maximum) if len(new) else []
            for reader, new in zip(self._readers, sampled_token_ids, strict=True)
        ]


def _goes_on(reader: Reader, text: numpy.ndarray) -> bool:
    """Whether a text is that of a reader, or a longer one that begins with it."""
    known = reader.own.tokens
    return 0 < len(known) <= len(text) and text[len(known) - 1] == known[-1] and text[: len(known)].tolist() == known
