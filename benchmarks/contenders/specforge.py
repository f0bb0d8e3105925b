"""SpecForge 0.2.0: its offline EAGLE-3 strategy's forward, with target logits given for free.

Row i holds token x[i+1], auxiliary states and slot i, and the target's logits at i+1. Its loss mask at row i, step k is
that of token i+k, two before the predicted one, and it averages over all rows. Its lm_head is trained.
"""

import warnings

import torch
from torch import Tensor

with warnings.catch_warnings():  # it warns that flash-attn is missing
    warnings.simplefilter("ignore")
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

from specforge.utils import padding

from benchmarks.contenders.llama import llama_config, logits_of
from benchmarks.shapes import GAMMA, Material


class TorchLoss:
    """Replaces its Triton loss, which needs a GPU, by its own reference implementation."""

    apply = staticmethod(_compute_loss)


class SpecForge:
    """One document in fp32, soft cross-entropy. Its `norm_output` differs from EAGLE 3.1's: on, as here, lm_head reads
    normed states, but the state that it feeds back is always the one before the norm."""

    def __init__(self, material: Material, unroll: int) -> None:
        shape, document = material.shape, material.document
        eagle3.LogSoftmaxLoss = TorchLoss
        config = llama_config(
            shape,
            draft_vocab_size=shape.draft_vocab_size,
            target_hidden_size=shape.target_hidden_size,
            fc_norm=shape.fc_norm,
            norm_output=True,
        )
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        target_ids = material.target_ids
        draft.load_state_dict(
            {
                **material.weights,
                "embed_tokens.weight": material.embedding,
                "t2d": material.kept,
                "d2t": target_ids - torch.arange(len(target_ids)),
            },
            assign=True,
        )
        draft.freeze_embedding()
        self.model = eagle3.OnlineEagle3Model(draft, length=unroll, attention_backend="sdpa")

        taught = material.teacher_logits()
        if shape.draft_vocab_size < shape.vocab_size:  # it needs all columns; those that it drops must not win
            full = taught.new_full((len(taught), shape.vocab_size), float(taught.min()) - 1.0)
            full[:, target_ids] = taught
            taught = full
        taught = padding(taught[None], left=False)  # in place of TargetHead's shift and product
        self.batch = {
            "input_ids": padding(document.tokens[None], left=False),
            "attention_mask": torch.ones(1, len(document), dtype=torch.long),
            "target": taught,
            "loss_mask": document.loss_mask[None, :, None].long(),
            "hidden_states": material.states[0].flatten(1)[None],
        }

    def loss(self) -> Tensor:
        losses, *_ = self.model(**self.batch)
        return torch.stack([GAMMA**k * loss for k, loss in enumerate(losses)]).sum()

    def parameters(self) -> dict[str, Tensor]:
        """Return what it trains, all but the embedding. Its names are the checkpoint's."""
        return {name: p for name, p in self.model.draft_model.named_parameters() if p.requires_grad}

    def logits(self) -> Tensor:
        return logits_of(self.model.draft_model.lm_head, self.loss, self.batch["input_ids"].shape[1])
