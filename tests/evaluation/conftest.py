"""A tiny random target, drafters of it that are right now and then, and run folders as the stages before leave them."""

import shutil
from dataclasses import asdict

import imitating
import pytest
import torch
from configured import configured
from conftest import make_mla_shape, make_objective, make_shape
from pipeline import LAST, finish_training, save_quietly, write_data
from safetensors.torch import save_file
from talking import whole_words
from transformers import LlamaConfig, LlamaForCausalLM

from eagle31_train import compose
from eagle31_train.common import artifacts
from eagle31_train.evaluation.decoding import Limits, decode_plain
from eagle31_train.evaluation.measurer import Candidate
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.serving import server
from eagle31_train.evaluation.unrolled import Trajectory, steps
from eagle31_train.evaluation.workloads import Workload
from eagle31_train.reporting import evaluation_page
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model

# Auxiliary layer 4 of 4 is the input of the final norm, which transformers' own output cannot give.
TINY = {"hidden_size": 32, "target_hidden_size": 32, "aux_layers": [1, 2, 4]}


def tiny_shape(**changes):
    return make_shape(**{**TINY, **changes})


def random_llama(seed, **sizes):
    """A target of four layers; `initializer_range` is to be wide enough for outputs that wander."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**heads, **sizes, num_hidden_layers=4, tie_word_embeddings=False, eos_token_id=None)
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def model():
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    return random_llama(3, **sizes, initializer_range=0.3)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The environment of the imitation of vLLM's server; gives the file of its requests."""
    monkeypatch.setenv("PYTHONPATH", imitating.install(tmp_path / "site"))
    monkeypatch.setenv("IMITATION_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("IMITATION_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.2)
    return tmp_path / "requests"


@pytest.fixture
def target(model):
    return CachedTarget(model, [1, 2, 4])


# One of one token; of several lengths, so that a batch of them is ragged; of two sources.
PROMPTS = [[7, 3, 41, 20, 11, 5], [9], [30, 2, 2, 17, 40, 8, 8, 1, 25], [12, 44, 6], [3, 19, 28, 33]]


def workload_of(prompts=PROMPTS, temperature=0.0, top_p=1.0, name="made", top_k=None):
    made = [Prompt(f"p{i}", "ab"[i % 2], ids) for i, ids in enumerate(prompts)]
    return Workload(name, name, None, made, temperature, top_p, top_k=top_k)


@torch.no_grad()
def fit(drafter, target_ids, model, prompts):
    """Give a drafter the head, by ridge regression on its own states, that drafts most of what the target says."""
    target, index = CachedTarget(model, drafter.shape.aux_layers), {int(t): i for i, t in enumerate(target_ids)}
    decoded = decode_plain(target, prompts, Limits(20, []), beyond=7, states=True)
    for _ in range(5):  # other drafts make other states
        states, wanted = [], []
        for prompt, one in zip(prompts, decoded, strict=True):
            trajectory, told = Trajectory(prompt, one.tokens, one.beyond, one.aux), [*one.tokens, *one.beyond]
            if trajectory.slots == 0:
                continue
            for k, step in enumerate(steps(drafter, target_ids, trajectory, 4, drift=False)):
                known = [slot for slot in range(trajectory.slots) if told[slot + 1 + k] in index]
                states.append(step.written[known])
                wanted += [index[told[slot + 1 + k]] for slot in known]
        z, y = torch.cat(states), torch.nn.functional.one_hot(torch.tensor(wanted), len(index)).float()
        head = torch.linalg.solve(z.T @ z + 0.1 * torch.eye(z.shape[1]), z.T @ y)
        drafter.lm_head.weight.data = head.T.contiguous()


