"""The library as its users call it, for a type checker. Nothing runs this; every ignored error must be one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import pdkernels as pd

model = pd.models.load("tiny-code")


# ---- decoding


def one(text: str) -> tuple[Tensor, str | None]:
    result = pd.decoding.generate(model, text, "jacobi", max_new_tokens=8, block_size=4, end_tokens=())
    length: int = result.tokens.shape[0]
    assert length <= result.stats.tokens
    return result.tokens, result.text


def many(texts: Sequence[str], ids: list[list[int]]) -> list[Tensor]:
    greedy = pd.decoding.generate(model, ids, trace=True, on_tokens=lambda sequence, new, accepted: None)
    other = pd.decoding.generate(model, texts, "linear_self_speculation", verification="rejection", temperature=0.5)
    first: str = "" if other.text is None else other.text[0]
    assert first or other.stats.tokens_per_second
    return [*greedy.tokens, *other.tokens]


def every_method() -> list[pd.decoding.DecodeResult[Tensor, str]]:
    ids = [3, 1, 4]
    generate = pd.decoding.generate
    return [
        generate(model, ids),
        generate(model, torch.tensor(ids), "autoregressive", temperature=1.0, seed=1, page_size=16),
        generate(model, (3, 1), "jacobi", window=8),
        generate(model, ids, "jacobi_multiblock", blocks=3),
        generate(model, ids, "linear_self_speculation", threshold=0.9),
        generate(model, ids, "quadratic_self_speculation", in_group="causal", label_shift=1),
        generate(model, ids, "block_diffusion", threshold=None, steps_per_block=4),
        generate(model, ids, "recurrent_static", recurrences=4, top_p=0.9),
        generate(model, ids, "recurrent_adaptive", criterion="kl", threshold=1e-3),
        generate(model, ids, "recurrent_self_speculation", draft_recurrences=2),
        generate(model, ids, "recurrent_diffusion", exit="fixed", headway=2),
        generate(model, ids, "llada", remasking="random", steps=4),
        generate(model, ids, "dream", algorithm="topk_margin"),
        generate(model, ids, "slowfast", cycle="mean"),
        generate(model, ids, "dllm_cache", baseline="recomputed", guidance=1.0),
        generate(model, ids, "fast_dllm", cache="prefix"),
        generate(model, ids, "fast_dllm_v2", small_block_size=4, mask_token=7),
    ]


def models_of_ones_own(transformer: pd.models.Transformer, recurrent: pd.models.RecurrentDepth) -> Tensor:
    own = pd.models.from_callable(lambda tokens: torch.zeros(*tokens.shape, 5), vocab_size=5, predicts="next")
    causal: list[pd.models.CausalModel] = [own, transformer, recurrent]
    masked: list[pd.models.BidirectionalModel] = [own, transformer]
    tri_mode: pd.models.SelfSpeculativeModel = transformer
    planning: pd.models.PlanningModel = transformer
    by_blocks: pd.models.BlockCausalModel = transformer
    waves: pd.models.RecurrentWaveModel = recurrent
    assert causal and masked and tri_mode and planning and by_blocks and waves
    any_form = pd.decoding.generate(own, {"input_ids": [1, 2]}, max_new_tokens=2)
    assert any_form.stats
    return pd.decoding.generate(own, torch.tensor([[1, 4]]), "llada", mask_token=4, infill=True, overflow="warn").tokens


def a_name_that_only_the_run_knows(name: str, options: dict[str, int]) -> Tensor:
    method: pd.decoding.Method = pd.decoding.find(name)
    return pd.decoding.generate(model, [1], method, max_new_tokens=4, **options).tokens


def a_plan() -> str:
    result = pd.decoding.generate(model, [1], "planned", sparse=True, threshold=0.9, order="confidence", joiner=" ")
    assert result.stats.plans is not None and result.stats.plans[0].critical_path > 0
    return pd.decoding.chunk_lanes([pd.decoding.ChunkStep(0, [[3]], {(0, 0): 4})])


def an_outline() -> tuple[str, int]:
    found: pd.decoding.SkeletonResult = pd.decoding.skeleton_of_thought(model, "?", "jacobi", max_point_tokens=2)
    return found.text, found.critical_path + len(found.points)


def pieces() -> str:
    found = pd.decoding.stream(model, "a", "jacobi", max_new_tokens=4, draft="lookup")
    texts = [piece.text or "" for piece in found if piece.accepted >= 0]
    found.close()
    return "".join(texts)


def facts() -> list[str]:
    names = [name for name in pd.decoding.available() if pd.decoding.supports(name, model)]
    method, options_of_default = pd.decoding.default_method(model)
    assert isinstance(options_of_default, dict)
    lossless = [name for name in names if pd.decoding.is_lossless(name)]
    seeds = [pd.decoding.sequence_seed(0, number) for number in range(2)]
    assert len(seeds) == 2
    options = [f"{name}={pd.decoding.default_option('jacobi', name)}" for name in pd.decoding.method_options("jacobi")]
    return [method, *lossless, *options, pd.show_config(), str(pd.has_native())]


def mistakes() -> None:
    pd.decoding.generate(model, [1], "jacobi", blocksize=4)  # type: ignore[call-overload]
    pd.decoding.generate(model, [1], "jacobi", block_size="4")  # type: ignore[call-overload]
    pd.decoding.generate(model, [1], "jacoby")  # type: ignore[call-overload]
    pd.decoding.generate(model, [1], "llada", window=4)  # type: ignore[call-overload]
    pd.decoding.generate(model, [1], "block_diffusion", refresh="never")  # type: ignore[call-overload]
    pd.decoding.generate(model, [1], max_tokens=4)  # type: ignore[call-overload]
    print(pd.decoding.generate(model, [[1]]).tokens.shape)  # type: ignore[attr-defined]
    print(pd.decoding.generate(model, [1]).texts)  # type: ignore[attr-defined]
    pd.decoding.suits("jacobi", model)  # type: ignore[attr-defined]
    pd.silu_gate(torch.ones(2))  # type: ignore[attr-defined]
    pd.silu_and_mul(torch.ones(2), backend="cuda")  # type: ignore[arg-type]


# ---- ops


def attention(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> None:
    plan = pd.masks.quadratic(4).plan(32, 32)
    pd.block_sparse_attention(q, k, v, plan, scale=0.5)
    pd.speculative_attention(q, k, v, k_cache, v_cache, lengths, plan, backend="reference")
    pd.speculative_attention_append_(q, k, v, k_cache, v_cache, lengths, plan)


def caches(k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
    pd.kv_append_(k, v, k_new, v_new, lengths, counts=lengths)
    pd.kv_commit_([k], [v], lengths, lengths, index)
    pd.kv_trim_(lengths, lengths)
    pd.kv_append_(k, v, pd.kv_quantize(k_new), pd.kv_quantize(v_new), lengths)
    rows: Tensor = pd.select_stale_rows_(v_new, v, lengths, max_selected=4)
    return pd.add_cached_rows_(pd.gather_rows(k, rows), k, rows, index)


def states(
    state: Tensor, pending: tuple[Tensor, Tensor, Tensor], x: Tensor, gate: Tensor, lengths: Tensor, index: Tensor
) -> Tensor:
    delta = (x, x, x, gate, gate, lengths)
    out: Tensor = pd.gated_delta_(state, lengths, *pending, *delta, pending_index=index, keep=4, l2norm_eps=1e-6)
    out = out + pd.selective_state_(state, lengths, x, x, None, x, x, x, None, gate, lengths, dt_limit=(0.0, 1.0))
    pd.state_commit_(lengths, index, [lengths, lengths], lengths, index, advance=False)
    pd.state_trim_(lengths, lengths, lengths)
    return out + pd.short_conv_(state, lengths, x, x, x, lengths, activation="silu")


def tokens(logits: Tensor, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logits = logits if logits.numel() else pd.linear(hidden, weight)
    logits = pd.filter_logits(logits, banned=ids, repetition_penalty=1.1)
    filters = pd.LogitFilters(bias=logits[0])
    guesses: pd.TokenStatistics = pd.token_statistics(logits, temperature=1.0, suppress=(7,), filters=filters)
    guesses = pd.token_statistics(logits, temperature=1.0, keep_top_k=20, typical_p=0.9, distribution="sampling")
    packed: pd.QuantizedWeight = pd.quantize(weight, "q4_0")
    hidden = hidden + pd.quantized_embedding(ids, packed, hidden.dtype)
    logits = logits + pd.quantized_linear(hidden, packed)
    experts = pd.quantize(weight[None], "int8")
    logits = pd.grouped_linear(hidden, weight[None], ids) + pd.quantized_grouped_linear(hidden, experts, ids)
    head: pd.TokenStatistics = pd.linear_token_statistics(hidden, weight, top_k=2)
    filled: pd.Unmasked = pd.unmask_(ids, guesses.ids, head.probs, mask_token=7, threshold=0.9)
    verdict: pd.DraftVerdict = pd.verify_draft(ids, guesses.ids)
    moved: pd.LogitDivergence = pd.logit_divergence(logits, logits)
    pd.log_step_(ids, ids, ids, ids)
    pd.draft_lengths_(ids, ids, ids, logits, logits, ids, logits, warmup_cost=0.1)
    pd.lookup_draft_(ids, ids, ids, ids, start=3, max_match=4)
    return filled.remaining + verdict.accepted + moved.argmax


def layers(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, ids: Tensor) -> Tensor:
    normed, residual = pd.add_rms_norm(x, None, weight, eps=1e-5)
    pd.apply_rope_(x, cos, sin, ids, style="half")
    pd.apply_rope_append_(x, None, cos, sin, x, x, ids)
    state = pd.recurrence_inject(x, x, None, ids, ids, ids, ids, ids, schedule="harmonic", mixer="sqrt")
    exits: pd.RecurrenceExit = pd.recurrence_exit(state, x, weight, None, ids, ids, ids, threshold=0.03)
    pd.recurrence_advance_(ids, ids, ids, ids, ids, ids, ids, ids, ids, inner_recurrence=4, rule="last")
    gates = pd.silu_and_mul(normed), pd.gelu_and_mul(normed if residual is None else residual)
    return gates[0] + gates[1] + exits.distance
