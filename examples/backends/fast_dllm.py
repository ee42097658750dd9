"""Fast-dLLM's samplers for LLaDA: one pass over the logits for guesses and confidences, in place of a softmax in double precision.

    from examples.backends import fast_dllm, llada
    llada.patch(modeling_llada, model)
    fast_dllm.patch(generate)  # the module with `generate_with_dual_cache`

Source: Wu et al., "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding".
"""

import torch

import pdkernels as pd


def transfer_index(logits, temperature, remasking, mask_index, x, num_transfer_tokens, threshold=None):
    """In place of `get_transfer_index`: the guesses, and where they are kept."""
    if temperature > 0 or remasking != "low_confidence":
        raise NotImplementedError("greedy guesses, kept by their confidence")
    found = pd.token_statistics(logits, top_k=1)
    confidence = found.probs.masked_fill(~mask_index, -torch.inf)
    kept = torch.zeros_like(mask_index)
    if threshold is not None:
        kept = (confidence >= threshold).scatter(1, confidence.argmax(1, keepdim=True), True)
    else:
        for row, count in enumerate(num_transfer_tokens.flatten().tolist()):
            kept[row, confidence[row].topk(count).indices] = True
    return torch.where(mask_index, found.ids, x), kept


def patch(generate):
    generate.get_transfer_index = transfer_index
