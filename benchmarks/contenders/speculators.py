"""speculators 0.9.0: the model as its trainer calls it, on the batch as its data loader shifts it.

Row i holds token x[i+1], auxiliary states and slot i, and the target's state at i+1. Its loss mask at row i, step k is
that of token i+1+k, one before the predicted one, and each step's mean is over its own mask. Its lm_head is frozen.
"""

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor

from benchmarks.contenders.llama import llama_config, logits_of
from benchmarks.shapes import GAMMA, Material


class Speculators:
    """One document in fp32, KL from its pure-torch losses (the fused ones are Triton kernels)."""

    def __init__(self, material: Material, unroll: int) -> None:
        shape, document = material.shape, material.document
        layer = llama_config(shape)
        layer._attn_implementation = "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape.draft_vocab_size,
            norm_before_residual=shape.norm_before_residual,
            fc_norm=shape.fc_norm,
            norm_output=shape.norm_output,
            eagle_aux_hidden_state_layer_ids=shape.aux_layers,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=unroll)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        self.model = Eagle3DraftModel(config)
        target_ids = material.target_ids
        self.model.load_vocab_mappings(material.kept, target_ids - torch.arange(len(target_ids)))
        _, unexpected = self.model.load_state_dict(
            {
                **{name.replace("midlayer.", "layers.0."): w for name, w in material.weights.items()},
                "embed_tokens.weight": material.embedding,
                "verifier_norm.weight": material.norm,
                "verifier_lm_head.weight": material.head_rows,
            },
            strict=False,
            assign=True,
        )
        assert not unexpected, unexpected
        T = len(document)
        shifted = shift_batch(
            {
                "input_ids": document.tokens,
                "hidden_states": material.states[0].flatten(1),
                "verifier_last_hidden_states": material.states[1],
                "loss_mask": document.loss_mask,
                "lengths": torch.tensor([T]),
                "position_ids": torch.arange(T),
            }
        )
        shifted.pop("lengths")
        self.batch = {name: value[None] for name, value in shifted.items()}
        self.batch["document_ids"] = torch.zeros(1, T - 1, dtype=torch.long)
        self.loss_config = resolve_loss_config("kl_div", "eager")
        self.unroll = unroll

    def loss(self) -> Tensor:
        _, loss, _ = self.model(
            **self.batch, ttt_steps=self.unroll, ttt_step_loss_decay=GAMMA, loss_config=self.loss_config
        )
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Return what it trains, all but embedding and heads."""
        named = self.model.named_parameters()
        return {name.replace("layers.0.", "midlayer."): p for name, p in named if p.requires_grad}

    def logits(self) -> Tensor:
        return logits_of(self.model.lm_head, self.loss, self.batch["input_ids"].shape[1] + 1)
