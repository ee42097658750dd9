"""EAGLE-3: a head of one layer drafts from the target's hidden states, and one forward of the target verifies its chain
or tree.

Sources: "EAGLE-3" (arXiv 2503.01840); guesses in one forward as in "P-EAGLE" (arXiv 2602.01469); trees as in "EAGLE-2"
(arXiv 2406.16858). The head reads the features of rows that the target has computed, and its own rows where it has not
been yet. Features come with the verification (`Transformer.tapped`), so the target runs once per step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from pdkernels._philox import uniforms_at
from pdkernels._validation import check, check_type, refuse
from pdkernels.decoding.causal._drafter import UNREAD, checked_drafter
from pdkernels.decoding.causal._features import FeatureSteps, check_sizes, shared_head
from pdkernels.decoding.causal._tree import Growth, Tree
from pdkernels.decoding.costs import BlockSize, checked_block_size, draft_seconds, guess_seconds, step_costs
from pdkernels.decoding.steps import decoder
from pdkernels.generation.noise import OWN, banned_tokens, checked_size
from pdkernels.generation.session import Session
from pdkernels.masks import TreePlans
from pdkernels.masks.tree_plans import ancestors
from pdkernels.models import EagleHead, MtpHead, load_drafter
from pdkernels.models.capabilities import capabilities
from pdkernels.models.drafters.chain import chained, draft_chain
from pdkernels.models.drafters.rows import BranchRows

_LONGEST = 8  # of drafts whose length is chosen
_NODES = 1024  # of a tree


class EagleSteps(FeatureSteps):
    """Row i of the head's cache is about token i + 1, and is committed once the target has computed row i.

    Args:
        drafter: an `EagleHead` for this model, or the name or folder of one (`pdkernels.models.load_drafter`); None:
            the model's ``drafters["eagle"]``.
        block_size: tokens of a draft, the known first one included; 1 is autoregressive decoding. "auto" chooses
            the length of each draft by the measured times of forwards and by what was accepted so far; then it is never
            much slower than decoding token by token. Of a tree, the tokens of its longest path.
        branches: 1 drafts chains. More draft trees: so many of the most confident nodes of each depth are extended, by
            so many tokens each.
        nodes: tokens of a tree that are verified, the known one included: the most confident. None: `block_size` times
            `branches`.
        temperature: sampling temperature; 0 is greedy. Drafter and target draw with the same noise and the same
            filters, so the tokens are those that `autoregressive` samples with the same seed.
    """

    kind: ClassVar[type[EagleHead] | type[MtpHead]] = EagleHead

    def __init__(
        self,
        session: Session,
        *,
        drafter: Any = None,
        block_size: BlockSize = 4,
        branches: int = 1,
        nodes: int | None = None,
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        op = f"decoding.{self.kind.method}"
        size, chosen = checked_block_size(op, block_size, _LONGEST)
        self.sampler = session.sampler
        self.banned = banned_tokens(op, session.model, allow_mask_token)
        requested = checked_drafter(op, session.model, drafter, self.kind.method)
        if isinstance(requested, (str, os.PathLike)):
            requested = load_drafter(requested if isinstance(requested, str) else Path(requested), session.model)
        check_type(
            isinstance(requested, self.kind), op, "drafter", f"be an {self.kind.__name__}", type(requested).__name__
        )
        head: Any = requested
        check_sizes(op, session.model, head, head.config.target_hidden_size)
        self.shared = shared_head(op, session.model) if head.head is None else None
        slots = max(1, min(session.block(size), session.max_new_tokens - 1))
        self.embed = session.model.embed if head.embedding is None else head.embed
        self.chained = chained(head, session.model)
        self.branches, self.nodes = _checked_tree(
            op, session.model, branches, nodes, slots, chosen, len(head.vocabulary)
        )
        self.together = getattr(head.config, "mask_token", None) is not None
        """Whether the head makes all guesses in one forward."""
        fault = "a P-EAGLE head makes all guesses at once, so it drafts chains alone"
        refuse(self.together and self.branches > 1, op, fault, "Pass branches=1.")
        timed = HeadRows(head, self.embed, self.shared)
        costs = step_costs(session.model, slots, session.batch) if chosen else None
        if costs is not None:
            read, guess = draft_seconds(timed, session.batch), guess_seconds(timed, session.batch)
            if self.together:
                costs = costs.later(2 * read + draft_seconds(timed, session.batch * max(1, slots - 2)), guess)
            else:
                costs = costs._replace(guess=guess).later(read, guess)
        # A whole tree is stored behind any text, however few tokens are still pending.
        rows = slots if self.branches == 1 else max(self.nodes, slots + 1)
        self.allocate_drafter(op, session, slots, page_size, head, costs, rows)
        self.plans: dict[int, TreePlans] = {}
        ids = head.vocabulary.tolist() if self.branches > 1 else []
        self.hidden_ids = tuple(number for number, token in enumerate(ids) if token in self.banned)
        self.allocate_features(session, head, slots + UNREAD)
        self.tokens = torch.zeros(session.batch, self.room, dtype=torch.int64, device=self.cache.device)
        """The tokens after these rows."""

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.tokens

    def start(self, session: Session) -> None:
        prompts, lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_(), self.drafted.lengths.zero_()
        last, counts = (lengths - 1)[:, None], session.ragged(lengths)
        hidden, taps = self.model.tapped(prompts, self.taps, cache=self.cache, counts=counts)
        index = last[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.model.logits(hidden.gather(1, index))
        first = self.sampler.sample(logits, lengths[:, None], self.seeds, OWN, self.banned)
        self.cache.commit_(lengths)
        self.begin(session, first, logits)
        self.entry.draft.copy_(first.clamp(min=0))
        if self.slots == 1:  # it never drafts
            return
        features = self.drafter.fused(taps)
        if session.longest > 1:
            self.drafter(self.embed(prompts[:, 1:]), features[:, :-1], cache=self.drafted, counts=lengths - 1)
            self.drafted.commit_(lengths - 1)
        index = last[..., None].expand(-1, -1, features.shape[-1])
        self.features[:, :1] = features.gather(1, index)
        self.tokens[:, :1] = self.entry.draft
        self.fresh.fill_(1)
        self.most = 1

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        # What a grammar forces is a chain.
        if self.branches == 1 or width == 1 or self._forced is not None:
            super().step(width, ragged)
        else:
            self.most = self.slots if width is None else self.most
            self._step_of_tree(width or self.slots, ragged)

    def _step_of_tree(self, width: int, ragged: bool) -> None:
        tree = self._grow(width)
        nodes = tree.tokens.shape[1]
        counts = self.entry.pending.sign() * nodes if ragged else None
        plan = tree.plan(self._plans_of(nodes), width - 1)
        hidden, taps = self.model.tapped(
            tree.tokens, self.taps, cache=self.cache, counts=counts, mask=plan, positions=tree.depths
        )
        logits = self.model.logits(hidden)
        positions = self.cache.lengths[:, None] + 1 + tree.depths
        predictions = self.sampler.sample(logits, positions, self.seeds, OWN, self.banned)
        path, length = tree.path(predictions, width)

        def along(rows: torch.Tensor) -> torch.Tensor:
            return rows.gather(1, path[..., None].expand(-1, -1, rows.shape[-1]))

        self._verified = along(self.drafter.fused(taps))
        draft = tree.tokens.gather(1, path)
        self.take(draft, torch.minimum(length, self.entry.pending), along(logits), predictions.gather(1, path), path)

    def _grow(self, width: int) -> Tree:
        """A tree whose paths have at most `width` tokens, and no more than are pending."""
        hidden, lengths = self._read(), self.cache.lengths[:, None]
        growth = Growth(self.entry.draft, self.branches, self.entry.pending[:, None] - 1)
        before = growth.add(*self._candidates(hidden, lengths + 1))
        parents = torch.full_like(before, -1)  # of the head's own rows, of which the known token is none
        rows = BranchRows(self.drafter.config.body, self.drafter.tables, self.drafted, self.plans)
        for depth in range(1, width - 1):
            embedded = self.embed(growth.frontier)
            rows.add(embedded, depth - 1, ancestors(parents, depth - 1))
            hidden = self.drafter.run(embedded, hidden.gather(1, before[..., None].expand_as(embedded)), rows)
            before = growth.add(*self._candidates(hidden, lengths + depth + 1))
            parents = torch.cat([parents, before + self.branches * (depth - 1)], 1)
        return growth.best(self.nodes)

    def _candidates(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's `branches` best tokens ``(batch, n, branches)`` after each row, and the logarithms of their
        probabilities.

        Of a draw these are the probabilities that are left when its noise is known: the noise is part of the logits.
        """
        logits: torch.Tensor = self.logits_of(hidden)
        vocabulary: torch.Tensor = self.drafter.vocabulary
        if self.sampler.temperature > 0:
            scores = self.sampler.filtered(logits, self.hidden_ids).double() / self.sampler.temperature
            uniform = uniforms_at(self.seeds[:, None, None], OWN, positions[..., None], vocabulary)
            logits = scores - (-uniform.log()).log()
        shares = logits.float().log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf).clamp(max=0)
        best = shares.topk(self.branches, -1)
        return vocabulary[best.indices], best.values

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self.drafter, hidden, self.shared)

    def _plans_of(self, nodes: int) -> TreePlans:
        if nodes not in self.plans:
            self.plans[nodes] = TreePlans(len(self.entry.table), nodes, self.cache.device)
        return self.plans[nodes]

    def draft(self, width: int) -> torch.Tensor:
        if self.together:
            return self._draft_together(width)
        busy = self.entry.pending.sign()
        hidden, guesses = self._read(), list[torch.Tensor]()
        if self.chained is not None and self._forced is None and self.sampler.greedy:
            chain = draft_chain(self.drafter, self.chained, hidden, self.drafted, busy, width - 1)
            if chain is not None:
                return chain
        read = self.drafted.lengths.clone()
        for number in range(1, width):
            if number > 1:
                hidden = self.drafter(self.embed(guesses[-1]), hidden, cache=self.drafted, counts=busy)
                self.drafted.commit_(busy)
            guess = self._guess(hidden, self.cache.lengths[:, None] + number)
            guesses.append(self.or_forced(number, guess))
        self.drafted.lengths.copy_(read)  # its own rows have no features yet
        return torch.cat(guesses, 1)

    def _draft_together(self, width: int) -> torch.Tensor:
        """P-EAGLE: rows of masks follow the last one with features. They are not committed."""
        rows = self._read()
        if width > 2:
            shape = (len(rows), width - 2)
            tokens = torch.full(shape, self.drafter.config.mask_token, device=rows.device)
            masked = self.drafter.masks().expand(*shape, -1)
            rows = torch.cat([rows, self.drafter(self.embed(tokens), masked, cache=self.drafted)], 1)
        guesses = self._guess(rows, self.cache.lengths[:, None] + self.slot[1:width])
        return torch.cat([self.or_forced(n, guesses[:, n - 1 : n]) for n in range(1, width)], 1)

    def _read(self) -> torch.Tensor:
        """The head's rows ``(batch, 1, hidden_size)`` after all that was fresh."""
        most, fresh = max(1, self.most), self.fresh
        hidden: torch.Tensor = self.drafter(
            self.embed(self.tokens[:, :most]), self.features[:, :most], cache=self.drafted, counts=fresh
        )
        rows = (fresh - 1).clamp(min=0)[:, None, None].expand(-1, -1, hidden.shape[-1])
        self.drafted.commit_(fresh)
        fresh.zero_()
        self.most = 0
        return hidden.gather(1, rows)

    def accept(self, draft: torch.Tensor, accepted: torch.Tensor, next_token: torch.Tensor) -> None:
        if not self.reads_rows:
            return
        last = (accepted - 1).clamp(min=0)[:, None]
        following = torch.cat([draft[:, 1:], next_token], 1).scatter(1, last, next_token)
        self.tokens.scatter_(1, self.keep_features(accepted), following)


