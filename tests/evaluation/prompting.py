"""A target's tokenizer, held-out data and sets of prompts, in a folder."""

import json
from pathlib import Path

import pytest
from configured import configured
from datasets import Dataset, DatasetDict
from talking import make_tokenizer

from eagle31_train.cli import load_config
from eagle31_train.evaluation.workloads import workloads

MANIFEST = {"splits": {"heldout": {"conversations": 4}}}
QUESTIONS = ["hello", "how are you?", "what is the question here?", "the quick brown fox jumps over the lazy dog"]
GOOD = {"q": "hello", "n": 1}


class Place:
    """A target's tokenizer, the data of stage 1 and files of prompts, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = make_tokenizer()
        self.tokenizer.save_pretrained(folder / "target")
        self.write_heldout([[{"role": "user", "content": text}] for text in QUESTIONS])

    def write_heldout(self, prompts, answer="answer {} tells of a river, and why nobody crosses it"):
        asked = [self.tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        answers = [self.tokenizer.encode(answer.format(i) + "<|im_end|>") for i in range(len(prompts))]
        columns = {
            "id": [f"c{i}" for i in range(len(prompts))],
            "source": ["a", "b"] * (len(prompts) // 2),
            "input_ids": [a + b for a, b in zip(asked, answers, strict=True)],
            "loss_mask": [[False] * len(a) + [True] * len(b) for a, b in zip(asked, answers, strict=True)],
        }
        DatasetDict({"heldout": Dataset.from_dict(columns)}).save_to_disk(str(self.folder / "data" / "dataset"))

    def write(self, name, *rows):
        file = self.folder / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def config(self, *more):
        target = [f"target.path={self.folder / 'target'}", f"data_dir={self.folder / 'data'}", "data.max_length=200"]
        if any(option.startswith("suite=") for option in more):
            return load_config(["+experiment=smollm2", *target, *more])
        return configured(*target, *more)

    def workloads(self, *more, longest=5000, data=MANIFEST, measured_on=()):
        return workloads(self.config(*more), data, longest, measured_on=measured_on)

    def suite(self, *more, **options):
        """The workload of one suite, called `s`."""
        given = [f"evaluate.suites.s.{key}={value}" for key, value in options.items()]
        return self.workloads(*given, *more)[1]

    def texts(self, workload):
        """What the user says in each prompt."""
        return [self.tokenizer.decode(p.ids).split("user\n")[1].split("<|im_end|>")[0] for p in workload.prompts]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)
