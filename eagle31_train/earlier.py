"""Options of earlier versions: renamed, added since, and removed."""

from typing import Any

# Old name → new name. Old names are still accepted, on the command line and in YAML files, with a note of the new one.
# Records on disk use the old names (`provenance.recorded`), so that earlier outputs stay up to date.
RENAMED: dict[str, str] = {
    "train.unroll": "train.ttt_length",
    "train.clip": "train.max_grad_norm",
    "train.warmup": "train.warmup_ratio",
    "train.min_lr": "train.min_lr_ratio",
    "train.accumulation": "train.gradient_accumulation_steps",
    "train.recompute": "train.activation_checkpointing",
    "train.workers": "train.num_workers",
    "train.fc_start": "train.fc_init_scale",
    "evaluate.draft_tokens": "evaluate.num_speculative_tokens",
    "evaluate.depths": "evaluate.max_speculative_tokens",
    "evaluate.serve_depths": "evaluate.serve_speculative_tokens",
}
# Option added later → the value that everything had until then. An option with that value is not recorded.
ADDED: dict[str, Any] = {
    "drafter.norm_before_fc": False,
    "drafter.num_layers": 1,
    "drafter.qk_norm": False,
    "drafter.sliding_window": None,
    "drafter.attention_bias": False,
    "drafter.mlp_bias": False,
    "drafter.parallel": False,
    "drafter.ptd_token_id": None,
    "train.fc_input_scale": [],
    "data.generate.top_k": None,
    "evaluate.top_k": None,
    "evaluate.timed_prompts": 5,
    "evaluate.warmup": True,
}
# Removed option → why. If given, it is ignored with a note.
REMOVED = {
    **dict.fromkeys(
        ("plan.hidden_size", "plan.vocab_size", "plan.layers"), "it is now read from the target's config.json"
    ),
    "data.draft_vocab_coverage": "set data.draft_vocab_size instead; stage 1 prints its coverage of the answers",
    "train.compile": "the fused kernels of train.kernels replace it",
    "evaluate.leave_out": "where rounding decides between equals, evaluation now says so and continues",
    "export_weights": "weights are exported in target.dtype; export_vocab_size makes a drafter smaller",
}
# Their defaults, if not null, false or empty. Such a value gets no note.
UNSET = {"export_weights": "target"}