decode = decoder(EagleSteps)


class HeadRows:
    """A head as a model that continues a text on its own rows, whose forwards can be timed."""

    def __init__(self, head: EagleHead | MtpHead, embed: Any, shared: Any) -> None:
        self.model_itself, self._embed, self.shared, self.new_cache = head, embed, shared, head.new_cache

    def __call__(self, tokens: torch.Tensor, *, cache: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        embedded = self._embed(tokens)
        hidden = self.model_itself(embedded, embedded, cache=cache)
        if rows is not None:
            hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        return logits_of(self.model_itself, hidden, self.shared)


def logits_of(head: Any, hidden: torch.Tensor, shared: Any) -> torch.Tensor:
    """The logits of rows of a head, by the target's matrix if it is `shared`."""
    logits: torch.Tensor = head.logits(hidden) if shared is None else head.logits(hidden, shared)
    return logits


def _checked_tree(
    op: str, model: Any, branches: int, nodes: int | None, slots: int, chosen: bool, vocabulary: int
) -> tuple[int, int]:
    """The branches and the rows of a step."""
    branches = min(checked_size(op, "branches", branches), vocabulary)
    if branches == 1:
        refuse(nodes is not None, op, "nodes is for trees", "Pass branches too, more than 1.")
        return 1, slots
    refuse(chosen, op, "block_size='auto' chooses lengths of chains", "Pass branches=1, or a number as block_size.")
    can_branch = "block_causal" in capabilities(model)
    check(can_branch, op, "branches", "be 1 for a model whose rows cannot branch", branches)
    most = checked_size(op, "nodes", slots * branches if nodes is None else nodes)
    check(nodes is None or 2 <= most <= _NODES, op, "nodes", f"be in 2 .. {_NODES}", most)
    return branches, min(most, _NODES, 1 + branches + max(slots - 2, 0) * branches**2)