@pytest.fixture(scope="session")
def candidates(model):
    """Three drafters of one target, of different kinds, vocabularies and auxiliary layers."""
    shapes = {
        "llama": tiny_shape(draft_vocab_size=50),
        "mla": make_mla_shape(**{**TINY, "aux_layers": [1, 3, 4]}, draft_vocab_size=40),
        "other": tiny_shape(aux_layers=[2, 3], draft_vocab_size=50, fc_norm=False, norm_output=False),
    }
    found = []
    for seed, (name, shape) in enumerate(shapes.items()):
        objective = make_objective(shape, torch.float32, seed=seed)
        drafter, ids = objective.drafter.requires_grad_(False), objective.teacher.target_ids
        drafter.shared_embedding = model.get_input_embeddings().weight.data
        fit(drafter, ids, model, PROMPTS)
        found.append(Candidate(name, f"{name}-weights", drafter, ids))
    return found


WORDS = ["<unk>", "system", "user", "assistant", "brief", "hello", "world", "again"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
END = 49
LENGTHS = {"train": [12, 10, 14, 11], "heldout": [13, 10, 14, 11]}  # of samples that ask with their first three tokens
OPTIONS = ["drafter.num_attention_heads=4", "drafter.num_key_value_heads=2", "drafter.head_dim=4",
           "drafter.intermediate_size=24", "drafter.rope_theta=100.0", "drafter.max_position_embeddings=128",
           "target.aux_layers=[1,2,4]", "target.device=cpu", "evaluate.max_new_tokens=12",
           "evaluate.max_speculative_tokens=4"]  # fmt: skip


class TinyRun:
    """data/ and train/ of a run whose target is `model`, saved beside it."""

    def __init__(self, folder, model):
        self.folder, self.target = folder / "run", folder / "target"
        save_quietly(model.to(torch.float32), self.target)
        whole_words(WORDS, chat_template=TEMPLATE).save_pretrained(self.target)
        objective = make_objective(tiny_shape(), torch.float32)
        self.write_data(objective.teacher.target_ids.tolist())
        self.write_weights(objective.drafter)
        self.finish_training()

    def write_data(self, kept):
        write_data(self.folder, LENGTHS, kept=kept, target_size=50)
        splits = {split: {"conversations": len(sizes)} for split, sizes in LENGTHS.items()}
        self.tell_of_data(splits=splits, end_ids=[END])

    def tell_of_data(self, **facts):
        path = self.folder / "data" / "manifest.json"
        artifacts.write_json(path, {**artifacts.read_json(path, "the test"), **facts})

    def write_weights(self, drafter):
        checkpoint = self.folder / "train" / LAST
        checkpoint.mkdir(parents=True, exist_ok=True)
        self.weights = checkpoint / "model.safetensors"
        save_file(dict(drafter.state_dict()), self.weights)
        artifacts.write_json(checkpoint / "drafter.json", asdict(drafter.shape))

    def finish_training(self, **more):
        """With the configuration that training keeps."""
        finish_training(self.folder, **more)
        (self.folder / "train" / "config.yaml").write_text(compose.to_yaml(self.config()), encoding="utf-8")

    def another(self, name, seed=0, learnt=None):
        """One more training on the same data; one that has learnt prompts is good."""
        one = TinyRun.__new__(TinyRun)
        one.folder, one.target = self.folder.with_name(name), self.target
        shutil.copytree(self.folder, one.folder, ignore=shutil.ignore_patterns("evaluate"))
        objective = make_objective(tiny_shape(), torch.float32)
        drafter, ids = objective.drafter.requires_grad_(False), objective.teacher.target_ids
        if seed:
            generator = torch.Generator().manual_seed(seed)
            drafter.lm_head.weight.data = torch.randn(drafter.lm_head.weight.shape, generator=generator)
        if learnt:
            model = load_model(one.config().target, "float32")
            drafter.shared_embedding = model.get_input_embeddings().weight.data
            fit(drafter, ids, model, learnt)
        one.write_weights(drafter)
        one.finish_training()
        return one

    def config(self, *more):
        return configured(f"run_dir={self.folder}", f"target.path={self.target}", *OPTIONS, *more)

    @property
    def manifest(self):
        return artifacts.read_json(self.folder / "evaluate" / "manifest.json", "the test")


@pytest.fixture
def run(tmp_path, model, monkeypatch):
    monkeypatch.setattr(evaluation_page, "write", lambda folder, result: {})  # it takes most of the time
    return TinyRun(tmp_path, model)
