"""What train.compile makes of a drafter with many norms. (That it computes the same: test_recurrence.py.)"""

from dataclasses import replace
from functools import partial

import torch
from conftest import make_document, make_mla_shape, make_objective
from model.test_recurrence import trained_loss

from eagle31_train.model import norm


def test_a_compiled_mla_drafter_stays_within_the_limit_of_recompilations(monkeypatch):
    """Past it everything would run as if not compiled. Steps of other sizes, and evaluations, are variants too."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    for name in ("recompile_limit", "force_parameter_static_shapes"):  # to be put back
        monkeypatch.setattr(torch._dynamo.config, name, getattr(torch._dynamo.config, name))
    shape = make_mla_shape(hidden_size=24, target_hidden_size=16, share_embedding=False)
    objective, generator = make_objective(shape, torch.float32), torch.Generator().manual_seed(1)
    torch._dynamo.reset()
    objective.compile_kernels()
    for lengths in ((9, 14), (40,), (3,)):
        documents = [make_document(shape, length, generator) for length in lengths]
        documents = [replace(d, aux=d.aux.float(), last=d.last.float()) for d in documents]
        trained_loss(objective, documents, unroll=2)[0].backward()
        with torch.no_grad():
            trained_loss(objective, documents, unroll=2)
    variants = torch._dynamo.eval_frame._debug_get_cache_entry_list(norm.rms_norm.__code__)
    assert 8 < len(variants) < torch._dynamo.config.recompile_limit
