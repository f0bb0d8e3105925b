"""A regeneration that is small enough to watch: prompts, its configuration, and what it wrote."""

import json

from data_prep.regenerate import regenerate
from data_prep.template import ChatTemplate
from eagle31_train.schema import Config, DataConfig, GenerateConfig, TargetConfig

PROMPTS = [
    {"id": "one", "category": "chat", "turns": ["hello"]},
    {"id": "two", "category": "chat", "turns": ["the fox", "and?", "so?"]},
    {"id": "three", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"},
                                 {"role": "assistant", "content": "someone else's words"}]},
]  # fmt: skip


def make_config(folder, target):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    generate = GenerateConfig(max_new_tokens=6, batch_size=2)
    data = DataConfig(prompts=str(prompts), generate=generate)
    target = TargetConfig(path=str(target), dtype="float32", device="cpu")
    return Config(name="t", run_dir=str(folder / "run"), regenerate=True, target=target, data=data)


def run(config):
    path = regenerate(config, ChatTemplate.load(config.target))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
